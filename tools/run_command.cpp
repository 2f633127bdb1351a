// tessera run: attention over tensors in .npy or .safetensors files; writes o and softmax_lse.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "check/device_copy.h"
#include "commands.h"
#include "files/convert.h"
#include "files/tensor_file.h"
#include "numbers.h"
#include "report.h"

namespace tessera::tools {

namespace {

struct RunOptions {
  std::string q, k, v, out, lse;
  std::string layout = "bshd";
  std::string dtype;
  bool u16_is_bf16 = false;
  bool causal = false;
  std::vector<std::int64_t> window = {-1, -1};
  std::string align = "br";
  std::optional<float> softmax_scale;
  float softcap = 0.0F;
  std::string qv, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k;
  float dropout_p = 0.0F;
  std::uint64_t seed = 0, offset = 0;
  DeviceOptions where{"cpu", 0};
  bool force = false;
  bool quiet = false;
  bool json = false;
};

/// The files of one run, read and converted; they keep the memory that Tensors points into.
struct Files {
  FileTensor q, k, v;
  std::optional<FileTensor> qv, bias, alibi_slopes, sink;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
};

/// How a .npy file of nameless two-byte words is read.
TwoBytes two_bytes(const RunOptions& options) {
  return options.u16_is_bf16 ? TwoBytes::bf16 : TwoBytes::offer;
}

/// A result may replace an old file, as cp would, but an input only if asked for; nor may two
/// results share one. Links do not hide a file.
Status check_outputs(const RunOptions& o) {
  if (!o.lse.empty() && same_file(o.out, o.lse)) {
    return Status::invalid("--out and --lse both name " + printable(o.out) +
                           "; a .safetensors file given as --out alone takes both");
  }
  if (o.force) return {};
  const struct {
    const char* name;
    const std::string& path;
  } outputs[] = {{"--out", o.out}, {"--lse", o.lse}},
    inputs[] = {{"--q", o.q},
                {"--k", o.k},
                {"--v", o.v},
                {"--qv", o.qv},
                {"--bias", o.bias},
                {"--alibi-slopes", o.alibi_slopes},
                {"--sink", o.sink},
                {"--cu-seqlens-q", o.cu_seqlens_q},
                {"--cu-seqlens-k", o.cu_seqlens_k}};
  for (const auto& output : outputs) {
    for (const auto& input : inputs) {
      if (output.path.empty() || input.path.empty() ||
          !same_file(output.path, TensorAddress::parse(input.path).path)) {
        continue;
      }
      return Status::invalid(std::string(output.name) + " = " + printable(output.path) +
                             ": is the file that " + input.name +
                             " reads; name another, or replace it with --force");
    }
  }
  return {};
}

/// Sizes of a q, k or v file, whatever its layout.
struct Shape {
  std::int64_t batch = 1, seqlen = 0, heads = 0, dim = 0;
};

Result<FileTensor> read_as(const std::string& address, Dtype dtype, TwoBytes two_bytes) {
  Result<FileTensor> tensor = read_tensor(address, two_bytes);
  if (!tensor) return tensor;
  Result<FileTensor> converted = as_dtype(*tensor, dtype);
  if (!converted) return Status::invalid(address + ": " + converted.status().text);
  return converted;
}

/// The storage type to compute in: the one asked for, else that of q's file; f64 is computed as
/// f32.
Result<Dtype> choose_dtype(const RunOptions& options, const FileTensor& q) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    if (options.dtype.empty() ? q.element == element_of(dtype)
                              : options.dtype == to_string(dtype)) {
      return dtype;
    }
  }
  if (options.dtype.empty() && q.element == Element::f64) return Dtype::f32;
  return Status::invalid(options.q + ": holds " + to_string(q.element) +
                         "; attention takes f32, bf16, f16 or f64");
}

bool is_packed(const RunOptions& options) { return !options.cu_seqlens_q.empty(); }

