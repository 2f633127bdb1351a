# The CPU kernels are compiled once for every instruction set of the target, each time with
# -DTESSERA_ISA=<set> (src/cpu/simd.h) and that set's flags; nothing else is compiled with those flags, so
# that no other function can end up with instructions this machine may lack. tests/symbols_test.py
# checks the objects.

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(all_isas portable avx2 avx512 avx512_bf16)
else()
  set(all_isas portable)
endif()
set(TESSERA_ISAS ${all_isas} CACHE STRING "Instruction sets of the CPU kernels; portable is always needed")

if(TESSERA_ISAS MATCHES "avx512" AND NOT "avx2" IN_LIST TESSERA_ISAS)
  message(FATAL_ERROR "TESSERA_ISAS: avx512 and avx512_bf16 need avx2 beside them, whose functions of rows they have (src/cpu/isa.h)")
endif()

# Optimised in every configuration: a kernel that is not inlined is not testable in finite time.
# Instrumented code is not: at -O3 a file takes g++ minutes.
set(isa_flags_all -O3 -fno-math-errno -fno-trapping-math)
# What has but four lanes gains nothing at -O3, for which g++ takes a quarter longer.
set(isa_flags_portable -O2)
if(TESSERA_SANITIZE)
  list(APPEND isa_flags_all -O1)
  set(isa_flags_portable)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    list(APPEND isa_flags_all -Wno-pass-failed)  # at -O1 not all loops are unrolled that ask for it
  endif()
endif()
if(TESSERA_SANITIZE MATCHES "undefined")
  # All of -fsanitize=undefined makes a set's kernels take 84 s instead of 15 s (clang 19): here, what
  # could send an index astray, as a trap.
  list(APPEND isa_flags_all -fno-sanitize=undefined
       -fsanitize=signed-integer-overflow,shift,integer-divide-by-zero)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    list(APPEND isa_flags_all -fsanitize-trap=undefined)
  endif()
endif()
# Kernels say where they want a fused multiply-add; only the portable set leaves that to the compiler.
list(APPEND isa_flags_portable -ffp-contract=fast)
# PREFETCHW does nothing on the few processors with AVX2 that do not know it.
set(isa_flags_avx2 -ffp-contract=off -mavx2 -mfma -mf16c -mprfchw)
set(isa_flags_avx512 ${isa_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl
    -mprefer-vector-width=512)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarm about the "undefined" operand inside g++ 12's own intrinsics (GCC bug 105593).
  list(APPEND isa_flags_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(isa_flags_avx512_bf16 ${isa_flags_avx512} -mavx512bf16 -mavx512vbmi)

# Compiles the sources into an object library per instruction set, <prefix>_<set>, and returns their
# objects.
function(tessera_add_isa_objects prefix result)
  set(objects)
  foreach(isa IN LISTS TESSERA_ISAS)
    add_library(${prefix}_${isa} OBJECT ${ARGN})
    target_include_directories(${prefix}_${isa} PRIVATE
      ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    target_compile_definitions(${prefix}_${isa} PRIVATE TESSERA_ISA=${isa})
    target_compile_options(${prefix}_${isa} PRIVATE ${isa_flags_all} ${isa_flags_${isa}})
    list(APPEND objects $<TARGET_OBJECTS:${prefix}_${isa}>)
  endforeach()
  set(${result} ${objects} PARENT_SCOPE)
endfunction()

# Adds the kernels' object libraries, tells `dispatcher` which there are, and returns their objects.
function(tessera_add_kernels dispatcher result)
  set(objects)
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/src/cpu/kernels.cpp)
    tessera_add_isa_objects(tessera_cpu objects src/cpu/kernels.cpp)
    foreach(isa IN LISTS TESSERA_ISAS)
      string(TOUPPER ${isa} upper)
      target_compile_definitions(${dispatcher} PUBLIC TESSERA_HAVE_${upper}=1)
    endforeach()
  endif()
  set(${result} ${objects} PARENT_SCOPE)
endfunction()
