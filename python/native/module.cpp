// The module tessera._native: two calls that compute, one that explains, the same for tensors of 8
// bits, which another makes, and for attention over caches, appends to them, the merge of partial
// results, the dropout mask, and the threads.
// Written against CPython's limited API, so that one binary serves every Python from 3.10 on, and
// DLPack, so that it serves every framework.
//
// Called by the package's own Python only; python/tessera/_native.pyi has the signatures.
#include "arguments.h"
#include "cache.h"
#include "call.h"
#include "execution.h"
#include "plain.h"
#include "quantize.h"
#include "scaled.h"

namespace tessera::python {

namespace {

PyObject* none() { return Py_NewRef(Py_None); }

/// q, k, v, o, softmax_lse, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k
void read_inputs(Arguments& arguments, Views& views, Inputs& in, bool writes_o) {
  views.read("q", arguments.next(), in.q);
  views.read("k", arguments.next(), in.k);
  views.read("v", arguments.next(), in.v);
  views.read("o", arguments.next(), in.o, writes_o);
  views.read("lse", arguments.next(), in.softmax_lse, writes_o);
  views.read("bias", arguments.next(), in.bias);
  views.read("alibi_slopes", arguments.next(), in.alibi_slopes);
  views.read("sink", arguments.next(), in.sink);
  views.read("cu_seqlens_q", arguments.next(), in.cu_seqlens_q);
  views.read("cu_seqlens_k", arguments.next(), in.cu_seqlens_k);
}

/// The numbers of tessera/arguments.py, and the two of rng_state.
void read_options(Arguments& arguments, Options& options) {
  options.max_seqlen_q = arguments.integer("max_seqlen_q");
  options.max_seqlen_k = arguments.integer("max_seqlen_k");
  options.softmax_scale = arguments.optional_real("softmax_scale");
  options.softcap = arguments.real("softcap");
  options.window_left = arguments.integer("window[0]");
  options.window_right = arguments.integer("window[1]");
  options.top_left = arguments.flag("alignment");
  options.dropout_p = arguments.real("dropout_p");
  options.deterministic = arguments.flag("deterministic");
  options.batch_invariant = arguments.flag("batch_invariant");
  options.seed = arguments.bits("rng_state[0]");
  options.offset = arguments.bits("rng_state[1]");
}

/// dout, dsoftmax_lse, dq, dk, dv, dbias, dsink
void read_gradients(Arguments& arguments, Views& views, Inputs& in) {
  views.read("dout", arguments.next(), in.dout);
  views.read("dlse", arguments.next(), in.dsoftmax_lse);
  views.read("dq", arguments.next(), in.dq, true);
  views.read("dk", arguments.next(), in.dk, true);
  views.read("dv", arguments.next(), in.dv, true);
  views.read("dbias", arguments.next(), in.dbias, true);
  views.read("dsink", arguments.next(), in.dsink, true);
}

PyObject* attend(const Inputs& in, const Options& options, const Framework& framework) {
  const Problem problem = problem_of(in, options);
  attend(problem, tensors_of(in, options, problem), in.q, framework);
  return none();
}

constexpr Py_ssize_t kInputs = 10, kSecondQuery = 1, kOptions = 12, kGradients = 7, kFramework = 1;

PyObject* forward(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("forward", objects, count, kInputs + kSecondQuery + kOptions + kFramework);
    const Framework framework(objects[count - 1], objects[0]);
    Views views(framework.kind);
    Inputs in;
    Options options;
    read_inputs(arguments, views, in, true);
    views.read("qv", arguments.next(), in.qv);
    read_options(arguments, options);
    if (!in.o) throw Raise{PyExc_ValueError, "o is None: a tensor is required"};
    return attend(in, options, framework);
  });
}