/// bshd: (batch, seqlen, heads, dim) or (seqlen, heads, dim); bhsd: heads before seqlen; packed:
/// (total, heads, dim) or, bhsd, (heads, total, dim).
Result<Shape> shape_of(const std::string& address, const FileTensor& tensor,
                       const RunOptions& options) {
  std::vector<std::int64_t> s = tensor.shape;
  const std::size_t most = is_packed(options) ? 3 : 4;
  if (s.size() == 3) s.insert(s.begin(), 1);
  if (s.size() != 4 || tensor.shape.size() > most) {
    return Status::invalid(
        address + ": shape " + shape_text(tensor.shape) + ": must be " +
        (is_packed(options) ? "(total, heads, head_dim)" : "(batch, seqlen, heads, head_dim)") +
        "; --layout bhsd has heads before seqlen");
  }
  if (options.layout == "bhsd") std::swap(s[1], s[2]);
  return Shape{s[0], s[1], s[2], s[3]};
}

ConstTensor view(const FileTensor& tensor, const Shape& s, bool heads_first) {
  const std::int64_t batch = s.seqlen * s.heads * s.dim;
  if (heads_first) return {tensor.data, batch, s.dim, s.seqlen * s.dim};
  return {tensor.data, batch, s.heads * s.dim, s.dim};
}

std::int64_t longest(const std::vector<std::int32_t>& offsets) {
  std::int64_t length = 0;
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    length = std::max<std::int64_t>(length, std::int64_t{offsets[i]} - offsets[i - 1]);
  }
  return length;
}

/// Reads a one-dimensional integer file: the ends of sequences that are `total` rows together. A
/// GPU's run would not look.
Status read_offsets(const std::string& address, std::int64_t total,
                    std::vector<std::int32_t>& offsets) {
  const Result<FileTensor> tensor = read_tensor(address);
  if (!tensor) return tensor.status();
  Result<std::vector<std::int32_t>> values = as_int32(*tensor);
  if (!values) return Status::invalid(address + ": " + values.status().text);
  if (values->empty()) return Status::invalid(address + ": needs batch + 1 offsets, has none");
  if (values->front() != 0 || values->back() != total ||
      !std::is_sorted(values->begin(), values->end())) {
    return Status::invalid(address + ": offsets must begin with 0, never fall, and end with " +
                           std::to_string(total) + ", the rows of the file they divide");
  }
  offsets = std::move(*values);
  return {};
}

/// Everything about the run that does not need the optional files.
Status describe(const RunOptions& options, const Shape& q, const Shape& k, const Shape& v,
                const Files& files, Problem& p) {
  if (k.batch != q.batch || v.batch != q.batch || v.seqlen != k.seqlen || v.heads != k.heads ||
      k.dim != q.dim) {
    return Status::invalid(
        "shapes do not agree: batch of q, k, v " + std::to_string(q.batch) + ", " +
        std::to_string(k.batch) + ", " + std::to_string(v.batch) + "; seqlen of k, v " +
        std::to_string(k.seqlen) + ", " + std::to_string(v.seqlen) + "; heads of k, v " +
        std::to_string(k.heads) + ", " + std::to_string(v.heads) + "; head_dim of q, k " +
        std::to_string(q.dim) + ", " + std::to_string(k.dim) + ": each group must be equal");
  }
  p.batch = q.batch;
  p.num_heads = q.heads;
  p.num_heads_k = k.heads;
  p.seqlen_q = q.seqlen;
  p.seqlen_k = k.seqlen;
  p.head_dim = q.dim;
  p.head_dim_v = v.dim;
  if (is_packed(options)) {
    p.packed = true;
    p.batch = static_cast<std::int64_t>(files.cu_seqlens_q.size()) - 1;
    if (files.cu_seqlens_k.size() != files.cu_seqlens_q.size()) {
      return Status::invalid("cu_seqlens_k has " + std::to_string(files.cu_seqlens_k.size()) +
                             " offsets, cu_seqlens_q " + std::to_string(files.cu_seqlens_q.size()) +
                             ": must be equal");
    }
    p.total_q = q.seqlen;
    p.total_k = k.seqlen;
    p.seqlen_q = longest(files.cu_seqlens_q);
    p.seqlen_k = longest(files.cu_seqlens_k);
  }
  if (options.causal && options.window[1] > 0) {
    return Status::invalid("--window = " + std::to_string(options.window[0]) + "," +
                           std::to_string(options.window[1]) +
                           ": its right end must be 0 or -1 beside --causal");
  }
  p.window_left = options.window[0];
  p.window_right = options.causal ? 0 : options.window[1];
  p.alignment = options.align == "tl" ? Alignment::top_left : Alignment::bottom_right;
  p.softmax_scale = options.softmax_scale;
  p.softcap = options.softcap;
  p.dropout_p = options.dropout_p;
  return {};
}

