# Defines xllm_executor::executor (the bridge, compiled by this project against its own torch), xllm_executor::torch (the libtorch of the
# Python environment) and xllm_metadata::metadata (the step contract's headers).
#
# The Python environment is that of Python_EXECUTABLE; it must have xllm-executor installed, and the interpreter that the
# bridge starts is that one unless the program says otherwise.
#
# xllm_executor::executor is an imported target. So a library that links it can be installed and exported: its own users call
# find_dependency(xllm_executor), and compile the bridge against their own torch. Programs have the folders of libtorch and
# libpython in their runtime path, also after install() and in another folder.
cmake_minimum_required(VERSION 3.20)

if(TARGET xllm_executor::executor)
  set(xllm_executor_FOUND TRUE)
  return()
endif()

# Ends the search for the package with one message.
macro(_xllm_refuse message)
  set(xllm_executor_FOUND FALSE)
  set(xllm_executor_NOT_FOUND_MESSAGE "${message}")
  return()
endmacro()

get_property(_xllm_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
if(NOT "CXX" IN_LIST _xllm_languages)
  _xllm_refuse("the bridge is compiled by this project, which does not enable CXX")
endif()

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Embed)
list(GET Python_LIBRARIES 0 _xllm_libpython)
if(_xllm_libpython MATCHES "\\.a$")
  _xllm_refuse("${_xllm_libpython} is a static libpython; torch needs a shared one (Python built with --enable-shared)")
endif()
get_filename_component(_xllm_libpython_dir "${_xllm_libpython}" DIRECTORY)

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/locate.py"
  OUTPUT_VARIABLE _xllm_paths
  ERROR_VARIABLE _xllm_error
  RESULT_VARIABLE _xllm_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT _xllm_result EQUAL 0)
  _xllm_refuse("${Python_EXECUTABLE} cannot locate torch and xllm-metadata:\n${_xllm_error}")
endif()
list(GET _xllm_paths 0 _xllm_torch_dir)
list(GET _xllm_paths 1 _xllm_metadata_cmake_dir)

# The C++ ABI of libstdc++ that torch was built with, and that of this project with its flags and definitions.
set(_xllm_abi 1)
if(EXISTS "${_xllm_torch_dir}/share/cmake/Torch/TorchConfig.cmake")
  file(STRINGS "${_xllm_torch_dir}/share/cmake/Torch/TorchConfig.cmake" _xllm_line REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(_xllm_line)
    set(_xllm_abi 0)
  endif()
endif()
include(CheckCXXSourceCompiles)
include(CMakePushCheckState)
get_directory_property(_xllm_definitions COMPILE_DEFINITIONS)
get_directory_property(_xllm_options COMPILE_OPTIONS)
string(GENEX_STRIP "${_xllm_definitions}" _xllm_definitions)
string(GENEX_STRIP "${_xllm_options}" _xllm_options)
list(TRANSFORM _xllm_definitions PREPEND "-D")
cmake_push_check_state(RESET)
set(CMAKE_REQUIRED_QUIET TRUE)
set(CMAKE_REQUIRED_DEFINITIONS ${_xllm_definitions} ${_xllm_options})
set(CMAKE_TRY_COMPILE_TARGET_TYPE_SAVED "${CMAKE_TRY_COMPILE_TARGET_TYPE}")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY) # without a link
unset(_xllm_has_abi CACHE) # the flags may have changed
check_cxx_source_compiles("
#include <string>
#if defined(__GLIBCXX__) && _GLIBCXX_USE_CXX11_ABI != ${_xllm_abi}
#error \"another ABI\"
#endif
" _xllm_has_abi)
set(CMAKE_TRY_COMPILE_TARGET_TYPE "${CMAKE_TRY_COMPILE_TARGET_TYPE_SAVED}")
cmake_pop_check_state()
if(NOT _xllm_has_abi)
  _xllm_refuse("${_xllm_torch_dir} has _GLIBCXX_USE_CXX11_ABI=${_xllm_abi}; this project's compiler and flags have not")
endif()

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
  target_compile_definitions(xllm_executor::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${_xllm_abi})
endif()

find_package(Threads REQUIRED)
set(_xllm_bridge "${CMAKE_CURRENT_LIST_DIR}/../bridge")
file(GLOB _xllm_sources CONFIGURE_DEPENDS "${_xllm_bridge}/src/*.cpp")
add_library(xllm_executor_bridge STATIC EXCLUDE_FROM_ALL ${_xllm_sources})
set_target_properties(xllm_executor_bridge PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
# The bridge runs this Python code before any package can be imported, so it holds the code's text.
file(READ "${CMAKE_CURRENT_LIST_DIR}/../streams.py" _xllm_streams)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/../streams.py")
file(CONFIGURE OUTPUT xllm_executor/embedded_python.h @ONLY CONTENT
"#pragma once
namespace xllm_executor {
inline constexpr const char* kStreamsSource = R\"python(@_xllm_streams@)python\";
}
")
target_include_directories(xllm_executor_bridge
  PUBLIC "${_xllm_bridge}/include"
  PRIVATE "${_xllm_bridge}/src" "${CMAKE_CURRENT_BINARY_DIR}/xllm_executor"
  SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
target_compile_definitions(xllm_executor_bridge PRIVATE "XLLM_EXECUTOR_PYTHON=\"${Python_EXECUTABLE}\"")
# Files instead of Python::Python and Threads::Threads: those targets exist only in the directory that found them.
target_link_libraries(xllm_executor_bridge
  PUBLIC xllm_metadata::metadata xllm_executor::torch
  PRIVATE "${_xllm_torch_dir}/lib/libtorch_python.so" ${Python_LIBRARIES} ${CMAKE_THREAD_LIBS_INIT} ${CMAKE_DL_LIBS})
target_compile_features(xllm_executor_bridge PUBLIC cxx_std_20)
# As linker options, which install() keeps. It removes the runtime path that CMake derives from linked libraries.
target_link_options(xllm_executor_bridge
  INTERFACE "LINKER:-rpath,${_xllm_torch_dir}/lib" "LINKER:-rpath,${_xllm_libpython_dir}")

add_library(xllm_executor::executor INTERFACE IMPORTED GLOBAL)
target_link_libraries(xllm_executor::executor INTERFACE xllm_executor_bridge)

set(xllm_executor_FOUND TRUE)
