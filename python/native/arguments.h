// The arguments of a function of the module, by position, and what becomes of its failures.
#pragma once

#include <exception>
#include <new>
#include <optional>

#include "view.h"

namespace tessera::python {

/// Raises "softcap = 'a': must be a number", with the object as Python prints it, cut to one short
/// line.
[[noreturn]] void wrong_type(const char* name, PyObject* object, const char* expected,
                             PyObject* type = PyExc_TypeError);

std::int64_t integer_of(const char* name, PyObject* object);

/// Arguments of a call by position.
class Arguments {
 public:
  Arguments(const char* function, PyObject* const* objects, Py_ssize_t count, Py_ssize_t expected)
      : objects_(objects) {
    if (count != expected) {
      throw Raise{PyExc_TypeError, std::string(function) + " takes " + std::to_string(expected) +
                                       " arguments, not " + std::to_string(count)};
    }
  }

  PyObject* next() { return *objects_++; }

  std::int64_t integer(const char* name) { return integer_of(name, next()); }

  std::optional<std::int64_t> optional_integer(const char* name) {
    if (*objects_ != Py_None) return integer(name);
    ++objects_;
    return std::nullopt;
  }

  std::uint64_t bits(const char* name) {
    PyObject* const object = next();
    const auto number = static_cast<std::uint64_t>(PyLong_AsUnsignedLongLongMask(object));
    if (PyErr_Occurred() != nullptr) wrong_type(name, object, "an integer");
    return number;
  }

  float real(const char* name) {
    PyObject* const object = next();
    const double number = PyFloat_AsDouble(object);
    if (number == -1.0 && PyErr_Occurred() != nullptr) wrong_type(name, object, "a number");
    return static_cast<float>(number);
  }

  std::optional<float> optional_real(const char* name) {
    if (*objects_ != Py_None) return real(name);
    ++objects_;
    return std::nullopt;
  }

  bool flag(const char* name) {
    PyObject* const object = next();
    const int truth = PyObject_IsTrue(object);
    if (truth < 0) wrong_type(name, object, "True or False");
    return truth != 0;
  }

 private:
  PyObject* const* objects_;
};

/// Runs the body of a function of the module; a failure becomes a Python exception.
template <class Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const Raise& raise) {
    PyErr_SetString(raise.type, raise.text.c_str());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace tessera::python
