# One interface target with every flag that all targets share.
add_library(kvp_flags INTERFACE)
target_compile_features(kvp_flags INTERFACE cxx_std_20)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(KVP_CCACHE ccache)
  if(KVP_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${KVP_CCACHE}")
  endif()
endif()

# Results must be the same bytes on every platform. g++ and clang turn a*b+c into one fused instruction by default
# (it rounds once instead of twice), so that is switched off; and nothing here may ever use -ffast-math.
target_compile_options(kvp_flags INTERFACE -ffp-contract=off)
target_compile_options(kvp_flags INTERFACE -Wall -Wextra $<$<BOOL:${KVP_WERROR}>:-Werror>)
# Sections, so that the linker drops what nobody uses.
target_compile_options(kvp_flags INTERFACE -ffunction-sections -fdata-sections)

if(EMSCRIPTEN)
  target_compile_options(kvp_flags INTERFACE -msimd128 -fno-exceptions -fno-rtti)
endif()

if(KVP_SANITIZE)
  # Integer wrap-around is defined and used on purpose (hashes, generations); only undefined behaviour counts.
  target_compile_options(kvp_flags INTERFACE -fsanitize=${KVP_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvp_flags INTERFACE -fsanitize=${KVP_SANITIZE})
  if(KVP_FUZZ)
    target_compile_options(kvp_flags INTERFACE -fsanitize=fuzzer-no-link)
  endif()
endif()
