#include "native/collectives.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <stdexcept>

namespace xllm_worker::native {

namespace {

void count(Traffic& traffic, const at::Tensor& x) {
  ++traffic.num_calls;
  traffic.num_bytes += x.numel() * static_cast<int64_t>(x.element_size());
}

// torch 2.13 renamed this method and deprecated the old name.
template <class Group>
auto gather_into(Group& group, at::Tensor& out, at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(out, input); }) {
    return group.all_gather_single(out, input);
  } else {
    return group._allgather_base(out, input);
  }
}

}  // namespace

std::function<int64_t()> count_collectives(const std::string& group_name) {
  return [group = c10d::resolve_process_group(group_name)] {
    return static_cast<int64_t>(group->getSequenceNumberForGroup());
  };
}

Collectives::Collectives() = default;
Collectives::~Collectives() = default;
Collectives::Collectives(Collectives&&) noexcept = default;
Collectives& Collectives::operator=(Collectives&&) noexcept = default;

Collectives::Collectives(const std::string& group_name, int64_t rank, int64_t size)
    : rank_(rank), size_(size), group_(c10d::resolve_process_group(group_name)) {
  if (group_->getSize() != size || group_->getRank() != rank) {
    throw std::runtime_error("process group '" + group_name + "' has this process as rank " +
                             std::to_string(group_->getRank()) + " of " + std::to_string(group_->getSize()) +
                             "; the model is rank " + std::to_string(rank) + " of " + std::to_string(size));
  }
}

void Collectives::all_reduce(at::Tensor& x) {
  if (size_ == 1) return;
  count(all_reduced_, x);
  std::vector<at::Tensor> tensors{x};
  group_->allreduce(tensors)->wait();
}

at::Tensor Collectives::all_gather(const at::Tensor& x) {
  if (size_ == 1) return x;
  count(all_gathered_, x);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.at(0) *= size_;
  at::Tensor out = x.new_empty(shape);
  at::Tensor input = x.contiguous();
  gather_into(*group_, out, input)->wait();
  return out;
}

void Collectives::release() { group_.reset(); }

}  // namespace xllm_worker::native
