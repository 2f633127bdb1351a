# The toolchain of the explorer's engine (cmake --preset wasm): clang 19 for wasm32-wasi, with Debian's
# wasi-libc and libc++. Emscripten was weighed: Debian's 3.1.6 has a clang of 2022, whose libc++ lacks much of
# C++20's library, and puts JavaScript of its own around what is one function here. clang 19 is the compiler
# that every source file is checked with anyway. Its libc++ for WebAssembly has no exceptions; the library
# throws none, errors are values (tessera/status.hpp).
#
# Debian: clang-19 lld-19 wasi-libc libc++-19-dev-wasm32 libc++abi-19-dev-wasm32 libclang-rt-19-dev-wasm32
set(CMAKE_SYSTEM_NAME Generic)
set(CMAKE_SYSTEM_PROCESSOR wasm32)
set(CMAKE_CXX_COMPILER clang++-19)
set(CMAKE_CXX_COMPILER_TARGET wasm32-wasi)
set(CMAKE_CXX_FLAGS_INIT "-fno-exceptions -fno-rtti")
# A module without main().
set(CMAKE_EXE_LINKER_FLAGS_INIT "-mexec-model=reactor")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