PyObject* backward(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("backward", objects, count, kInputs + kOptions + kGradients + kFramework);
    const Framework framework(objects[count - 1], objects[0]);
    Views views(framework.kind);
    Inputs in;
    Options options;
    options.pass = Pass::backward;
    read_inputs(arguments, views, in, false);
    read_options(arguments, options);
    read_gradients(arguments, views, in);
    for (const auto& [name, view] : {std::pair{"o", &in.o},
                                     {"lse", &in.softmax_lse},
                                     {"dout", &in.dout},
                                     {"dq", &in.dq},
                                     {"dk", &in.dk},
                                     {"dv", &in.dv}}) {
      if (!*view)
        throw Raise{PyExc_ValueError, std::string(name) + " is None: a tensor is required"};
    }
    return attend(in, options, framework);
  });
}

/// The device that a name means, or the one the tensors are on.
Device device_named(PyObject* name, const View& q) {
  if (name == Py_None) return device_of(q);
  const char* text = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (text == nullptr) wrong_type("device", name, "the name of a device, e.g. 'h200', or None");
  const Result<Device> device = named_device(text);
  check(device.status());
  return *device;
}

PyObject* explained(const Problem& problem, PyObject* device, const View& q) {
  check(validate(problem));
  const std::string text = explain(problem, device_named(device, q));
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}

PyObject* explain_plan(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("explain", objects, count, kInputs + kSecondQuery + kOptions + 2);
    Views views;
    Inputs in;
    Options options;
    read_inputs(arguments, views, in, false);
    views.read("qv", arguments.next(), in.qv);
    read_options(arguments, options);
    if (arguments.flag("backward")) options.pass = Pass::backward;
    return explained(problem_of(in, options), arguments.next(), in.q);
  });
}

constexpr Py_ssize_t kScales = 8;

/// The scales of 8-bit tensors, which come behind the inputs.
void read_scales(Arguments& arguments, Views& views, ScaleInputs& scales) {
  views.read("q_scale", arguments.next(), scales.q_scale);
  views.read("k_scale", arguments.next(), scales.k_scale);
  views.read("v_scale", arguments.next(), scales.v_scale);
  views.read("score_shift", arguments.next(), scales.score_shift);
  views.read("v_shift", arguments.next(), scales.v_shift);
  scales.k_block = arguments.integer("k_block");
  scales.v_block = arguments.integer("v_block");
  scales.head_dim_v = arguments.optional_integer("head_dim_v");
}

PyObject* scaled_forward(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("scaled_forward", objects, count,
                        kInputs + kScales + kOptions + kFramework);
    const Framework framework(objects[count - 1], objects[0]);
    Views views(framework.kind);
    Inputs in;
    ScaleInputs scales;
    Options options;
    read_inputs(arguments, views, in, true);
    read_scales(arguments, views, scales);
    read_options(arguments, options);
    if (!in.o) throw Raise{PyExc_ValueError, "o is None: a tensor is required"};
    const Problem problem = problem_of(in, options, &scales);
    Tensors tensors = tensors_of(in, options, problem);
    add_scales(scales, problem, tensors);
    attend(problem, tensors, in.q, framework);
    return none();
  });
}

PyObject* explain_scaled(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("explain_scaled", objects, count, kInputs + kScales + kOptions + 1);
    Views views;
    Inputs in;
    ScaleInputs scales;
    Options options;
    read_inputs(arguments, views, in, false);
    read_scales(arguments, views, scales);
    read_options(arguments, options);
    return explained(problem_of(in, options, &scales), arguments.next(), in.q);
  });
}

