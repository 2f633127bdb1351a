// The CUDA driver, opened at run time: one library for machines with and without a GPU. Only the
// few entry points and types that are used are declared here, from the driver API's documentation;
// no CUDA header is needed to build. Called by everything in this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tessera/status.hpp"

namespace tessera::cuda {

// Handles and results as the driver's ABI has them.
using CuResult = int;
using CuDevice = int;
using CuLibrary = struct CuLibrarySt*;
using CuKernel = struct CuKernelSt*;
using CuFunction = struct CuFunctionSt*;
using CuStream = struct CuStreamSt*;
using CuContext = struct CuContextSt*;

// CUdevice_attribute.
inline constexpr int kMultiprocessorCount = 16;
inline constexpr int kL2Bytes = 38;
inline constexpr int kComputeMajor = 75;
inline constexpr int kComputeMinor = 76;
inline constexpr int kSharedBytesOptin = 97;
// CUfunction_attribute.
inline constexpr int kMaxDynamicSharedBytes = 8;
// CUpointer_attribute.
inline constexpr int kPointerMemoryType = 2, kPointerIsManaged = 8, kPointerOrdinal = 9;
// CUmemorytype. Managed memory is a device's; what the driver does not know has none.
inline constexpr unsigned kMemoryHost = 1, kMemoryDevice = 2;
// CUtensorMap's enumerations.
inline constexpr int kMapUint8 = 0, kMapFloat16 = 6, kMapFloat32 = 7, kMapBfloat16 = 9;
inline constexpr int kMapInterleaveNone = 0, kMapSwizzle128 = 3, kMapPromoteL2To128 = 2,
                     kMapPromoteL2To256 = 3, kMapFillZero = 0;

/// CUlaunchAttribute: one that is a number.
struct CuLaunchAttribute {
  int id;
  alignas(8) int value;
  char rest[60];
};
static_assert(sizeof(CuLaunchAttribute) == 72);
inline constexpr int kProgrammaticSerialization = 6;

/// CUlaunchConfig.
struct CuLaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  CuStream stream;
  void* attributes;
  unsigned num_attributes;
};

/// The entry points; one table for the whole process.
struct Driver {
  CuResult (*init)(unsigned flags);
  CuResult (*get_error_name)(CuResult, const char**);
  CuResult (*get_error_string)(CuResult, const char**);
  CuResult (*driver_version)(int*);
  CuResult (*device_count)(int*);
  CuResult (*device_get)(CuDevice*, int ordinal);
  CuResult (*device_name)(char*, int size, CuDevice);
  CuResult (*device_attribute)(int*, int attribute, CuDevice);
  CuResult (*primary_context_retain)(CuContext*, CuDevice);
  CuResult (*context_current)(CuContext*);
  CuResult (*context_push)(CuContext);
  CuResult (*context_pop)(CuContext*);
  CuResult (*memory_allocate)(std::uint64_t* address, std::size_t bytes);
  CuResult (*memory_free)(std::uint64_t address);
  CuResult (*memory_allocate_async)(std::uint64_t* address, std::size_t bytes, CuStream);
  CuResult (*memory_free_async)(std::uint64_t address, CuStream);
  CuResult (*set_memory_async)(std::uint64_t address, unsigned value, std::size_t count, CuStream);
  CuResult (*pointer_attributes)(unsigned number, const int* attributes, void** values,
                                 std::uint64_t address);
  CuResult (*copy_to_device)(std::uint64_t to, const void* from, std::size_t bytes);
  CuResult (*copy_to_host)(void* to, std::uint64_t from, std::size_t bytes);
  CuResult (*stream_synchronize)(CuStream);
  CuResult (*stream_is_capturing)(CuStream, int* status);
  CuResult (*library_load)(CuLibrary*, const void* image, int* jit_options, void** jit_values,
                           unsigned num_jit, int* options, void** values, unsigned num);
  CuResult (*library_kernel)(CuKernel*, CuLibrary, const char* name);
  CuResult (*kernel_function)(CuFunction*, CuKernel);
  CuResult (*function_set_attribute)(CuFunction, int attribute, int value);
  CuResult (*launch_kernel)(const CuLaunchConfig*, CuFunction, void** parameters, void** extra);
  CuResult (*encode_tensor_map)(void* map, int type, unsigned rank, void* address,
                                const std::uint64_t* sizes, const std::uint64_t* strides,
                                const unsigned* box, const unsigned* element_strides,
                                int interleave, int swizzle, int promotion, int fill);

  std::string missing;  ///< why there is no driver; empty: there is one

  bool available() const { return missing.empty(); }
  /// Ok, or a device error with the driver's own name and text for it.
  Status check(CuResult result, const char* what) const;
};

/// Opens the driver on the first call.
const Driver& driver();

/// Whether anything in this process has opened it: without it no memory of a GPU exists. Opens
/// nothing, as that takes a GPU's machine a tenth of a second.
bool driver_is_open();

}  // namespace tessera::cuda
