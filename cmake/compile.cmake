# Warnings and sanitizers for everything below this directory. Warnings are errors only on request
# (the presets ask for it), so that a newer compiler never breaks someone else's package.
add_compile_options(-Wall -Wextra -Wpedantic -Wconversion -Wshadow)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  add_compile_options(-Wno-restrict)  # false alarm of g++ 12 on "text" + std::string (GCC bug 105651)
endif()
if(TESSERA_WERROR)
  add_compile_options(-Werror)
endif()

if(TESSERA_SANITIZE)
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
  foreach(sanitizer IN ITEMS address thread)  # as g++ has it, and clang from 21 on
    if(TESSERA_SANITIZE MATCHES ${sanitizer} AND CMAKE_CXX_COMPILER_ID MATCHES "Clang"
       AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 21)
      string(TOUPPER ${sanitizer} upper)
      add_compile_definitions(__SANITIZE_${upper}__=1)
    endif()
  endforeach()
  if(TESSERA_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()

if(TESSERA_FUZZ AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "TESSERA_FUZZ needs clang, not ${CMAKE_CXX_COMPILER_ID}; "
                      "configure with -DCMAKE_CXX_COMPILER=clang++-19, or use --preset asan")
endif()