/// What quantising reads and writes, and how.
PyObject* quantize_tensors(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("quantize", objects, count, 18 + 11 + kFramework);
    constexpr Py_ssize_t kK = 1, kV = 2;
    PyObject* const first = objects[0] != Py_None ? objects[0] : objects[kK];
    const Framework framework(objects[count - 1], first != Py_None ? first : objects[kV]);
    Views views(framework.kind);
    QuantizeInputs in;
    views.read("q", arguments.next(), in.q);
    views.read("k", arguments.next(), in.k);
    views.read("v", arguments.next(), in.v);
    views.read("q_out", arguments.next(), in.q_out, true);
    views.read("k_out", arguments.next(), in.k_out, true);
    views.read("v_out", arguments.next(), in.v_out, true);
    QuantizeOptions options;
    // Scales of a caller's may be read-only.
    for (const auto& [name, view] : {std::pair{"q_scale", &in.q_scale},
                                     {"k_scale", &in.k_scale},
                                     {"v_scale", &in.v_scale},
                                     {"k_mean", &in.k_mean}}) {
      views.read(name, arguments.next(), *view);
    }
    views.read("score_shift", arguments.next(), in.score_shift, true);
    views.read("v_shift", arguments.next(), in.v_shift);
    views.read("signs", arguments.next(), in.signs);
    views.read("cu_seqlens_q", arguments.next(), in.cu_seqlens_q);
    views.read("cu_seqlens_k", arguments.next(), in.cu_seqlens_k);
    views.read("rotary_cos", arguments.next(), in.rotary_cos);
    views.read("rotary_sin", arguments.next(), in.rotary_sin);
    views.read("rotary_seqlens", arguments.next(), in.rotary_seqlens);
    options.q_given = arguments.flag("q_scale");
    options.k_given = arguments.flag("k_scale");
    options.v_given = arguments.flag("v_scale");
    options.max_seqlen_q = arguments.integer("max_seqlen_q");
    options.max_seqlen_k = arguments.integer("max_seqlen_k");
    options.k_block = arguments.integer("k_block");
    options.v_block = arguments.integer("v_block");
    options.hadamard = arguments.integer("hadamard");
    options.v_tiles = arguments.flag("v_tiles");
    options.rotary_interleaved = arguments.flag("rotary_interleaved");
    options.rotary_constant_q = arguments.flag("rotary_constant_q");
    const QuantizeShape shape = shape_of(in, options);
    const QuantizeTensors tensors = tensors_of(in, shape);
    const View& told_by = in.first().second;
    const Device device = device_of(told_by, in.first().first);
    run_step(framework.stream(told_by), [&](const Execution& execution) {
      return quantize(shape, tensors, device, execution);
    });
    return none();
  });
}

/// The mask of rule S8 in a tensor of the caller's.
PyObject* write_dropout_mask(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("dropout_mask", objects, count, 4);
    Views views;
    View keep;
    views.read("keep", arguments.next(), keep, true);
    const float dropout_p = arguments.real("dropout_p");
    const std::uint64_t seed = arguments.bits("rng_state[0]");
    const std::uint64_t offset = arguments.bits("rng_state[1]");
    const Problem problem = problem_of_mask(keep, dropout_p);
    {
      const WithoutLock unlocked;
      check(dropout_mask(problem, seed, offset, reinterpret_cast<std::uint8_t*>(keep.data)));
    }
    return none();
  });
}

/// "full", "after" or "before".
Lengths lengths_of(PyObject* object) {
  const std::pair<const char*, Lengths> names[] = {
      {"full", Lengths::full}, {"after", Lengths::after}, {"before", Lengths::before}};
  for (const auto& [name, lengths] : names) {
    if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, name) == 0) {
      return lengths;
    }
  }
  wrong_type("lengths", object, "'after', 'before' or 'full'", PyExc_ValueError);
}

constexpr Py_ssize_t kCacheInputs = 17, kCacheOptions = 12;

