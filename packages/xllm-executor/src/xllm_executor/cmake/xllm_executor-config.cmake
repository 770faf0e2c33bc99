# Defines xllm_executor::executor (the bridge, compiled by this project against its own torch), xllm_executor::torch (the libtorch of the
# Python environment) and xllm_metadata::metadata (the step contract's headers).
#
# The Python environment is that of Python_EXECUTABLE; it must have xllm-executor installed, and the interpreter that the
# bridge starts is that one unless the program says otherwise.
cmake_minimum_required(VERSION 3.20)

if(TARGET xllm_executor::executor)
  set(xllm_executor_FOUND TRUE)
  return()
endif()

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Embed)

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/locate.py"
  OUTPUT_VARIABLE _xllm_paths
  ERROR_VARIABLE _xllm_error
  RESULT_VARIABLE _xllm_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT _xllm_result EQUAL 0)
  set(xllm_executor_FOUND FALSE)
  set(xllm_executor_NOT_FOUND_MESSAGE "${Python_EXECUTABLE} cannot locate torch and xllm-metadata:\n${_xllm_error}")
  return()
endif()
list(GET _xllm_paths 0 _xllm_torch_dir)
list(GET _xllm_paths 1 _xllm_metadata_cmake_dir)

include("${_xllm_metadata_cmake_dir}/xllm_metadata-config.cmake")

# find_package(Torch) demands a CUDA toolkit whenever torch was built with CUDA. The bridge includes no CUDA header, so
# it needs the libraries only; a host that has called find_package(Torch) gets that target instead.
if(NOT TARGET xllm_executor::torch)
  add_library(xllm_executor::torch INTERFACE IMPORTED GLOBAL)
  if(TARGET torch)
    target_link_libraries(xllm_executor::torch INTERFACE torch)
  else()
    target_include_directories(xllm_executor::torch SYSTEM INTERFACE
      "${_xllm_torch_dir}/include" "${_xllm_torch_dir}/include/torch/csrc/api/include")
    foreach(_xllm_library torch torch_cpu c10)
      target_link_libraries(xllm_executor::torch INTERFACE "${_xllm_torch_dir}/lib/lib${_xllm_library}.so")
    endforeach()
  endif()
  target_compile_features(xllm_executor::torch INTERFACE cxx_std_20)
endif()

find_package(Threads REQUIRED)
set(_xllm_bridge "${CMAKE_CURRENT_LIST_DIR}/../bridge")
file(GLOB _xllm_sources CONFIGURE_DEPENDS "${_xllm_bridge}/src/*.cpp")
add_library(xllm_executor_bridge STATIC EXCLUDE_FROM_ALL ${_xllm_sources})
set_target_properties(xllm_executor_bridge PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
target_include_directories(xllm_executor_bridge PUBLIC "${_xllm_bridge}/include" PRIVATE "${_xllm_bridge}/src")
# The bridge runs this Python code before any package can be imported, so it holds the code's text.
file(READ "${CMAKE_CURRENT_LIST_DIR}/../streams.py" _xllm_streams)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/../streams.py")
file(CONFIGURE OUTPUT xllm_executor/embedded_python.h @ONLY CONTENT
"#pragma once
namespace xllm_executor {
inline constexpr const char* kStreamsSource = R\"python(@_xllm_streams@)python\";
}
")
target_include_directories(xllm_executor_bridge PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/xllm_executor")
target_compile_definitions(xllm_executor_bridge PRIVATE "XLLM_EXECUTOR_PYTHON=\"${Python_EXECUTABLE}\"")
target_link_libraries(xllm_executor_bridge
  PUBLIC xllm_metadata::metadata xllm_executor::torch
  PRIVATE "${_xllm_torch_dir}/lib/libtorch_python.so" Python::Python Threads::Threads ${CMAKE_DL_LIBS})
target_compile_features(xllm_executor_bridge PUBLIC cxx_std_20)
add_library(xllm_executor::executor ALIAS xllm_executor_bridge)

set(xllm_executor_FOUND TRUE)
