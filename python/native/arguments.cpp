#include "arguments.h"

namespace tessera::python {

[[noreturn]] void wrong_type(const char* name, PyObject* object, const char* expected,
                             PyObject* type) {
  PyErr_Clear();
  PyObject* const printed = PyObject_Repr(object);
  const char* const bytes =
      printed != nullptr ? PyUnicode_AsUTF8AndSize(printed, nullptr) : nullptr;
  std::string text = bytes != nullptr ? bytes : "?";
  Py_XDECREF(printed);
  PyErr_Clear();
  constexpr std::size_t kLongest = 60;
  const std::size_t end = text.find('\n');
  if (end < kLongest) {
    text.replace(end, std::string::npos, " ...");
  } else if (text.size() > kLongest) {
    // Not into the middle of a character.
    std::size_t cut = kLongest;
    while ((static_cast<unsigned char>(text[cut]) & 0xC0U) == 0x80U) --cut;
    text.replace(cut, std::string::npos, " ...");
  }
  throw Raise{type, std::string(name) + " = " + text + ": must be " + expected};
}

std::int64_t integer_of(const char* name, PyObject* object) {
  const auto number = static_cast<std::int64_t>(PyLong_AsLongLong(object));
  if (number == -1 && PyErr_Occurred() != nullptr) {
    const bool large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    wrong_type(name, object, large ? "an integer of 64 bits" : "an integer");
  }
  return number;
}

}  // namespace tessera::python