/// A second query: as q, of v's columns.
Status read_second_query(const RunOptions& options, Problem& p, Files& files, Tensors& t) {
  Result<FileTensor> tensor = read_as(options.qv, p.dtype, two_bytes(options));
  if (!tensor) return tensor.status();
  std::vector<std::int64_t> expected = files.q.shape;
  expected.back() = p.head_dim_v;
  if (tensor->shape != expected) {
    return Status::invalid(options.qv + ": shape " + shape_text(tensor->shape) + ": must be " +
                           shape_text(expected) + ", that of q with v's columns");
  }
  const Result<Shape> shape = shape_of(options.qv, *tensor, options);
  if (!shape) return shape.status();
  p.qv = true;
  files.qv = std::move(*tensor);
  t.qv = view(*files.qv, *shape, options.layout == "bhsd");
  return {};
}

/// A (heads) or (batch, heads) fp32 parameter.
Status read_per_head(const RunOptions& options, const std::string& address, const Problem& p,
                     bool batch_allowed, std::optional<FileTensor>& file) {
  Result<FileTensor> tensor = read_as(address, Dtype::f32, two_bytes(options));
  if (!tensor) return tensor.status();
  const std::vector<std::int64_t> heads = {p.num_heads}, both = {p.batch, p.num_heads};
  if (tensor->shape != heads && !(batch_allowed && tensor->shape == both)) {
    return Status::invalid(address + ": shape " + shape_text(tensor->shape) + ": must be " +
                           shape_text(heads) + (batch_allowed ? " or " + shape_text(both) : ""));
  }
  file = std::move(*tensor);
  return {};
}

/// A bias of up to four dimensions, each 1 or full, aligned at the last like NumPy's broadcasting.
Status read_bias(const RunOptions& options, Problem& p, Files& files, Tensors& t) {
  Result<FileTensor> raw = read_tensor(options.bias, two_bytes(options));
  if (!raw) return raw.status();
  const Dtype dtype = raw->element == element_of(p.dtype) ? p.dtype : Dtype::f32;
  Result<FileTensor> tensor = as_dtype(*raw, dtype);
  if (!tensor) return Status::invalid(options.bias + ": " + tensor.status().text);
  std::vector<std::int64_t> s = tensor->shape;
  const std::vector<std::int64_t> full = {p.batch, p.num_heads, p.seqlen_q, p.seqlen_k};
  bool fits = s.size() <= 4;
  while (s.size() < 4) s.insert(s.begin(), 1);
  for (std::size_t i = 0; fits && i < 4; ++i) fits = s[i] == full[i] || s[i] == 1;
  if (!fits) {
    return Status::invalid(
        options.bias + ": shape " + shape_text(tensor->shape) +
        ": must broadcast to (batch, heads, seqlen_q, seqlen_k) = " + shape_text(full));
  }
  // A dimension of size 1 is the same stored or broadcast.
  p.bias = BiasShape{s[0] != 1, s[1] != 1, s[2] != 1, s[3] != 1, dtype};
  files.bias = std::move(*tensor);
  t.bias = {files.bias->data, s[1] * s[2] * s[3], s[2] * s[3], s[3], 1};
  return {};
}

Status read_extras(const RunOptions& options, Problem& p, Files& files, Tensors& t) {
  if (!options.qv.empty()) {
    if (Status s = read_second_query(options, p, files, t); !s) return s;
  }
  if (!options.bias.empty()) {
    if (Status s = read_bias(options, p, files, t); !s) return s;
  }
  if (!options.alibi_slopes.empty()) {
    if (Status s = read_per_head(options, options.alibi_slopes, p, true, files.alibi_slopes); !s) {
      return s;
    }
    p.alibi = files.alibi_slopes->shape.size() == 2 ? PerHead::batch_heads : PerHead::heads;
    t.alibi_slopes = static_cast<const float*>(files.alibi_slopes->data);
  }
  if (!options.sink.empty()) {
    if (Status s = read_per_head(options, options.sink, p, false, files.sink); !s) return s;
    p.sink = true;
    t.sink = static_cast<const float*>(files.sink->data);
  }
  return {};
}

