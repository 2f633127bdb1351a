#include "view.h"

#include <deque>

namespace tessera::python {

namespace {

/// A new reference that is given up at the end of the scope.
struct Reference {
  PyObject* object;
  explicit Reference(PyObject* o) : object(o) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object); }
};

/// A type of tensors and what it offers; null: nothing.
struct KnownType {
  PyTypeObject* type;
  const DLExchange* exchange;
  const PyObject* kind;  ///< a class of which its objects are
};

const DLExchange* look_up(PyTypeObject* type) {
  const Reference capsule(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  if (capsule.object == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  if (PyCapsule_IsValid(capsule.object, "dlpack_exchange_api") == 0) return nullptr;
  const auto* exchange =
      static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule.object, "dlpack_exchange_api"));
  while (exchange != nullptr && exchange->version.major != 1) exchange = exchange->previous;
  return exchange != nullptr && exchange->borrow != nullptr ? exchange : nullptr;
}

/// Every type is asked once. They are few, and held for ever, so that no other gets the address of
/// one; the interpreter's lock is held.
KnownType& known_of(PyObject* tensor) {
  static std::deque<KnownType> known;
  PyTypeObject* const type = Py_TYPE(tensor);
  for (KnownType& k : known) {
    if (k.type == type) return k;
  }
  Py_INCREF(type);
  known.push_back({type, look_up(type), nullptr});
  return known.back();
}

/// The name of the object's type, for errors.
std::string type_name(PyObject* object) {
  const Reference name(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const char* const text =
      name.object != nullptr ? PyUnicode_AsUTF8AndSize(name.object, nullptr) : nullptr;
  PyErr_Clear();
  return text != nullptr ? text : "?";
}

/// Raises what the framework said of a tensor that it does not hand over, without its stack trace.
[[noreturn]] void unreadable(const char* name) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const Reference owned_type(type), owned_value(value), owned_trace(trace);
  const Reference text(value != nullptr ? PyObject_Str(value) : nullptr);
  const char* bytes =
      text.object != nullptr ? PyUnicode_AsUTF8AndSize(text.object, nullptr) : nullptr;
  const std::string said = bytes != nullptr ? bytes : "no reason given";
  PyErr_Clear();
  throw Raise{PyExc_ValueError,
              std::string(name) + " cannot be read: " + said.substr(0, said.find('\n'))};
}

/// object.__dlpack__(max_version=(1, 0)); without arguments where an old framework knows none.
PyObject* export_capsule(const char* name, PyObject* object) {
  const Reference method(PyObject_GetAttrString(object, "__dlpack__"));
  if (method.object == nullptr) throw PythonError{};
  const Reference none(PyTuple_New(0));
  const Reference keywords(Py_BuildValue("{s:(ii)}", "max_version", 1, 0));
  if (none.object == nullptr || keywords.object == nullptr) throw PythonError{};
  PyObject* capsule = PyObject_Call(method.object, none.object, keywords.object);
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError) != 0) {
    PyErr_Clear();
    capsule = PyObject_Call(method.object, none.object, nullptr);
  }
  if (capsule == nullptr) unreadable(name);
  return capsule;
}

/// torch refuses to export what requires a gradient.
PyObject* detached(PyObject* object) {
  if (PyObject_HasAttrString(object, "detach") == 0) {
    Py_INCREF(object);
    return object;
  }
  PyObject* result = PyObject_CallMethod(object, "detach", nullptr);
  if (result == nullptr) throw PythonError{};
  return result;
}

}  // namespace

const DLExchange* exchange_of(PyObject* tensor) { return known_of(tensor).exchange; }

std::int64_t View::size() const {
  std::int64_t product = 1;
  for (int i = 0; i < ndim; ++i) product *= shape[static_cast<std::size_t>(i)];
  return product;
}

