/// @file
/// Property reflection without dependencies: the macros XLLM_METADATA_PROPERTY and XLLM_METADATA_REFLECT, and a visitor
/// over properties.
///
///   struct Shape {
///     XLLM_METADATA_REFLECT();               // opts in; must precede the first XLLM_METADATA_PROPERTY
///     XLLM_METADATA_PROPERTY(int64_t, width) = 1;
///     XLLM_METADATA_PROPERTY(std::optional<std::string>, name);
///   };
///   Shape shape;
///   shape.width(3).name("a");             // setters chain
///   for_each_property(shape, [](std::string_view name, auto& value) { ... });
#pragma once

#include <string_view>
#include <type_traits>
#include <utility>

/// A property's index is the distance of __COUNTER__ from the struct's XLLM_METADATA_REFLECT, so that it is the same in
/// every translation unit. In a struct without XLLM_METADATA_REFLECT the name resolves to this global; such a struct has
/// no reflected properties.
inline constexpr int xllm_metadata_property_begin = -1;

namespace xllm_metadata {

/// Index of a property in its struct.
template <int Index>
using PropertyIndex = std::integral_constant<int, Index>;

/// Name and member pointer of one property.
template <class Member>
struct Property {
  std::string_view name;
  Member member;
};

namespace detail {

/// Limit of a property's index. Indices may have gaps, where __COUNTER__ is used between two properties.
inline constexpr int kMaxProperties = 256;

template <class Struct, int Index>
concept HasProperty = requires { Struct::template property_at<Struct>(PropertyIndex<Index>{}); };

/// Visits the properties with indices in [Begin, End). Halves the range, so that instantiation depth grows only with its
/// logarithm.
template <class Struct, int Begin, int End, class Visitor>
constexpr void visit_properties(Visitor& visitor) {
  if constexpr (End - Begin > 1) {
    constexpr int middle = Begin + (End - Begin) / 2;
    visit_properties<Struct, Begin, middle>(visitor);
    visit_properties<Struct, middle, End>(visitor);
  } else if constexpr (HasProperty<Struct, Begin>) {
    visitor(Struct::template property_at<Struct>(PropertyIndex<Begin>{}));
  }
}

}  // namespace detail

/// Whether a type opted in with XLLM_METADATA_REFLECT.
template <class T>
concept Reflected = requires { typename T::xllm_metadata_reflected; };

/// Calls visitor(Property) for every property of Struct, in the order of declaration. Needs no object.
template <Reflected Struct, class Visitor>
constexpr void for_each_property_of(Visitor&& visitor) {
  detail::visit_properties<Struct, 0, detail::kMaxProperties>(visitor);
}

/// Calls visitor(name, value) for every property of the object; value is const when the object is.
template <class Struct, class Visitor>
  requires Reflected<std::remove_cv_t<Struct>>
constexpr void for_each_property(Struct& object, Visitor&& visitor) {
  for_each_property_of<std::remove_cv_t<Struct>>(
      [&](auto property) { visitor(property.name, object.*property.member); });
}

}  // namespace xllm_metadata

/// Opts a struct in to reflection.
#define XLLM_METADATA_REFLECT()                                    \
 public:                                                           \
  using xllm_metadata_reflected = void;                            \
  static constexpr int xllm_metadata_property_begin = __COUNTER__; \
  static_assert(true)

/// Declares a property: getters, a chaining setter and the member, which may be given a default:
///   XLLM_METADATA_PROPERTY(int, n) = 1;
/// The type must be a single macro argument: name a type that contains a comma with `using` first.
#define XLLM_METADATA_PROPERTY(type, property)                                                                  \
 public:                                                                                                        \
  [[nodiscard]] const type& property() const& noexcept { return property##_; }                                  \
  [[nodiscard]] type& property() & noexcept { return property##_; }                                             \
  auto& property(type value) & {                                                                                \
    property##_ = std::move(value);                                                                             \
    return *this;                                                                                               \
  }                                                                                                             \
  template <class Self>                                                                                         \
  static constexpr auto property_at(                                                                            \
      ::xllm_metadata::PropertyIndex<__COUNTER__ - xllm_metadata_property_begin - 1>) {                         \
    return ::xllm_metadata::Property<decltype(&Self::property##_)>{#property, &Self::property##_};              \
  }                                                                                                             \
                                                                                                                \
 private:                                                                                                       \
  type property##_