/// q, k_cache, v_cache, out, lse and the other tensors of CacheInputs, and CacheOptions.
void read_cached(Arguments& arguments, Views& views, CacheInputs& in, CacheOptions& options) {
  views.read_rows("q", arguments.next(), in.q);
  views.read("k_cache", arguments.next(), in.k_cache);
  views.read("v_cache", arguments.next(), in.v_cache);
  views.read("out", arguments.next(), in.o, true);
  views.read("lse", arguments.next(), in.lse, true);
  views.read("alibi_slopes", arguments.next(), in.alibi_slopes);
  views.read("sink", arguments.next(), in.sink);
  views.read("cu_seqlens_q", arguments.next(), in.cu_seqlens_q);
  views.read("seqlens", arguments.next(), in.seqlens);
  views.read("cu_seqlens_new", arguments.next(), in.cu_seqlens_new);
  views.read("page_table", arguments.next(), in.page_table);
  views.read("cache_index", arguments.next(), in.cache_index);
  views.read("leftpad", arguments.next(), in.leftpad);
  views.read("tree_mask", arguments.next(), in.tree_mask);
  views.read("k_scale", arguments.next(), in.k_scale);
  views.read("v_scale", arguments.next(), in.v_scale);
  views.read_rows("qv", arguments.next(), in.qv);
  options.max_seqlen_q = arguments.optional_integer("max_seqlen_q").value_or(0);
  options.lengths = lengths_of(arguments.next());
  if (!in.seqlens && options.lengths == Lengths::after) options.lengths = Lengths::full;
  // Of packed new rows it is a bound.
  constexpr std::int64_t kUnbounded = INT64_MAX;
  options.seqlen_new =
      arguments.optional_integer("seqlen_new").value_or(in.cu_seqlens_new ? kUnbounded : 0);
  options.softmax_scale = arguments.optional_real("softmax_scale");
  options.softcap = arguments.real("softcap");
  options.window_left = arguments.integer("window[0]");
  options.window_right = arguments.integer("window[1]");
  options.chunk = arguments.integer("chunk");
  options.sink_tokens = arguments.integer("sink_tokens");
  options.batch_invariant = arguments.flag("batch_invariant");
  options.skip_pages = arguments.flag("skip_pages");
  options.prefix_levels = arguments.integer("prefix_levels");
}

/// Where a checked call writes o: `out`, or without one a new tensor. objects: as read_cached reads
/// them. Borrowed, of the caller or of views.
PyObject* cached_output(PyObject* const* objects, CacheInputs& in, const Framework& framework,
                        Views& views) {
  constexpr std::size_t kQ = 0, kV = 2, kOut = 3;
  if (in.o) return objects[kOut];
  return new_output(objects[kQ], in.q, objects[kV], in.v_cache, framework, views, in.o);
}

PyObject* cached_forward(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("cached_forward", objects, count,
                        kCacheInputs + kCacheOptions + kFramework);
    const Framework framework(objects[count - 1], objects[0]);
    Views views(framework.kind);
    CacheInputs in;
    CacheOptions options;
    read_cached(arguments, views, in, options);
    const Problem problem = problem_of(in, options);
    PyObject* const o = cached_output(objects, in, framework, views);
    attend(problem, tensors_of(in, problem), in.q, framework);
    return Py_NewRef(o);
  });
}

/// An append to the cache, of the rows that come in front of cached_forward's arguments, and
/// cached_forward after it.
PyObject* cached_step(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    constexpr Py_ssize_t kRows = 6 + 3;
    Arguments arguments("cached_step", objects, count,
                        kRows + kCacheInputs + kCacheOptions + kFramework);
    const Framework framework(objects[count - 1], objects[kRows]);
    Views views(framework.kind);
    AppendInputs rows;
    AppendOptions row_options;
    views.read_rows("k_new", arguments.next(), rows.k_new);
    views.read_rows("v_new", arguments.next(), rows.v_new);
    views.read("q_out", arguments.next(), rows.q_out, true);
    views.read_rows("rotary_cos", arguments.next(), rows.rotary_cos);
    views.read_rows("rotary_sin", arguments.next(), rows.rotary_sin);
    views.read("rotary_seqlens", arguments.next(), rows.rotary_seqlens);
    row_options.max_seqlen_new = arguments.integer("max_seqlen_new");
    row_options.rotary_interleaved = arguments.flag("rotary_interleaved");
    row_options.rotary_constant_q = arguments.flag("rotary_constant_q");
    CacheInputs in;
    CacheOptions options;
    read_cached(arguments, views, in, options);
    before_attention(rows, row_options, in, options);
    const AppendShape shape = shape_of(rows, row_options);
    const Problem problem = problem_of(in, options);
    const NewRows fresh = {shape, tensors_of(rows, shape)};
    PyObject* const o = cached_output(objects + kRows, in, framework, views);
    attend(problem, tensors_of(in, problem), in.q, framework, &fresh);
    return Py_NewRef(o);
  });
}

