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

# Adds the file with the cubins to `target`.
function(tessera_embed_device_code target)
  set(source_folder ${PROJECT_SOURCE_DIR}/src/cuda)
  if(NOT TESSERA_CUDA OR NOT TESSERA_NVRTC)
    if(TESSERA_CUDA)
      message(STATUS "libnvrtc not found: this build has no GPU kernels (TESSERA_NVRTC names it)")
    endif()
    target_sources(${target} PRIVATE ${source_folder}/compiler/no_cubins.cpp)
    return()
  endif()
  message(STATUS "GPU kernels: by ${TESSERA_NVRTC}")
  add_executable(tessera_device_compiler
    ${source_folder}/compiler/main.cpp ${source_folder}/compiler/nvrtc.cpp
    ${PROJECT_SOURCE_DIR}/src/plan/device.cpp)
  target_include_directories(tessera_device_compiler PRIVATE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(tessera_device_compiler PRIVATE Threads::Threads ${CMAKE_DL_LIBS})

  set(folder ${PROJECT_BINARY_DIR}/cubins)
  file(MAKE_DIRECTORY ${folder})
  file(GLOB device_sources CONFIGURE_DEPENDS
    ${source_folder}/ptx/*.h ${source_folder}/sm90/*.h ${source_folder}/compiler/include/*
    ${PROJECT_SOURCE_DIR}/src/core/*.h ${PROJECT_SOURCE_DIR}/src/plan/catalog.h
    ${PROJECT_SOURCE_DIR}/include/tessera/types.hpp)
  add_custom_command(
    OUTPUT ${folder}/cubins.cpp
    COMMAND tessera_device_compiler --nvrtc ${TESSERA_NVRTC} --source ${PROJECT_SOURCE_DIR}
            --output ${folder}
    DEPENDS tessera_device_compiler ${device_sources}
    COMMENT "Compiling the GPU kernels"
    VERBATIM)
  target_sources(${target} PRIVATE ${folder}/cubins.cpp)
endfunction()
