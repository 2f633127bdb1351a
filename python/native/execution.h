// Calls on their way to the library: on a CPU with the threads that Python has set, on a GPU on the
// stream and in the memory of the tensors' own framework.
#pragma once

#include "view.h"

#include <memory>

#include "tessera/tessera.hpp"

namespace tessera::python {

/// Other Python threads run meanwhile.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;
  ~WithoutLock() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

/// Threads of runs on the CPU; null: the library's own pool.
std::shared_ptr<ThreadPool>& pool();

/// The framework of a call's tensors, as the call's last argument says: None, or a tuple of the
/// class of its tensors and of functions in Python. Two are for what DLPack's table of functions
/// does not offer, and nobody asks them on a CPU: `stream_of(tensor)`, the handle of its current
/// CUDA stream, and `allocate(bytes, tensor)`, memory on the tensor's GPU. Two make results:
/// `empty_like(tensor)`, and `empty_o(q, v)`, o for any strides and head_dim_v. All borrowed.
struct Framework {
  PyObject* tensor = nullptr;  ///< one of the call's
  PyObject* kind = nullptr;    ///< null: whatever tensors say of themselves
  PyObject* stream_of = nullptr;
  PyObject* allocate = nullptr;
  PyObject* empty_like = nullptr;
  PyObject* empty_o = nullptr;

  Framework(PyObject* described, PyObject* tensor_of_call);

  /// Where the framework works on the device of `view`, the tensor's. Null on a CPU.
  void* stream(const View& view) const;
};

/// A new tensor of the framework's for o, whose dimensions lie in memory in the order of q's; `o`
/// becomes its view. Borrowed: `views` keeps it. Throws.
PyObject* new_output(PyObject* q, const View& q_view, PyObject* v, const View& v_view,
                     const Framework& framework, Views& views, View& o);

/// New rows that are appended before attention looks at the cache.
struct NewRows {
  AppendShape shape;
  AppendTensors tensors;
};

/// Plans and runs attention, after the append of `rows` if there are some. q: the view of
/// framework.tensor, or of one on the same device. Throws.
void attend(const Problem& problem, const Tensors& tensors, const View& q,
            const Framework& framework, const NewRows* rows = nullptr);

/// Raises a failed Status: ValueError, NotImplementedError or RuntimeError.
void check(const Status& status);

/// Runs what is one step on either device: body(Execution).
template <class Body>
void run_step(void* stream, const Body& body) {
  const std::shared_ptr<ThreadPool> own = pool();
  Status status;
  {
    const WithoutLock unlocked;
    const Executor executor = own ? own->executor() : default_executor();
    // Whose tensors said where they lie: there is nothing to ask the driver.
    status = body(Execution{.executor = &executor, .stream = stream, .places_known = true});
  }
  check(status);
}

}  // namespace tessera::python
