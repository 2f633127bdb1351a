# cmake --install: headers, library, command, find_package(tessera) and pkg-config.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

install(TARGETS tessera EXPORT tessera)
install(DIRECTORY include/tessera TYPE INCLUDE)
if(TARGET tessera_command AND TESSERA_BUILD_TOOLS)
  install(TARGETS tessera_command)
endif()
# The documentation, if `./dev docs` has built it; `tessera docs` opens it.
set(TESSERA_SITE ${PROJECT_SOURCE_DIR}/build/site CACHE PATH "The documentation's site, to be installed if it is there")
install(DIRECTORY ${TESSERA_SITE}/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/html COMPONENT docs OPTIONAL)

install(EXPORT tessera NAMESPACE tessera:: DESTINATION ${package_dir} FILE tessera-targets.cmake)
configure_package_config_file(cmake/tessera-config.cmake.in tessera-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(tessera-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tessera-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/tessera-config-version.cmake
        DESTINATION ${package_dir})

# The prefix is written relative to the .pc file, so an installed tree can be moved.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(tessera.pc.in tessera.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
