// View: where a tensor of any framework lies, read through DLPack.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "dlpack.h"

namespace tessera::python {

/// Thrown where a Python exception is already set.
struct PythonError {};

/// Thrown to raise `type` (a PyExc_ object) with the text.
struct Raise {
  PyObject* type;
  std::string text;
};

inline constexpr int kMaxDims = 8;

/// A tensor's address and shape. Valid while the `Views` that made it and the tensor live.
struct View {
  char* data = nullptr;
  DLDevice device = {};
  DLType dtype = {};
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape = {};
  std::array<std::int64_t, kMaxDims> strides = {};  ///< elements
  bool given = false;                               ///< false: None was passed

  explicit operator bool() const { return given; }
  bool on_gpu() const { return device.type == kDLCUDA || device.type == kDLCUDAManaged; }
  std::int64_t size() const;
  bool contiguous() const;
};

/// "float32", "int32", ...
std::string name_of(DLType dtype);
/// "cpu", "cuda:0", ...
std::string name_of(DLDevice device);
/// "(2, 128, 8, 64)"
std::string shape_text(const View& view);

/// The functions that the tensor's framework offers to C; null: none.
const DLExchange* exchange_of(PyObject* tensor);

/// Makes views, and keeps what their tensors' frameworks lent until destroyed.
class Views {
 public:
  /// kind: the class of which every tensor must be; null: any that DLPack can read.
  explicit Views(PyObject* kind = nullptr) : kind_(kind) {}
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  ~Views();

  /// Of None `view` stays as it is, which is empty. Throws PythonError, Raise(TypeError: no tensor,
  /// or of another kind; ValueError: read-only but `written`).
  void read(const char* name, PyObject* object, View& view, bool written = false);

  /// The same of rows that kernels can read only where the last stride is 1: if it is not, of a
  /// copy.
  void read_rows(const char* name, PyObject* object, View& view);

  /// Takes over a reference.
  void keep(PyObject* object) { held_.push_back(object); }

 private:
  const DLTensor* borrow(const char* name, PyObject* object, bool written);

  PyObject* kind_;
  std::vector<PyObject*> held_;
  DLTensor borrowed_ = {};
};

}  // namespace tessera::python
