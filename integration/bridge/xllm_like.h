// xLLM's own names as its headers have them: namespace xllm, structs of these names with other members, and macros.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#define PROPERTY(T, property)                                      \
 public:                                                           \
  [[nodiscard]] const T& property() const { return property##_; }  \
  void property(T value) { property##_ = std::move(value); }       \
                                                                   \
 private:                                                          \
  T property##_
#define DEFINE_ARG(T, name) PROPERTY(T, name)
#define REFLECT_PROPERTIES() static_assert(true)

namespace xllm {

struct ModelArgs {
  PROPERTY(std::vector<std::string>, architectures) = {"Xllm"};
  PROPERTY(int64_t, model_type) = 1;
  PROPERTY(std::string, dtype) = "a dtype that is too long for the small buffer of a string";
};

struct ParallelArgs {
  PROPERTY(int32_t, world_size) = 4;
  PROPERTY(std::vector<int32_t>, ranks) = {0, 1, 2, 3};
};

struct AttentionMetadata {
  PROPERTY(std::vector<int32_t>, slot_mapping) = {7, 8};
};

struct Property {
  PROPERTY(std::string, name) = "a property";
};

ModelArgs make_model_args();
ParallelArgs make_parallel_args();

}  // namespace xllm