PyObject* explain_cached(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("explain_cached", objects, count, kCacheInputs + kCacheOptions + 1);
    Views views;
    CacheInputs in;
    CacheOptions options;
    read_cached(arguments, views, in, options);
    return explained(problem_of(in, options), arguments.next(), in.q);
  });
}

PyObject* append_rows(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("append", objects, count, 18 + 5 + 1);
    const Framework framework(objects[count - 1], objects[2]);
    Views views(framework.kind);
    AppendInputs in;
    views.read_rows("k_new", arguments.next(), in.k_new);
    views.read_rows("v_new", arguments.next(), in.v_new);
    views.read("k_cache", arguments.next(), in.k_cache, true);
    views.read("v_cache", arguments.next(), in.v_cache, true);
    views.read_rows("q", arguments.next(), in.q);
    views.read("q_out", arguments.next(), in.q_out, true);
    views.read("seqlens", arguments.next(), in.seqlens);
    views.read("cu_seqlens_new", arguments.next(), in.cu_seqlens_new);
    views.read("page_table", arguments.next(), in.page_table);
    views.read("cache_index", arguments.next(), in.cache_index);
    views.read("cu_seqlens_q", arguments.next(), in.cu_seqlens_q);
    views.read("slot_mapping", arguments.next(), in.slot_mapping);
    views.read_rows("rotary_cos", arguments.next(), in.rotary_cos);
    views.read_rows("rotary_sin", arguments.next(), in.rotary_sin);
    views.read("rotary_seqlens", arguments.next(), in.rotary_seqlens);
    views.read("rotary_positions", arguments.next(), in.rotary_positions);
    views.read("k_scale", arguments.next(), in.k_scale);
    views.read("v_scale", arguments.next(), in.v_scale);
    AppendOptions options;
    options.lengths = lengths_of(arguments.next());
    options.max_seqlen_q = arguments.integer("max_seqlen_q");
    options.max_seqlen_new = arguments.integer("max_seqlen_new");
    options.rotary_interleaved = arguments.flag("rotary_interleaved");
    options.rotary_constant_q = arguments.flag("rotary_constant_q");
    const AppendShape shape = shape_of(in, options);
    const AppendTensors tensors = tensors_of(in, shape);
    const Device device = device_of(in.k_cache, "k_cache");
    run_step(framework.stream(in.k_cache),
             [&](const Execution& execution) { return append(shape, tensors, device, execution); });
    return none();
  });
}

/// Partial results, merged into tensors of the caller's.
PyObject* combine_parts(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments("combine", objects, count, 5);
    const Framework framework(objects[count - 1], objects[0]);
    Views views(framework.kind);
    PartialInputs in;
    views.read("o_parts", arguments.next(), in.o_parts);
    views.read("lse_parts", arguments.next(), in.lse_parts);
    views.read("o", arguments.next(), in.o, true);
    views.read("lse", arguments.next(), in.lse, true);
    const PartialResults results = results_of(in);
    const PartialTensors tensors = tensors_of(in);
    const Device device = device_of(in.o_parts, "o_parts");
    run_step(framework.stream(in.o_parts), [&](const Execution& execution) {
      return combine(results, tensors, device, execution);
    });
    return none();
  });
}

PyObject* plain(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return guarded([&] {
    if (count < 1) throw Raise{PyExc_TypeError, "is_plain takes one argument or more"};
    return PyBool_FromLong(is_plain(objects[0], objects + 1, count - 1) ? 1 : 0);
  });
}

