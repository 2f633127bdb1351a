// The part of DLPack's ABI (github.com/dmlc/dlpack, versions 0.8 and 1.x) that reading a tensor
// takes: field by field what other libraries hand over in capsules.
#pragma once

#include <cstdint>

namespace tessera::python {

enum DLDeviceType : std::int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };

struct DLDevice {
  std::int32_t type;
  std::int32_t id;
};

enum DLTypeCode : std::uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLComplex = 5,
  kDLBool = 6,
  kDLFloat8E3m4 = 7,
  kDLFloat8E4m3 = 8,
  kDLFloat8E4m3B11Fnuz = 9,
  kDLFloat8E4m3Fn = 10,
  kDLFloat8E4m3Fnuz = 11,
  kDLFloat8E5m2 = 12,
  kDLFloat8E5m2Fnuz = 13,
  kDLFloat8E8m0Fnu = 14,
  kDLFloat6E2m3Fn = 15,
  kDLFloat6E3m2Fn = 16,
  kDLFloat4E2m1Fn = 17
};

struct DLType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  ///< elements; null: compact, last dimension first
  std::uint64_t byte_offset;
};

/// Capsules named "dltensor".
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

struct DLVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint64_t kDLReadOnly = 1;

/// Capsules named "dltensor_versioned".
struct DLManagedTensorVersioned {
  DLVersion version;
  void* context;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};

/// What a tensor type offers in its attribute __dlpack_c_exchange_api__ since DLPack 1.3: the same
/// without a Python call for every tensor, and what else a call needs. Functions may be null; they
/// return 0, or -1 if they fail, and `borrow` sets a Python exception then.
struct DLExchange {
  DLVersion version;
  DLExchange* previous;
  /// A new tensor like the prototype, on its device's current stream; `failed` is told why not.
  int (*allocate)(DLTensor* prototype, DLManagedTensorVersioned** out, void* context,
                  void (*failed)(void* context, const char* kind, const char* text));
  void* managed_from_object;
  void* managed_to_object;
  int (*borrow)(void* object, DLTensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** stream);
};

}  // namespace tessera::python
