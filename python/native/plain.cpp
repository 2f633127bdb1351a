#include "plain.h"

namespace tessera::python {

namespace {

/// The truth of what a call or a look-up gave; gives the reference up.
bool truth_of(PyObject* answer) {
  if (answer == nullptr) throw PythonError{};
  const int truth = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  if (truth < 0) throw PythonError{};
  return truth != 0;
}

/// A name that attributes are looked up by; kept for ever.
PyObject* name_of_attribute(const char* text) {
  PyObject* const name = PyUnicode_InternFromString(text);
  if (name == nullptr) throw PythonError{};
  return name;
}

PyObject* part_of(PyObject* tuple, Py_ssize_t place) {
  PyObject* const part = PyTuple_GetItem(tuple, place);
  if (part == nullptr) throw PythonError{};
  return part;
}

}  // namespace

bool is_plain(PyObject* watch, PyObject* const* tensors, Py_ssize_t count) {
  static PyObject* const requires_grad = name_of_attribute("requires_grad");
  static PyObject* const is_meta = name_of_attribute("is_meta");
  constexpr Py_ssize_t kWatchers = 3;  // from there on
  auto* const kind = reinterpret_cast<PyTypeObject*>(part_of(watch, 0));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (tensors[i] != Py_None && Py_TYPE(tensors[i]) != kind) return false;
  }
  for (Py_ssize_t i = kWatchers; i < PyTuple_Size(watch); ++i) {
    if (truth_of(PyObject_CallNoArgs(part_of(watch, i)))) return false;
  }
  PyObject* const is_neg = part_of(watch, 1);
  const bool records = truth_of(PyObject_CallNoArgs(part_of(watch, 2)));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const tensor = tensors[i];
    if (tensor == Py_None) continue;
    if (truth_of(PyObject_CallFunctionObjArgs(is_neg, tensor, nullptr)) ||
        (records && truth_of(PyObject_GetAttr(tensor, requires_grad))) ||
        (i == 0 && truth_of(PyObject_GetAttr(tensor, is_meta)))) {
      return false;
    }
  }
  return true;
}

}  // namespace tessera::python
