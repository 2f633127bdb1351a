# Device code. A build-time tool makes a cubin of every GPU row of the catalog with NVRTC and one C++
# file that embeds them; the library needs neither NVRTC nor the CUDA toolkit, and opens the driver at
# run time. Without NVRTC the library has no device code and says so when a GPU is asked for.
option(TESSERA_CUDA "Compile the GPU kernels, if libnvrtc is there" ON)
if(TESSERA_CUDA)
  if(TESSERA_NVRTC AND NOT EXISTS "${TESSERA_NVRTC}")
    unset(TESSERA_NVRTC CACHE)  # it was part of an environment that pip made for an earlier build
  endif()
  # pip's build environment is among CMAKE_PREFIX_PATH: scikit-build-core puts it there.
  find_library(TESSERA_NVRTC
    NAMES libnvrtc.so.13 libnvrtc.so.12 nvrtc
    HINTS ENV TESSERA_NVRTC_DIR
    PATHS /usr/local/cuda/lib64 ${CMAKE_SOURCE_DIR}/.venv/cuda
    PATH_SUFFIXES nvidia/cu13/lib nvidia/cuda_nvrtc/lib lib
    DOC "libnvrtc, of the CUDA toolkit or the nvidia-cuda-nvrtc wheel")
endif()

# Adds an object library of the file with the cubins, of its own so that nothing else waits for them, and
# returns its object.
function(tessera_add_device_code result)
  set(source_folder ${PROJECT_SOURCE_DIR}/src/cuda)
  if(NOT TESSERA_CUDA OR NOT TESSERA_NVRTC)
    if(TESSERA_CUDA)
      message(STATUS "libnvrtc not found: this build has no GPU kernels (TESSERA_NVRTC names it)")
    endif()
    add_library(tessera_device_code OBJECT ${source_folder}/compiler/no_cubins.cpp)
    target_include_directories(tessera_device_code PRIVATE
      ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    set(${result} $<TARGET_OBJECTS:tessera_device_code> PARENT_SCOPE)
    return()
  endif()
  message(STATUS "GPU kernels: by ${TESSERA_NVRTC}")
  file(GLOB program_sources CONFIGURE_DEPENDS ${source_folder}/*/programs.cpp)
  set(compiler_sources ${source_folder}/compiler/main.cpp ${source_folder}/compiler/compiler.cpp
    ${source_folder}/compiler/nvrtc.cpp ${source_folder}/architecture.cpp ${program_sources}
    ${PROJECT_SOURCE_DIR}/src/plan/device.cpp)
  add_executable(tessera_device_compiler ${compiler_sources})
  target_include_directories(tessera_device_compiler PRIVATE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(tessera_device_compiler PRIVATE ${CMAKE_DL_LIBS})
  target_compile_options(tessera_device_compiler PRIVATE -O0)  # all GPU kernels wait for it

  set(folder ${PROJECT_BINARY_DIR}/cubins)
  file(MAKE_DIRECTORY ${folder})
  file(GLOB device_sources CONFIGURE_DEPENDS
    ${source_folder}/*.h ${source_folder}/ptx/*.h ${source_folder}/tile/*.h ${source_folder}/aux/*.h
    ${source_folder}/sm90/*.h
    ${source_folder}/compiler/*.h ${source_folder}/compiler/include/*
    ${PROJECT_SOURCE_DIR}/src/core/*.h ${PROJECT_SOURCE_DIR}/src/plan/catalog.h
    ${PROJECT_SOURCE_DIR}/include/tessera/types.hpp)
  # pip's build environments come and go, and the compiler with them: the kernels are compiled anew where
  # sources, not these, have changed, or where NVRTC is another one, as its size tells.
  file(SIZE ${TESSERA_NVRTC} nvrtc_size)
  cmake_path(GET TESSERA_NVRTC PARENT_PATH nvrtc_folder)
  cmake_path(GET TESSERA_NVRTC FILENAME nvrtc_name)
  set(nvrtc_link ${PROJECT_BINARY_DIR}/nvrtc_${nvrtc_size})
  file(CREATE_LINK ${nvrtc_folder} ${nvrtc_link} SYMBOLIC)
  set(compiler $<TARGET_FILE:tessera_device_compiler> --nvrtc ${nvrtc_link}/${nvrtc_name})
  # In parts, so that the build, not one command, shares the cores among them and the host's code. NVRTC is
  # some 5 % faster in large pages.
  set(parts 28)
  math(EXPR last_part "${parts} - 1")
  set(done)
  foreach(part RANGE ${last_part})
    add_custom_command(
      OUTPUT ${folder}/${part}.done
      COMMAND ${CMAKE_COMMAND} -E env GLIBC_TUNABLES=glibc.malloc.hugetlb=1
              ${compiler} --source ${PROJECT_SOURCE_DIR} --output ${folder} --part ${part} --parts ${parts}
      COMMAND ${CMAKE_COMMAND} -E touch ${folder}/${part}.done
      DEPENDS ${compiler_sources} ${device_sources}
      COMMENT "Compiling the GPU kernels, part ${part} of ${last_part}"
      VERBATIM)
    list(APPEND done ${folder}/${part}.done)
  endforeach()
  add_custom_command(
    OUTPUT ${folder}/cubins.cpp
    COMMAND ${compiler} --output ${folder}
    DEPENDS ${done}
    COMMENT "Embedding the GPU kernels"
    VERBATIM)
  add_library(tessera_device_code OBJECT ${folder}/cubins.cpp)
  target_include_directories(tessera_device_code PRIVATE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  set(${result} $<TARGET_OBJECTS:tessera_device_code> PARENT_SCOPE)
endfunction()
