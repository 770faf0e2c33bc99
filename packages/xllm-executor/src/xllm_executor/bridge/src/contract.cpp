#include "contract.h"

#include <ATen/Context.h>

#include <optional>
#include <type_traits>

#include "xllm_metadata/attention_metadata.h"
#include "xllm_metadata/version.h"

namespace xllm_executor {

namespace {

template <class T>
struct Describe {
  static constexpr bool optional = false;
  static constexpr const char* type_name() {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return "tensor";
    } else if constexpr (std::is_same_v<T, bool>) {
      return "bool";
    } else {
      static_assert(std::is_integral_v<T>, "a metadata field is a tensor, an int or a bool");
      return "int";
    }
  }
};

template <class T>
struct Describe<std::optional<T>> : Describe<T> {
  static constexpr bool optional = true;
};

}  // namespace

std::pair<int, int> contract_version() {
  return {xllm_metadata::kContractVersionMajor, xllm_metadata::kContractVersionMinor};
}

std::vector<std::tuple<std::string, std::string, bool>> describe_contract() {
  std::vector<std::tuple<std::string, std::string, bool>> fields;
  using xllm_metadata::AttentionMetadata;
  using xllm_metadata::Property;
  const auto visit = [&]<class Member>(Property<Member AttentionMetadata::*> property) {
    fields.emplace_back(std::string(property.name), Describe<Member>::type_name(), Describe<Member>::optional);
  };
  xllm_metadata::for_each_property_of<AttentionMetadata>(visit);
  return fields;
}

void* linked_torch_symbol() { return reinterpret_cast<void*>(&at::globalContext); }

}  // namespace xllm_executor