bool ends_with(const std::string& text, const std::string& ending) {
  return text.size() >= ending.size() &&
         text.compare(text.size() - ending.size(), ending.size(), ending) == 0;
}

/// The result files, mapped, so that o and softmax_lse are computed where they are stored.
struct Results {
  std::vector<TensorOutput> files;
  void* o = nullptr;
  float* softmax_lse = nullptr;  ///< null: nobody asked for it
};

/// A .safetensors file takes both results; .npy files one each.
Result<Results> create_results(const RunOptions& options, const Problem& p,
                               const std::vector<std::int64_t>& q_shape) {
  TensorSpec o{"o", element_of(p.stored_o()), q_shape};
  o.shape.back() = p.head_dim_v;
  const TensorSpec lse{"softmax_lse", Element::f32,
                       p.packed ? std::vector{p.num_heads, p.total_q}
                                : std::vector{p.batch, p.num_heads, p.seqlen_q}};
  std::vector<TensorSpec> first = {o};
  const bool both = options.lse.empty() && ends_with(options.out, ".safetensors");
  if (both) first.push_back(lse);
  Results results;
  Result<TensorOutput> out = TensorOutput::create(options.out, first);
  if (!out) return out.status();
  results.o = out->data(0);
  if (both) results.softmax_lse = static_cast<float*>(out->data(1));
  results.files.push_back(std::move(*out));
  if (options.lse.empty()) return results;
  Result<TensorOutput> second = TensorOutput::create(options.lse, {&lse, 1});
  if (!second) return second.status();
  results.softmax_lse = static_cast<float*>(second->data(0));
  results.files.push_back(std::move(*second));
  return results;
}

void print_summary(const RunOptions& options, const Plan& plan, double seconds) {
  if (options.json) {
    std::printf("%s\n", Json{{"problem", to_string(plan.problem())},
                             {"kernel", plan.kernel()},
                             {"seconds", seconds},
                             {"workspace_bytes", plan.workspace_bytes()},
                             {"out", options.out}}
                            .dump(2)
                            .c_str());
  } else if (!options.quiet) {
    std::printf("%s\n%s: %s, workspace %s -> %s\n", to_string(plan.problem()).c_str(),
                std::string(plan.kernel()).c_str(), seconds_text(seconds).c_str(),
                bytes_text(static_cast<double>(plan.workspace_bytes())).c_str(),
                options.out.c_str());
  }
}

/// Reads q, k, v and the sequence boundaries; fills the part of the problem that they decide.
Status read_inputs(const RunOptions& options, Files& files, Problem& p, Tensors& t) {
  if (options.cu_seqlens_q.empty() != options.cu_seqlens_k.empty()) {
    return Status::invalid("--cu-seqlens-q and --cu-seqlens-k: give both or neither");
  }
  Result<FileTensor> raw = read_tensor(options.q, two_bytes(options));
  if (!raw) return raw.status();
  const Result<Dtype> dtype = choose_dtype(options, *raw);
  if (!dtype) return dtype.status();
  p.dtype = *dtype;
  const struct {
    const std::string& address;
    FileTensor& file;
    ConstTensor& tensor;
  } inputs[] = {{options.q, files.q, t.q}, {options.k, files.k, t.k}, {options.v, files.v, t.v}};
  Shape shapes[3];
  for (std::size_t i = 0; i < 3; ++i) {
    Result<FileTensor> tensor = read_as(inputs[i].address, *dtype, two_bytes(options));
    if (!tensor) return tensor.status();
    const Result<Shape> shape = shape_of(inputs[i].address, *tensor, options);
    if (!shape) return shape.status();
    shapes[i] = *shape;
    inputs[i].file = std::move(*tensor);
    inputs[i].tensor = view(inputs[i].file, shapes[i], options.layout == "bhsd");
  }
  if (is_packed(options)) {
    for (const bool of_q : {true, false}) {
      if (Status s = read_offsets(of_q ? options.cu_seqlens_q : options.cu_seqlens_k,
                                  shapes[of_q ? 0 : 1].seqlen,
                                  of_q ? files.cu_seqlens_q : files.cu_seqlens_k);
          !s) {
        return s;
      }
    }
    t.cu_seqlens_q = files.cu_seqlens_q.data();
    t.cu_seqlens_k = files.cu_seqlens_k.data();
  }
  if (Status s = describe(options, shapes[0], shapes[1], shapes[2], files, p); !s) return s;
  return read_extras(options, p, files, t);
}

