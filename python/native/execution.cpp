#include "execution.h"

#include <new>

#include "call.h"

namespace tessera::python {

namespace {

/// A framework's memory on the device of a tensor. It may be handed back as soon as a run is
/// enqueued: whoever gets it next uses it after us on the same stream.
class Workspace {
 public:
  Workspace(const Framework& framework, const View& view, std::size_t bytes) {
    if (bytes == 0) return;
    if (lend(framework, view, static_cast<std::int64_t>(bytes))) return;
    if (framework.allocate == nullptr) {
      throw Raise{PyExc_RuntimeError, "no workspace: this framework's tensors must be on the CPU"};
    }
    object_ = PyObject_CallFunction(framework.allocate, "nO", static_cast<Py_ssize_t>(bytes),
                                    framework.tensor);
    if (object_ == nullptr) throw PythonError{};
    try {
      View memory;
      views_.read("workspace", object_, memory, true);
      data = memory.data;
    } catch (...) {
      Py_DECREF(object_);
      throw;
    }
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() {
    Py_XDECREF(object_);
    if (lent_ != nullptr && lent_->deleter != nullptr) lent_->deleter(lent_);
  }

  void* data = nullptr;

 private:
  /// False: the framework lends nothing so, or could not. Why it could not, Python says better.
  bool lend(const Framework& framework, const View& view, std::int64_t bytes) {
    const DLExchange* const exchange = exchange_of(framework.tensor);
    if (exchange == nullptr || exchange->allocate == nullptr) return false;
    DLTensor wanted = {nullptr, view.device, 1, {kDLUInt, 8, 1}, &bytes, nullptr, 0};
    const auto ignore = [](void*, const char*, const char*) {};
    if (exchange->allocate(&wanted, &lent_, nullptr, ignore) != 0) {
      PyErr_Clear();
      lent_ = nullptr;
      return false;
    }
    data = static_cast<char*>(lent_->tensor.data) + lent_->tensor.byte_offset;
    return true;
  }

  PyObject* object_ = nullptr;
  DLManagedTensorVersioned* lent_ = nullptr;
  Views views_;
};

/// The same of the host; aligned as the library asks.
struct HostMemory {
  static constexpr auto kAlignment = std::align_val_t{Plan::workspace_alignment};
  void* data;
  explicit HostMemory(std::size_t bytes) : data(::operator new(bytes, kAlignment)) {}
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() { ::operator delete(data, kAlignment); }
};

Status append_and_run(const Plan& plan, const Tensors& tensors, void* workspace,
                      const NewRows* rows, const Execution& execution) {
  if (rows != nullptr) {
    if (Status s = append(rows->shape, rows->tensors, plan.device(), execution); !s) return s;
  }
  return run(plan, tensors, workspace, plan.workspace_bytes(), execution);
}

}  // namespace

std::shared_ptr<ThreadPool>& pool() {
  static std::shared_ptr<ThreadPool> pool;
  return pool;
}

Framework::Framework(PyObject* described, PyObject* tensor_of_call) : tensor(tensor_of_call) {
  if (described == Py_None) return;
  PyObject** const parts[] = {&kind, &stream_of, &allocate, &empty_like, &empty_o};
  for (Py_ssize_t i = 0; i < 5; ++i) {
    *parts[i] = PyTuple_GetItem(described, i);
    if (*parts[i] == nullptr) throw PythonError{};
  }
}

void* Framework::stream(const View& view) const {
  if (!view.on_gpu()) return nullptr;
  const DLExchange* const exchange = exchange_of(tensor);
  void* current = nullptr;
  if (exchange != nullptr && exchange->current_stream != nullptr &&
      exchange->current_stream(view.device.type, view.device.id, &current) == 0) {
    return current;
  }
  PyErr_Clear();
  if (stream_of == nullptr) return nullptr;  // the default stream
  PyObject* const handle = PyObject_CallFunction(stream_of, "O", tensor);
  if (handle == nullptr) throw PythonError{};
  current = PyLong_AsVoidPtr(handle);
  Py_DECREF(handle);
  if (PyErr_Occurred() != nullptr) throw PythonError{};
  return current;
}

PyObject* new_output(PyObject* q, const View& q_view, PyObject* v, const View& v_view,
                     const Framework& framework, Views& views, View& o) {
  if (framework.empty_like == nullptr) {
    throw Raise{PyExc_ValueError, "out is None: a tensor is required"};
  }
  const auto take = [&](PyObject* made) {
    if (made == nullptr) throw PythonError{};
    views.keep(made);
    views.read("out", made, o, true);
    return made;
  };
  const auto last = static_cast<std::size_t>(q_view.ndim - 1);
  if (q_view.shape[last] == v_view.shape[static_cast<std::size_t>(v_view.ndim - 1)]) {
    PyObject* const made = take(PyObject_CallFunctionObjArgs(framework.empty_like, q, nullptr));
    if (o.strides[last] == 1 || q_view.shape[last] <= 1) return made;
  }
  return take(PyObject_CallFunctionObjArgs(framework.empty_o, q, v, nullptr));
}

void attend(const Problem& problem, const Tensors& tensors, const View& q,
            const Framework& framework, const NewRows* rows) {
  const Plan plan = plan_for(problem, device_of(q));
  if (!q.on_gpu()) {
    run_step(nullptr, [&](const Execution& execution) {
      const HostMemory workspace(plan.workspace_bytes());
      return append_and_run(plan, tensors, workspace.data, rows, execution);
    });
    return;
  }
  const Workspace workspace(framework, q, plan.workspace_bytes());
  run_step(framework.stream(q), [&](const Execution& execution) {
    return append_and_run(plan, tensors, workspace.data, rows, execution);
  });
}

void check(const Status& status) {
  switch (status.code) {
    case Code::ok: return;
    case Code::invalid: throw Raise{PyExc_ValueError, status.text};
    case Code::unsupported: throw Raise{PyExc_NotImplementedError, status.text};
    case Code::workspace:
    case Code::device: break;
  }
  throw Raise{PyExc_RuntimeError, status.text};
}

}  // namespace tessera::python
