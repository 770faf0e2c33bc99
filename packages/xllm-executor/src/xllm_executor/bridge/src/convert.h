// Internal: converts values between C++ and Python; structs by property reflection.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "xllm_metadata/property.h"

namespace xllm_executor {

namespace detail {

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

}  // namespace detail

// An optional becomes None or its value, a vector a list, a reflected struct a dict; scalars and strings stay as they
// are.
template <class T>
[[nodiscard]] pybind11::object to_python(const T& value) {
  if constexpr (detail::IsOptional<T>::value) {
    return value.has_value() ? to_python(*value) : pybind11::object(pybind11::none());
  } else if constexpr (detail::IsVector<T>::value) {
    pybind11::list list;
    for (const auto& item : value) {
      list.append(to_python(item));
    }
    return list;
  } else if constexpr (xllm_metadata::Reflected<T>) {
    pybind11::dict dict;
    xllm_metadata::for_each_property(value, [&](std::string_view name, const auto& member) {
      dict[pybind11::str(name.data(), name.size())] = to_python(member);
    });
    return dict;
  } else {
    return pybind11::cast(value);
  }
}

// Converts a Python value into `target`; errors name it by `path`. Throws std::invalid_argument.
template <class T>
void from_python(pybind11::handle source, const std::string& path, T& target);

namespace detail {

[[noreturn]] inline void wrong_type(pybind11::handle source, const std::string& path, const char* wanted) {
  throw std::invalid_argument(path + " is " + std::string(pybind11::repr(source)) + "; it must be " + wanted);
}

template <class T>
void scalar_from_python(pybind11::handle source, const std::string& path, T& target) {
  if constexpr (std::is_same_v<T, bool>) {
    if (!PyBool_Check(source.ptr())) {
      wrong_type(source, path, "a bool");
    }
  } else if constexpr (std::is_integral_v<T>) {
    if (!PyLong_Check(source.ptr()) || PyBool_Check(source.ptr())) {
      wrong_type(source, path, "an int");
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    if (!PyFloat_Check(source.ptr()) && (!PyLong_Check(source.ptr()) || PyBool_Check(source.ptr()))) {
      wrong_type(source, path, "a float");
    }
  } else {
    if (!PyUnicode_Check(source.ptr())) {
      wrong_type(source, path, "a str");
    }
  }
  try {
    target = source.cast<T>();
  } catch (const pybind11::cast_error&) {
    wrong_type(source, path, "within the range of its C++ type");
  }
}

template <class T>
void struct_from_python(pybind11::handle source, const std::string& path, T& target) {
  if (!PyDict_Check(source.ptr())) {
    wrong_type(source, path, "a dict");
  }
  const auto dict = pybind11::reinterpret_borrow<pybind11::dict>(source);
  std::set<std::string> unknown;
  for (const auto& item : dict) {
    unknown.insert(std::string(pybind11::str(item.first)));
  }
  xllm_metadata::for_each_property(target, [&](std::string_view name, auto& member) {
    const pybind11::str key(name.data(), name.size());
    if (dict.contains(key)) {
      from_python(dict[key], path + "." + std::string(name), member);
      unknown.erase(std::string(name));
    }
  });
  if (!unknown.empty()) {
    std::string names;
    for (const std::string& name : unknown) {
      names += (names.empty() ? "" : ", ") + name;
    }
    throw std::invalid_argument(path + " has unknown keys: " + names);
  }
}

}  // namespace detail

template <class T>
void from_python(pybind11::handle source, const std::string& path, T& target) {
  if constexpr (detail::IsOptional<T>::value) {
    if (source.is_none()) {
      target.reset();
    } else {
      from_python(source, path, target.emplace());
    }
  } else if constexpr (detail::IsVector<T>::value) {
    if (!PyList_Check(source.ptr()) && !PyTuple_Check(source.ptr())) {
      detail::wrong_type(source, path, "a list");
    }
    target.clear();
    for (const auto& item : source) {
      const std::string item_path = path + "[" + std::to_string(target.size()) + "]";
      from_python(item, item_path, target.emplace_back());
    }
  } else if constexpr (xllm_metadata::Reflected<T>) {
    detail::struct_from_python(source, path, target);
  } else {
    detail::scalar_from_python(source, path, target);
  }
}

}  // namespace xllm_executor