/// What a GPU needs of the host's memory.
std::vector<HostRange> ranges_of(const Files& files, const Problem& p, const Results& results) {
  std::vector<HostRange> ranges;
  const std::optional<FileTensor> tensors[] = {
      files.q, files.k, files.v, files.qv, files.bias, files.alibi_slopes, files.sink};
  for (const std::optional<FileTensor>& tensor : tensors) {
    if (!tensor) continue;
    ranges.push_back(
        {tensor->data, static_cast<std::size_t>(tensor->count()) * size_of(tensor->element)});
  }
  for (const auto* offsets : {&files.cu_seqlens_q, &files.cu_seqlens_k}) {
    ranges.push_back({offsets->data(), offsets->size() * sizeof(std::int32_t)});
  }
  const std::int64_t rows = p.rows_q() * p.num_heads;
  const auto add_result = [&ranges](void* start, std::int64_t bytes) {
    if (start != nullptr) ranges.push_back({start, static_cast<std::size_t>(bytes), start});
  };
  add_result(results.o, rows * p.head_dim_v * size_of(p.stored_o()));
  add_result(results.softmax_lse, rows * std::int64_t{sizeof(float)});
  return ranges;
}

/// Copies, runs, waits and copies back. Returns the seconds of the run alone.
Result<double> compute_on_gpu(const Plan& plan, const Tensors& t,
                              std::span<const HostRange> ranges) {
  const Result<DeviceCopy> copy = DeviceCopy::of(t, ranges, plan.device());
  if (!copy) return copy.status();
  const Result<Buffer> workspace = Buffer::allocate(plan.device(), plan.workspace_bytes());
  if (!workspace) return workspace.status();
  const double start = clock_seconds();
  if (Status s = run(plan, copy->tensors(), workspace->data(), workspace->bytes()); !s) return s;
  if (Status s = synchronize(plan.device()); !s) return s;
  const double seconds = clock_seconds() - start;
  if (Status s = copy->bring_back(ranges); !s) return s;
  return seconds;
}

Result<double> compute_on_cpu(const RunOptions& options, const Plan& plan, const Tensors& t) {
  const auto workspace = allocate(plan.workspace_bytes());
  if (!workspace) return workspace.status();
  ThreadPool pool(plan.device().threads);
  const Executor executor = pool.executor();
  Progress progress("attention");
  Execution execution{&executor};
  if (!options.quiet) {
    execution.progress = &Progress::callback;
    execution.progress_context = &progress;
  }
  const double start = clock_seconds();
  if (Status s = run(plan, t, workspace->get(), plan.workspace_bytes(), execution); !s) return s;
  return clock_seconds() - start;
}

int run_run(const RunOptions& options) {
  if (Status s = check_outputs(options); !s) return fail(s);
  Files files;
  Problem p;
  Tensors t;
  if (Status s = read_inputs(options, files, p, t); !s) return fail(s);
  t.philox_seed = options.seed;
  t.philox_offset = options.offset;
  const Result<Device> device = device_for(options.where, p);
  if (!device) return fail(device.status());
  const Result<Plan> planned = plan(p, *device);
  if (!planned) return fail(planned.status());

  Result<Results> results = create_results(options, p, files.q.shape);
  if (!results) return fail(results.status());
  const ConstTensor like_q =
      view(files.q, {p.batch, p.packed ? p.total_q : p.seqlen_q, p.num_heads, p.head_dim_v},
           options.layout == "bhsd");
  t.o = {results->o, like_q.stride_batch, like_q.stride_seqlen, like_q.stride_head};
  t.softmax_lse = results->softmax_lse;

  const Result<double> seconds = is_gpu(device->arch)
                                     ? compute_on_gpu(*planned, t, ranges_of(files, p, *results))
                                     : compute_on_cpu(options, *planned, t);
  if (!seconds) return fail(seconds.status());
  for (TensorOutput& file : results->files) {
    if (Status s = file.commit(); !s) return fail(s);
  }
  print_summary(options, *planned, *seconds);
  return kSuccess;
}

