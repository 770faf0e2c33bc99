// The collectives of a model in C++: over the same c10d group as the Python model's, without Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>

namespace c10d {
class ProcessGroup;
}

namespace xllm::worker::native {

// Calls, and bytes of this rank's inputs.
struct Traffic {
  int64_t num_calls = 0;
  int64_t num_bytes = 0;
};

// How many collectives this rank has begun in the group of that name; the function holds the group.
std::function<int64_t()> count_collectives(const std::string& group_name);

class Collectives {
 public:
  Collectives();  // one rank: nothing to do
  // The group of that name in c10d's registry. Throws std::runtime_error when it is not there or not of that size.
  Collectives(const std::string& group_name, int64_t rank, int64_t size);
  ~Collectives();
  Collectives(Collectives&&) noexcept;
  Collectives& operator=(Collectives&&) noexcept;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  // Sums x (contiguous) over the ranks, in place.
  void all_reduce(at::Tensor& x);

  // The ranks' x one after another along dimension 0.
  at::Tensor all_gather(const at::Tensor& x);

  const Traffic& all_reduced() const { return all_reduced_; }
  const Traffic& all_gathered() const { return all_gathered_; }

  // Lets go of the group, which can then be destroyed.
  void release();

 private:
  int64_t rank_ = 0;
  int64_t size_ = 1;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  Traffic all_reduced_;
  Traffic all_gathered_;
};

}  // namespace xllm::worker::native
