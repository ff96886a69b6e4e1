# clang for the sanitizers and libFuzzer: the pinned version where it is there, else any.
find_program(KVP_CLANGXX NAMES clang++-19 clang++ REQUIRED)
set(CMAKE_CXX_COMPILER "${KVP_CLANGXX}")
