# Device code. A build-time tool makes a cubin of every GPU row of the catalog with NVRTC and one C++
# file that embeds them; the library needs neither NVRTC nor the CUDA toolkit, and opens the driver at
# run time. What device code includes is embedded, too: kernels that a build does not have, as there was
# no NVRTC, are compiled when they are needed, if there is one then.
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
set(TESSERA_CUDA_ARCHS auto CACHE STRING
  "GPUs to compile for: auto (those found; none: ptx), all, or a list of 75, 80, 90a, 120, ptx")

# Sets `result` to the device compiler's targets, with commas between them.
function(tessera_cuda_targets result)
  set(known 75 80 90a 120 ptx)
  set(wanted ${TESSERA_CUDA_ARCHS})
  if(wanted STREQUAL "all")
    set(wanted ${known})
  elseif(wanted STREQUAL "auto")
    set(wanted)
    # The driver's own tool says what there is; without a driver there is none, and no GPU.
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE failed)
    if(failed EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
    else()
      set(found)
    endif()
    foreach(capability IN LISTS found)
      if(capability STREQUAL "9.0")
        list(APPEND wanted 90a)
      elseif(capability STREQUAL "7.5")
        list(APPEND wanted 75)
      elseif(capability MATCHES "^8\\." AND NOT capability STREQUAL "8.7")
        list(APPEND wanted 80)
      elseif(capability MATCHES "^12\\.")
        list(APPEND wanted 120)
      else()
        list(APPEND wanted ptx)
      endif()
    endforeach()
    if(NOT wanted)
      set(wanted ptx)  # the quickest: what is missing is compiled when it is needed
    endif()
    list(REMOVE_DUPLICATES wanted)
  endif()
  set(targets)
  foreach(one IN LISTS wanted)
    if(NOT one IN_LIST known)
      message(FATAL_ERROR "TESSERA_CUDA_ARCHS: ${one}: must be auto, all, or a list of 75, 80, 90a, 120, ptx")
    endif()
    if(one STREQUAL "ptx")
      list(APPEND targets compute_80)
    elseif(one STREQUAL "75")
      list(APPEND targets sm_75 compute_75)  # and PTX of its own, for older drivers
    else()
      list(APPEND targets sm_${one})
    endif()
  endforeach()
  if(NOT targets)
    message(FATAL_ERROR "TESSERA_CUDA_ARCHS: names no GPU: must be auto, all, or a list of 75, 80, 90a, 120, ptx")
  endif()
  list(JOIN targets "," targets)
  set(${result} ${targets} PARENT_SCOPE)
endfunction()

# Sets `result` to a C++ file that embeds the texts that device code includes, by the names that it
# includes them by; without arguments to one that embeds none. See compiler/device_headers.h.
function(tessera_embed_device_headers result)
  set(file ${PROJECT_BINARY_DIR}/device_headers.cpp)
  set(symbols)
  set(table)
  set(number 0)
  foreach(header IN LISTS ARGN)
    string(REGEX REPLACE "^.*/(src/cuda/compiler/include|src|include)/" "" name ${header})
    set(begin tessera_header_${number})
    math(EXPR number "${number} + 1")
    string(APPEND symbols
      "asm(\".pushsection .rodata\\n${begin}:\\n.incbin \\\"${header}\\\"\\n${begin}_end:\\n.popsection\\n\");\n"
      "extern \"C\" const char ${begin}[], ${begin}_end[];\n")
    string(APPEND table "    {\"${name}\", ${begin}, ${begin}_end},\n")
  endforeach()
  if(number EQUAL 0)
    set(body "  return {};\n")
  else()
    set(body "  static const DeviceHeader table[] = {\n${table}  };\n  return table;\n")
  endif()
  file(CONFIGURE OUTPUT ${file} @ONLY CONTENT
    "// Made by cmake/cuda.cmake.\n#include \"cuda/compiler/device_headers.h\"\n\n@symbols@
namespace tessera::cuda {\n\nstd::span<const DeviceHeader> device_headers() {\n@body@}\n\n}  // namespace tessera::cuda\n")
  set_source_files_properties(${file} PROPERTIES OBJECT_DEPENDS "${ARGN}")
  set(${result} ${file} PARENT_SCOPE)
endfunction()

# Adds an object library of the file with the cubins, of its own so that nothing else waits for them, and
# returns its object.
function(tessera_add_device_code result)
  set(source_folder ${PROJECT_SOURCE_DIR}/src/cuda)
  file(GLOB device_headers CONFIGURE_DEPENDS
    ${source_folder}/source.h
    ${source_folder}/ptx/*.h ${source_folder}/tile/*.h ${source_folder}/aux/*.h ${source_folder}/mma/*.h
    ${source_folder}/sm90/*.h ${source_folder}/compiler/include/* ${PROJECT_SOURCE_DIR}/src/core/*.h
    ${PROJECT_SOURCE_DIR}/include/tessera/types.hpp)
  list(FILTER device_headers EXCLUDE REGEX "(launch|/programs|/target)\\.h$")  # the host's
  if(NOT TESSERA_CUDA)
    set(device_headers)
  endif()
  tessera_embed_device_headers(embedded_headers ${device_headers})
  if(NOT TESSERA_CUDA OR NOT TESSERA_NVRTC)
    if(TESSERA_CUDA)
      message(STATUS "libnvrtc not found: this build has no GPU kernels (TESSERA_NVRTC names it)")
    endif()
    add_library(tessera_device_code OBJECT ${source_folder}/compiler/no_cubins.cpp ${embedded_headers})
    target_include_directories(tessera_device_code PRIVATE
      ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    set(${result} $<TARGET_OBJECTS:tessera_device_code> PARENT_SCOPE)
    return()
  endif()
  tessera_cuda_targets(targets)
  message(STATUS "GPU kernels: ${targets}, by ${TESSERA_NVRTC}")
  file(GLOB program_sources CONFIGURE_DEPENDS ${source_folder}/*/programs.cpp)
  set(compiler_sources ${source_folder}/compiler/main.cpp ${source_folder}/compiler/compiler.cpp
    ${source_folder}/compiler/nvrtc.cpp ${source_folder}/architecture.cpp
    ${source_folder}/auxiliary.cpp ${program_sources}
    ${PROJECT_SOURCE_DIR}/src/plan/device.cpp)
  add_executable(tessera_device_compiler ${compiler_sources})
  target_include_directories(tessera_device_compiler PRIVATE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(tessera_device_compiler PRIVATE ${CMAKE_DL_LIBS})
  target_compile_options(tessera_device_compiler PRIVATE -O0)  # all GPU kernels wait for it

  set(folder ${PROJECT_BINARY_DIR}/cubins)
  file(MAKE_DIRECTORY ${folder})
  file(GLOB device_sources CONFIGURE_DEPENDS
    ${source_folder}/*.h ${source_folder}/*/programs.h
    ${source_folder}/compiler/compiler.h ${source_folder}/compiler/nvrtc.h
    ${PROJECT_SOURCE_DIR}/src/plan/catalog.h)
  list(APPEND device_sources ${device_headers})
  # pip's build environments come and go, and the compiler with them: the kernels are compiled anew where
  # sources, not these, have changed, or where NVRTC is another one, as its size tells.
  file(SIZE ${TESSERA_NVRTC} nvrtc_size)
  cmake_path(GET TESSERA_NVRTC PARENT_PATH nvrtc_folder)
  cmake_path(GET TESSERA_NVRTC FILENAME nvrtc_name)
  set(nvrtc_link ${PROJECT_BINARY_DIR}/nvrtc_${nvrtc_size})
  file(CREATE_LINK ${nvrtc_folder} ${nvrtc_link} SYMBOLIC)
  set(compiler
    $<TARGET_FILE:tessera_device_compiler> --nvrtc ${nvrtc_link}/${nvrtc_name} --targets ${targets})
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
  add_library(tessera_device_code OBJECT ${folder}/cubins.cpp ${embedded_headers})
  target_include_directories(tessera_device_code PRIVATE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  set(${result} $<TARGET_OBJECTS:tessera_device_code> PARENT_SCOPE)
endfunction()