void add_inputs(CLI::App& command, RunOptions& o) {
  command.add_option("-q,--q", o.q, "queries: FILE.npy, FILE.safetensors:NAME")->required();
  command.add_option("-k,--k", o.k, "keys")->required();
  command.add_option("-v,--v", o.v, "values")->required();
  command.add_option("--qv", o.qv, "second queries, which meet values; of latent attention");
  command
      .add_option("-o,--out", o.out, "where o goes: .npy, or .safetensors with o and softmax_lse")
      ->required();
  command.add_option("--lse", o.lse, "where softmax_lse goes, by itself");
  command.add_flag("--force", o.force, "let --out and --lse replace an input, too");
  command.add_option("--layout", o.layout, "order of the files' dimensions")
      ->check(CLI::IsMember({"bshd", "bhsd"}))
      ->capture_default_str();
  command.add_option("--dtype", o.dtype, "convert to this type; default: that of q")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command.add_flag("--u2-is-bf16", o.u16_is_bf16, ".npy files of 2-byte words hold bf16");
  command.add_option("--cu-seqlens-q", o.cu_seqlens_q, "packed: offsets of the sequences in q");
  command.add_option("--cu-seqlens-k", o.cu_seqlens_k, "packed: offsets of the sequences in k");
}

void add_score_options(CLI::App& command, RunOptions& o) {
  command.add_flag("--causal", o.causal, "no query sees a later key");
  command.add_option("--window", o.window, "keys seen to the LEFT and RIGHT; -1: unbounded")
      ->delimiter(',')
      ->expected(2)
      ->transform(whole_number(-1, std::numeric_limits<std::int64_t>::max()));
  command.add_option("--align", o.align, "where masks are anchored: br bottom right, tl top left")
      ->check(CLI::IsMember({"br", "tl"}))
      ->capture_default_str();
  command
      .add_option("--softmax-scale", o.softmax_scale, "default: 1 / sqrt(columns of q, and of qv)")
      ->check(finite_float());
  command.add_option("--softcap", o.softcap, "softcap * tanh(score / softcap)")
      ->check(finite_float());
  command.add_option("--bias", o.bias, "file added to the scores; broadcasts to (b, h, q, k)");
  command.add_option("--alibi-slopes", o.alibi_slopes, "file of (heads) or (batch, heads) slopes");
  command.add_option("--sink", o.sink, "file of (heads) extra logits in the denominator");
  command.add_option("--dropout-p", o.dropout_p, "probability that a weight is dropped")
      ->check(finite_float());
  command.add_option("--seed", o.seed, "dropout's Philox seed")->transform(any_seed());
  command.add_option("--offset", o.offset, "dropout's Philox offset")->transform(any_seed());
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command =
      app.add_subcommand("run", "Attention over tensors in files; writes o and softmax_lse");
  command->footer(
      "Inputs and results are mapped files, larger than memory if need be. Only inputs that must\n"
      "change their type (f64, --dtype), or that their file misaligns, are copied into memory.\n"
      "A result replaces an older file of its name, as cp would, but never an input without "
      "--force;\n"
      "it appears when it is complete. A GPU takes bf16 and f16: what it reads and writes is "
      "copied.");
  add_inputs(*command, *options);
  add_score_options(*command, *options);
  command
      ->add_option("--device", options->where.device,
                   "cpu, an instruction set to be forced, gpu or gpu:NUMBER")
      ->capture_default_str();
  add_threads(*command, options->where.threads);
  command->add_flag("--quiet", options->quiet, "print nothing but errors");
  command->add_flag("--json", options->json, "print the summary as JSON");
  command->callback([options, &context] { context.exit_code = run_run(*options); });
}

}  // namespace tessera::tools