bool View::contiguous() const {
  if (size() == 0) return true;
  std::int64_t expected = 1;
  for (auto i = static_cast<std::size_t>(ndim); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::string name_of(DLType dtype) {
  const std::string bits = std::to_string(dtype.bits);
  const auto name = [&]() -> std::string {
    switch (dtype.code) {
      case kDLInt: return "int" + bits;
      case kDLUInt: return "uint" + bits;
      case kDLFloat: return "float" + bits;
      case kDLBfloat: return "bfloat" + bits;
      case kDLComplex: return "complex" + bits;
      case kDLBool: return "bool";
      case kDLFloat8E3m4: return "float8_e3m4";
      case kDLFloat8E4m3: return "float8_e4m3";
      case kDLFloat8E4m3B11Fnuz: return "float8_e4m3b11fnuz";
      case kDLFloat8E4m3Fn: return "float8_e4m3fn";
      case kDLFloat8E4m3Fnuz: return "float8_e4m3fnuz";
      case kDLFloat8E5m2: return "float8_e5m2";
      case kDLFloat8E5m2Fnuz: return "float8_e5m2fnuz";
      case kDLFloat8E8m0Fnu: return "float8_e8m0fnu";
      case kDLFloat6E2m3Fn: return "float6_e2m3fn";
      case kDLFloat6E3m2Fn: return "float6_e3m2fn";
      case kDLFloat4E2m1Fn: return "float4_e2m1fn";
      default: return "DLPack type " + std::to_string(dtype.code) + " of " + bits + " bits";
    }
  }();
  return dtype.lanes > 1 ? name + "x" + std::to_string(dtype.lanes) : name;
}

std::string name_of(DLDevice device) {
  switch (device.type) {
    case kDLCPU:
    case kDLCUDAHost: return "cpu";
    case kDLCUDA:
    case kDLCUDAManaged: return "cuda:" + std::to_string(device.id);
    default: return "DLPack device " + std::to_string(device.type);
  }
}

std::string shape_text(const View& view) {
  std::string text = "(";
  for (int i = 0; i < view.ndim; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(view.shape[static_cast<std::size_t>(i)]);
  }
  return text + (view.ndim == 1 ? ",)" : ")");
}

Views::~Views() {
  for (PyObject* object : held_) Py_DECREF(object);
}

const DLTensor* Views::borrow(const char* name, PyObject* object, bool written) {
  KnownType& known = known_of(object);
  if (kind_ != nullptr && known.kind != kind_) {
    const int is_one = PyObject_IsInstance(object, kind_);
    if (is_one < 0) throw PythonError{};
    if (is_one == 0) {  // torch alone names its class
      throw Raise{PyExc_TypeError, std::string(name) + " is of type '" + type_name(object) +
                                       "': must be a torch tensor, as the others are"};
    }
    known.kind = kind_;
  }
  if (known.exchange != nullptr) {
    if (known.exchange->borrow(object, &borrowed_) != 0) unreadable(name);
    return &borrowed_;
  }
  if (PyObject_HasAttrString(object, "__dlpack__") == 0) {
    throw Raise{PyExc_TypeError,
                std::string(name) + " is of type '" + type_name(object) +
                    "': must be a tensor (torch, NumPy, JAX, or anything with __dlpack__)"};
  }
  const Reference source(detached(object));
  PyObject* capsule = export_capsule(name, source.object);
  held_.push_back(capsule);  // its destructor hands the tensor back
  if (PyCapsule_IsValid(capsule, "dltensor_versioned") != 0) {
    const auto* managed = static_cast<const DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (managed->version.major != 1) {
      throw Raise{PyExc_BufferError, std::string(name) + ": DLPack version " +
                                         std::to_string(managed->version.major) + " is not known"};
    }
    if (written && (managed->flags & kDLReadOnly) != 0) {
      throw Raise{PyExc_ValueError, std::string(name) + " is read-only, and would be written to"};
    }
    return &managed->tensor;
  }
  const auto* managed =
      static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  if (managed == nullptr) throw PythonError{};
  return &managed->tensor;
}

void Views::read(const char* name, PyObject* object, View& view, bool written) {
  if (object == Py_None) return;
  const DLTensor& tensor = *borrow(name, object, written);
  if (tensor.ndim > kMaxDims) {
    throw Raise{PyExc_ValueError,
                std::string(name) + " has " + std::to_string(tensor.ndim) + " dimensions"};
  }
  view.given = true;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.device = tensor.device;
  view.dtype = tensor.dtype;
  view.ndim = tensor.ndim;
  std::int64_t compact = 1;
  for (auto i = static_cast<std::size_t>(tensor.ndim); i-- > 0;) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : compact;
    compact *= tensor.shape[i];
  }
}

void Views::read_rows(const char* name, PyObject* object, View& view) {
  read(name, object, view);
  if (view.ndim == 0) return;
  const auto last = static_cast<std::size_t>(view.ndim - 1);
  if (view.strides[last] == 1 || view.shape[last] <= 1) return;
  PyObject* const copy = PyObject_CallMethod(object, "contiguous", nullptr);
  if (copy == nullptr) throw PythonError{};
  held_.push_back(copy);
  read(name, copy, view);
}

}  // namespace tessera::python
