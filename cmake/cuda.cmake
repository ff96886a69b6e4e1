# The CUDA backend. Its host code needs nothing of CUDA, neither to build nor to run, and is in every native build; only its
# kernels need nvcc: the one that CUDACXX names, one on PATH, or the one that `npm run setup` put in .toolchain/cuda.
#   KVP_CUDA          OFF, or the environment variable KVPAGES_CUDA=off: without the backend
#   KVP_CUDA_KERNELS  ON, OFF, or AUTO: kernels where an nvcc is found
# Sets KVP_NVCC, KVP_CUDA_SOURCES and, where the binary has the kernels, KVP_CUDA_FATBIN, which KVP_CUDA_IMAGE takes in.
option(KVP_CUDA "Build the CUDA backend" ON)
set(KVP_CUDA_KERNELS OFF CACHE STRING "Compile the CUDA kernels into the binary: ON, OFF or AUTO")
set_property(CACHE KVP_CUDA_KERNELS PROPERTY STRINGS ON OFF AUTO)

set(_cuda "${CMAKE_SOURCE_DIR}/src/backends/cuda")
if(EMSCRIPTEN OR WIN32 OR NOT KVP_CUDA OR "$ENV{KVPAGES_CUDA}" STREQUAL "off")
  set(KVP_CUDA_SOURCES "${_cuda}/absent.cc")
  if(NOT EMSCRIPTEN)
    message(STATUS "CUDA: built without")
  endif()
  return()
endif()

file(GLOB KVP_CUDA_SOURCES CONFIGURE_DEPENDS "${_cuda}/*.cc")
list(REMOVE_ITEM KVP_CUDA_SOURCES "${_cuda}/absent.cc")
add_library(kvp_cuda INTERFACE)
target_compile_definitions(kvp_cuda INTERFACE KVP_CUDA=1)
target_link_libraries(kvp_cuda INTERFACE ${CMAKE_DL_LIBS})

if(DEFINED ENV{CUDACXX})
  set(KVP_NVCC "$ENV{CUDACXX}")
else()
  find_program(KVP_NVCC nvcc PATHS "${KVP_TOOLCHAIN}/cuda/nvidia/cu13/bin" NO_CACHE)
endif()
set(_why "built without CUDA kernels")
set(_version 0)
if(KVP_NVCC)
  execute_process(COMMAND "${KVP_NVCC}" --version OUTPUT_VARIABLE _text ERROR_QUIET RESULT_VARIABLE _failed)
  if(NOT _failed AND _text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(_version "${CMAKE_MATCH_1}")
  endif()
endif()
if(KVP_CUDA_KERNELS STREQUAL "OFF")
  message(STATUS "CUDA: no kernels in this build (KVP_CUDA_KERNELS is OFF)")
elseif(_version VERSION_LESS 12.8)
  if(KVP_NVCC AND _version)
    set(_found "${KVP_NVCC} is ${_version}, older than 12.8")
  elseif(KVP_NVCC)
    set(_found "${KVP_NVCC} does not run")
  else()
    set(_found "no nvcc was found")
  endif()
  if(NOT KVP_CUDA_KERNELS STREQUAL "AUTO")
    message(FATAL_ERROR "CUDA: ${_found}. Run `npm run setup`, put nvcc on PATH, or set KVP_CUDA_KERNELS to AUTO.")
  endif()
  string(APPEND _why ": ${_found}")
  message(STATUS "CUDA: no kernels in this build: ${_found}")
else()
  message(STATUS "CUDA: kernels by ${KVP_NVCC} ${_version}")
  set(KVP_CUDA_FATBIN "${CMAKE_CURRENT_BINARY_DIR}/kernels.fatbin")
  # One run of the front end for all devices. The bytes depend on the flags (kernels.cu).
  set(_flags -std=c++20 -O3 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -fatbin --compress-mode=size -Xptxas --warn-on-spills
      -gencode "arch=compute_75,code=[sm_75,sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,compute_75]")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND _flags -ccbin "${CMAKE_CXX_COMPILER}")
  endif()
  add_custom_command(OUTPUT "${KVP_CUDA_FATBIN}"
    COMMAND "${KVP_NVCC}" ${_flags} -I "${CMAKE_SOURCE_DIR}/src" -MD -MF "${KVP_CUDA_FATBIN}.d" -MT "${KVP_CUDA_FATBIN}"
            "${_cuda}/kernels/kernels.cu" -o "${KVP_CUDA_FATBIN}"
    DEPENDS "${_cuda}/kernels/kernels.cu"
    DEPFILE "${KVP_CUDA_FATBIN}.d"
    COMMENT "CUDA kernels (about a minute)"
    VERBATIM)
  add_custom_target(kvp_cuda_fatbin DEPENDS "${KVP_CUDA_FATBIN}")
endif()

if(NOT _version)
  set(KVP_NVCC "")
endif()
string(REGEX MATCH "^[0-9]+" _major "${_version}")
math(EXPR _least "${_major} * 1000")
if(KVP_CUDA_FATBIN)
  # An alignment as the driver asks of code that it reads where it lies.
  set(_image "asm(R\"(
  .pushsection .rodata.kvp_cuda_kernels,\"a\"
  .balign 64
kvp_cuda_kernels:
  .incbin \"${KVP_CUDA_FATBIN}\"
  .byte 0
  .popsection
)\");
extern \"C\" __attribute__((visibility(\"hidden\"))) const unsigned char kvp_cuda_kernels[];")
  set(_address "kvp_cuda_kernels")
else()
  set(_image "")
  set(_address "nullptr")
endif()
set(KVP_CUDA_IMAGE "${CMAKE_CURRENT_BINARY_DIR}/cuda_image.cc")
file(GENERATE OUTPUT "${KVP_CUDA_IMAGE}" CONTENT "// Made by cmake/cuda.cmake.
#include \"backends/cuda/image.h\"
${_image}
namespace kvpages::cuda {
const void* KernelImage() { return ${_address}; }
const char* WhyNoKernels() { return \"${_why}\"; }
int LeastDriverVersion() { return ${_least}; }
}  // namespace kvpages::cuda
")
list(APPEND KVP_CUDA_SOURCES "${KVP_CUDA_IMAGE}")