PyObject* set_num_threads(PyObject*, PyObject* number) {
  return guarded([&] {
    const std::int64_t threads = integer_of("num_threads", number);
    if (threads < 1 || threads > 4096) {
      throw Raise{PyExc_ValueError,
                  "num_threads = " + std::to_string(threads) + ": must lie in [1, 4096]"};
    }
    pool() = std::make_shared<ThreadPool>(static_cast<int>(threads));
    return none();
  });
}

PyObject* get_num_threads(PyObject*, PyObject*) {
  return guarded([] {
    const Executor executor = pool() ? pool()->executor() : default_executor();
    return PyLong_FromLong(executor.num_threads);
  });
}

/// A forked child has none of its parent's threads: it gets a pool of its own, and the parent's is
/// never touched again.
PyObject* after_fork(PyObject*, PyObject*) {
  return guarded([] {
    if (pool()) (void)new std::shared_ptr<ThreadPool>(pool());
    pool() = std::make_shared<ThreadPool>();
    return none();
  });
}

PyObject* version_text(PyObject*, PyObject*) { return PyUnicode_FromString(version()); }

PyObject* gpu_name(PyObject*, PyObject* ordinal) {
  return guarded([&] {
    const std::int64_t number = integer_of("ordinal", ordinal);
    if (number < 0 || number > INT32_MAX) {
      throw Raise{PyExc_ValueError,
                  "ordinal = " + std::to_string(number) + ": must be a GPU's number, 0 or more"};
    }
    const Result<Device> device = this_gpu(static_cast<int>(number));
    check(device.status());
    return PyUnicode_FromString(device->name.c_str());
  });
}

PyObject* add_folder(PyObject*, PyObject* folder) {
  PyObject* const path = PyUnicode_EncodeFSDefault(folder);
  if (path == nullptr) return nullptr;
  PyObject* const done = guarded([&] {
    add_nvrtc_folder(PyBytes_AsString(path));
    return none();
  });
  Py_DECREF(path);
  return done;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef* methods() {
  static PyMethodDef table[] = {
      {"forward", fast(forward), METH_FASTCALL, nullptr},
      {"backward", fast(backward), METH_FASTCALL, nullptr},
      {"explain", fast(explain_plan), METH_FASTCALL, nullptr},
      {"scaled_forward", fast(scaled_forward), METH_FASTCALL, nullptr},
      {"explain_scaled", fast(explain_scaled), METH_FASTCALL, nullptr},
      {"quantize", fast(quantize_tensors), METH_FASTCALL, nullptr},
      {"cached_forward", fast(cached_forward), METH_FASTCALL, nullptr},
      {"cached_step", fast(cached_step), METH_FASTCALL, nullptr},
      {"explain_cached", fast(explain_cached), METH_FASTCALL, nullptr},
      {"append", fast(append_rows), METH_FASTCALL, nullptr},
      {"combine", fast(combine_parts), METH_FASTCALL, nullptr},
      {"is_plain", fast(plain), METH_FASTCALL, nullptr},
      {"dropout_mask", fast(write_dropout_mask), METH_FASTCALL, nullptr},
      {"set_num_threads", set_num_threads, METH_O, nullptr},
      {"get_num_threads", get_num_threads, METH_NOARGS, nullptr},
      {"after_fork", after_fork, METH_NOARGS, nullptr},
      {"version", version_text, METH_NOARGS, nullptr},
      {"gpu", gpu_name, METH_O, nullptr},
      {"add_nvrtc_folder", add_folder, METH_O, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  return table;
}

}  // namespace

}  // namespace tessera::python

// NOLINTNEXTLINE(bugprone-reserved-identifier, readability-identifier-naming): Python's choice
PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "tessera._native",
                               nullptr,
                               -1,
                               tessera::python::methods(),
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
