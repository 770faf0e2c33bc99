// Collectives of the native model, over the same c10d process group as the Python model's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>

namespace c10d {
class ProcessGroup;
}

namespace xllm_worker::native {

// Number of calls, and bytes of this rank's inputs.
struct Traffic {
  int64_t num_calls = 0;
  int64_t num_bytes = 0;
};

// Returns a function that counts the collectives this rank has started in the named group. It keeps the group alive.
std::function<int64_t()> count_collectives(const std::string& group_name);

class Collectives {
 public:
  Collectives();  // one rank: no collectives
  // Uses the named group of c10d's registry. Throws std::runtime_error when it is missing or rank or size differ.
  Collectives(const std::string& group_name, int64_t rank, int64_t size);
  ~Collectives();
  Collectives(Collectives&&) noexcept;
  Collectives& operator=(Collectives&&) noexcept;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  // Sums x (contiguous) over the ranks, in place.
  void all_reduce(at::Tensor& x);

  // Concatenates the ranks' x along dimension 0, in rank order.
  at::Tensor all_gather(const at::Tensor& x);

  const Traffic& all_reduced() const { return all_reduced_; }
  const Traffic& all_gathered() const { return all_gathered_; }

  // Drops the reference to the group, which can then be destroyed.
  void release();

 private:
  int64_t rank_ = 0;
  int64_t size_ = 1;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  Traffic all_reduced_;
  Traffic all_gathered_;
};

}  // namespace xllm_worker::native
