# The Python package's one native module, tessera._native: the binding and the whole library, kernels and
# cubins included, in one file for every CPython from 3.10 on (limited API; spelled out here because
# CMake's own USE_SABI came with 3.26). Nothing of it is visible but the function that Python looks for,
# and of the compiler's run-time it needs nothing at run time.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

file(GLOB python_sources CONFIGURE_DEPENDS python/native/*.cpp)
Python_add_library(tessera_python MODULE ${python_sources} ${objects})
target_include_directories(tessera_python PRIVATE include)
target_compile_definitions(tessera_python PRIVATE Py_LIMITED_API=0x030A0000)
target_link_libraries(tessera_python PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
set(python_package ${PROJECT_BINARY_DIR}/python/tessera)
set_target_properties(tessera_python PROPERTIES
  OUTPUT_NAME _native
  PREFIX ""
  SUFFIX .abi3.so
  LIBRARY_OUTPUT_DIRECTORY ${python_package})
if(NOT DEFINED CMAKE_UNITY_BUILD)  # clang-tidy asks for one command a file
  set_target_properties(tessera_python PROPERTIES UNITY_BUILD ON)  # headers are most of its time
endif()
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(python_symbols ${PROJECT_SOURCE_DIR}/cmake/python_symbols.map)
  target_link_options(tessera_python PRIVATE LINKER:--version-script=${python_symbols})
  set_property(TARGET tessera_python APPEND PROPERTY LINK_DEPENDS ${python_symbols})
  if(NOT TESSERA_SANITIZE)
    target_link_options(tessera_python PRIVATE -static-libstdc++ -static-libgcc)
  endif()
endif()

# Beside the module the package's own files, so that PYTHONPATH=<build>/python is the package.
file(GLOB python_files CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}/python/tessera
     ${PROJECT_SOURCE_DIR}/python/tessera/*)
list(FILTER python_files EXCLUDE REGEX "__pycache__|\\.so$")
file(MAKE_DIRECTORY ${python_package})
foreach(name IN LISTS python_files)
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/python/tessera/${name} ${python_package}/${name} SYMBOLIC)
endforeach()

install(TARGETS tessera_python LIBRARY DESTINATION tessera COMPONENT python EXCLUDE_FROM_ALL)
