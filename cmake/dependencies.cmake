# What the core needs besides the standard library: protobuf-lite (one static build per kind of target, shared by all
# build folders) and Highway (headers only).
set(KVP_TOOLCHAIN "${CMAKE_SOURCE_DIR}/.toolchain")
set(KVP_PROTOBUF_VERSION 3.21.12)

# ---- Highway: headers only; its library is not linked.
find_path(KVP_HIGHWAY_INCLUDE hwy/highway.h HINTS "${KVP_TOOLCHAIN}/highway/include" NO_CMAKE_FIND_ROOT_PATH)
if(NOT KVP_HIGHWAY_INCLUDE)
  message(FATAL_ERROR "No Highway headers. Run `npm run setup`, or install libhwy-dev / highway 1.0.7 or newer.")
endif()
file(STRINGS "${KVP_HIGHWAY_INCLUDE}/hwy/base.h" _hwy REGEX "#define HWY_(MAJOR|MINOR|PATCH) ")
if(NOT _hwy)
  file(STRINGS "${KVP_HIGHWAY_INCLUDE}/hwy/highway.h" _hwy REGEX "#define HWY_(MAJOR|MINOR|PATCH) ")
endif()
string(REGEX REPLACE "[^0-9;]" "" _hwy "${_hwy}")
string(REPLACE ";" "." _hwy "${_hwy}")
if(_hwy VERSION_LESS 1.0.7)
  message(FATAL_ERROR "Highway ${_hwy} in ${KVP_HIGHWAY_INCLUDE} is too old: 1.0.7 or newer is needed (`npm run setup`).")
endif()
# In a folder of its own it can be a system include; /usr/include must not come before a cross compiler's headers.
add_library(kvp_highway INTERFACE)
if(NOT KVP_HIGHWAY_INCLUDE STREQUAL "/usr/include")
  target_include_directories(kvp_highway SYSTEM INTERFACE "${KVP_HIGHWAY_INCLUDE}")
endif()
# Headers only: the checks that it adds under sanitizers would call a function of its library.
target_compile_definitions(kvp_highway INTERFACE HWY_IS_DEBUG_BUILD=0)

# ---- protobuf-lite, from source: distributions' static libraries are not position independent, and there is none for
# WebAssembly. Built once for each compiler and set of sanitizers, at configure time, under .toolchain/.
find_program(KVP_PROTOC protoc REQUIRED)
execute_process(COMMAND "${KVP_PROTOC}" --version OUTPUT_VARIABLE _protoc OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT _protoc STREQUAL "libprotoc ${KVP_PROTOBUF_VERSION}")
  message(FATAL_ERROR "${KVP_PROTOC} is ${_protoc}; the runtime is ${KVP_PROTOBUF_VERSION}, and both must be the same. "
                      "Set KVP_PROTOC to a protoc ${KVP_PROTOBUF_VERSION}.")
endif()

set(KVP_PROTOBUF_SOURCE "$ENV{KVP_PROTOBUF_SOURCE}" CACHE PATH "Unpacked protobuf ${KVP_PROTOBUF_VERSION}")
if(NOT KVP_PROTOBUF_SOURCE)
  set(KVP_PROTOBUF_SOURCE "${KVP_TOOLCHAIN}/protobuf" CACHE PATH "" FORCE)
endif()
if(NOT EXISTS "${KVP_PROTOBUF_SOURCE}/src/google/protobuf/message_lite.h")
  message(FATAL_ERROR "No protobuf source in ${KVP_PROTOBUF_SOURCE}. Run `npm run setup`, or set KVP_PROTOBUF_SOURCE to "
                      "an unpacked release ${KVP_PROTOBUF_VERSION} (protobuf-cpp-${KVP_PROTOBUF_VERSION}, that is v21.12).")
endif()

if(EMSCRIPTEN)
  set(_flags "-msimd128 -fno-exceptions")
else()
  set(_flags "-fvisibility=hidden")
endif()
string(APPEND _flags " -O2 -ffunction-sections -fdata-sections -w")
if(KVP_SANITIZE)
  string(APPEND _flags " -fsanitize=${KVP_SANITIZE} -fno-sanitize=vptr,function -fno-omit-frame-pointer -g1")
endif()
string(MD5 _kind "${KVP_PROTOBUF_VERSION} ${KVP_PROTOBUF_SOURCE} ${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_VERSION} ${_flags} ${CMAKE_OSX_ARCHITECTURES}")
string(SUBSTRING "${_kind}" 0 8 _kind)
string(TOLOWER "${CMAKE_SYSTEM_NAME}-${CMAKE_CXX_COMPILER_ID}-${_kind}" _kind)
set(KVP_PROTOBUF_BUILD "${KVP_TOOLCHAIN}/protobuf-${_kind}")
set(_archive "${KVP_PROTOBUF_BUILD}/libprotobuf-lite.a")

if(NOT EXISTS "${KVP_PROTOBUF_BUILD}/done")
  file(MAKE_DIRECTORY "${KVP_PROTOBUF_BUILD}")
  file(LOCK "${KVP_PROTOBUF_BUILD}" DIRECTORY GUARD FILE TIMEOUT 900)
  if(NOT EXISTS "${KVP_PROTOBUF_BUILD}/done")
    message(STATUS "Building protobuf-lite ${KVP_PROTOBUF_VERSION} for ${_kind} (once, about a minute)")
    set(_arguments
      -G Ninja -S "${KVP_PROTOBUF_SOURCE}" -B "${KVP_PROTOBUF_BUILD}"
      -Dprotobuf_BUILD_TESTS=OFF -Dprotobuf_BUILD_PROTOC_BINARIES=OFF -Dprotobuf_BUILD_SHARED_LIBS=OFF
      -Dprotobuf_WITH_ZLIB=OFF -Dprotobuf_INSTALL=OFF -DCMAKE_BUILD_TYPE=None -DCMAKE_POSITION_INDEPENDENT_CODE=ON
      "-DCMAKE_CXX_FLAGS=${_flags}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER}")
    if(CMAKE_TOOLCHAIN_FILE)
      list(APPEND _arguments "-DCMAKE_TOOLCHAIN_FILE=${CMAKE_TOOLCHAIN_FILE}")
    else()
      list(APPEND _arguments "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}")
    endif()
    if(EMSCRIPTEN)
      list(APPEND _arguments -DCMAKE_HAVE_LIBC_PTHREAD=1)  # else find_package(Threads) fails
    endif()
    execute_process(COMMAND "${CMAKE_COMMAND}" ${_arguments} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND "${CMAKE_COMMAND}" --build "${KVP_PROTOBUF_BUILD}" --target libprotobuf-lite -j 2
                    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
    if(NOT EXISTS "${_archive}")
      message(FATAL_ERROR "protobuf-lite was built, but ${_archive} is not there")
    endif()
    file(TOUCH "${KVP_PROTOBUF_BUILD}/done")
  endif()
  file(LOCK "${KVP_PROTOBUF_BUILD}" DIRECTORY RELEASE)
endif()

add_library(kvp_protobuf_lite STATIC IMPORTED)
set_target_properties(kvp_protobuf_lite PROPERTIES
  IMPORTED_LOCATION "${_archive}"
  INTERFACE_INCLUDE_DIRECTORIES "${KVP_PROTOBUF_SOURCE}/src")
if(NOT EMSCRIPTEN)
  set(THREADS_PREFER_PTHREAD_FLAG ON)
  find_package(Threads REQUIRED)
  set_property(TARGET kvp_protobuf_lite PROPERTY INTERFACE_LINK_LIBRARIES Threads::Threads)
endif()
