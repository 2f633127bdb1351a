# tools/: the readers of tensor files, and the tessera command, whose main() is in tools/main.cpp.
find_package(nlohmann_json QUIET)
find_package(CLI11 QUIET)
if(NOT nlohmann_json_FOUND OR NOT CLI11_FOUND)
  message(FATAL_ERROR "The tessera command needs CLI11 and nlohmann-json: install them "
                      "(Debian: libcli11-dev nlohmann-json3-dev), or leave the command out "
                      "with -DTESSERA_BUILD_TOOLS=OFF")
endif()

file(GLOB files_sources CONFIGURE_DEPENDS tools/files/*.cpp)
if(files_sources)
  add_library(tessera_files STATIC ${files_sources})
  target_include_directories(tessera_files PUBLIC include tools)
  target_link_libraries(tessera_files PUBLIC nlohmann_json::nlohmann_json)
endif()

# What judges a result, apart from the command: tests of kernels need no more, and nothing of this sees
# the two large headers.
file(GLOB check_sources CONFIGURE_DEPENDS tools/check/*.cpp)
if(check_sources)
  add_library(tessera_check STATIC ${check_sources})
  target_include_directories(tessera_check PUBLIC include tools src)
  target_link_libraries(tessera_check PUBLIC tessera_reference)
endif()

file(GLOB tools_sources CONFIGURE_DEPENDS tools/*.cpp tools/memory/*.cpp)
set(tools_main ${CMAKE_CURRENT_SOURCE_DIR}/tools/main.cpp)
list(REMOVE_ITEM tools_sources ${tools_main})
if(tools_sources)
  # Compiled against the headers of the library only: the command links the shared library, the tests
  # the archive.
  add_library(tessera_tools STATIC ${tools_sources})
  target_include_directories(tessera_tools PUBLIC include tools src)
  target_link_libraries(tessera_tools PUBLIC tessera_check tessera_files CLI11::CLI11)
  target_compile_options(tessera_tools PRIVATE -O1)
  if(TESSERA_SANITIZE)
    target_compile_options(tessera_tools PRIVATE -O0)  # 20 s, not 57
  endif()
  # As one file, or each would compile all of CLI11 again; CMAKE_UNITY_BUILD=OFF keeps them apart.
  if(NOT DEFINED CMAKE_UNITY_BUILD)
    set_target_properties(tessera_tools PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
endif()

if(EXISTS ${tools_main} AND TARGET tessera_tools AND TESSERA_BUILD_TOOLS)
  add_executable(tessera_command ${tools_main})
  target_link_libraries(tessera_command PRIVATE tessera_tools tessera)
  set_target_properties(tessera_command PROPERTIES OUTPUT_NAME tessera)
  file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(tessera_command PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
endif()
