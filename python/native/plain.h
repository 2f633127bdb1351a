// Whether a call of torch's may go straight to the library, asked once for all of its tensors.
#pragma once

#include "view.h"

namespace tessera::python {

/// watch: a tuple of torch's class of tensors; of its method `is_neg`; of `is_grad_enabled`; and of
/// functions that are true while somebody wants to see the operators that are called. tensors: each
/// a tensor or None.
///
/// True: nobody watches, and every tensor is of that very class, has its sign in memory and takes
/// no part in autograd, and the first one has memory. Else whoever asked has to look closer.
/// Throws.
bool is_plain(PyObject* watch, PyObject* const* tensors, Py_ssize_t count);

}  // namespace tessera::python
