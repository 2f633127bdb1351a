// Rows of v that become tiles on a GPU (cuda/aux/lay_values.h): the kernel, run on the host thread
// by thread, against the layout's own words and against what quantize() makes of the same elements;
// and what a forward from rows asks of a fake driver.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cuda/launches.h"
#include "cuda/lay_values.h"
#include "cuda/lay_values_host.h"
#include "cuda/sm90/forward_params.h"
#include "plan/catalog.h"
#include "plan/select.h"
#include "reference/storage.h"

namespace tessera {
namespace {

using Bytes = std::vector<std::uint8_t>;
/// 16 bytes, as rows and tiles begin at multiples of so many.
struct alignas(16) Sixteen {
  std::uint8_t bytes[16];
};

constexpr std::uint8_t kUntouched = 0xAB;

std::size_t size(std::int64_t x) { return static_cast<std::size_t>(x); }

class LayValues : public testing::Test {
 protected:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  /// A row of 8 bits with so many columns of values.
  static const core::Kernel& row_of(int columns) {
    for (const core::Kernel& row : kCatalog) {
      if (row.operand == core::Operand::e4m3 && row.head_dim_v == columns) return row;
    }
    ADD_FAILURE() << columns;
    return kCatalog[0];
  }

  /// v of the problem in random rows: heads, sequences and rows apart, or one for all. Packed
  /// sequences get lengths.
  void draw(const Problem& problem, bool numbers) {
    problem_ = problem;
    const Problem& p = problem_;
    cu_seqlens_ = {0};
    for (int b = 0; b < p.batch; ++b) {
      const int keys = below(4) == 0 ? 0 : below(static_cast<int>(p.seqlen_k) + 1);
      cu_seqlens_.push_back(cu_seqlens_.back() + keys);
    }
    if (p.packed) problem_.total_k = cu_seqlens_.back();
    const auto gap = [this] { return 16 * std::int64_t{below(3)}; };
    const std::int64_t rows = p.packed ? p.total_k : p.seqlen_k;
    const bool heads_first = below(2) == 0;
    ConstTensor& v = tensors_.v;
    v.stride_head = heads_first ? 0 : p.head_dim_v + gap();
    v.stride_seqlen = heads_first ? p.head_dim_v + gap() : p.num_heads_k * v.stride_head + gap();
    if (heads_first) v.stride_head = rows * v.stride_seqlen + gap();
    v.stride_batch = std::max(p.num_heads_k * v.stride_head, rows * v.stride_seqlen) + gap();
    if (below(8) == 0) v.stride_head = 0;
    memory_.assign(size((p.packed ? 1 : p.batch) * v.stride_batch / 16 + 17), {});
    v.data = memory_.data() + below(3);
    for (Sixteen& sixteen : memory_) {
      for (std::uint8_t& byte : sixteen.bytes) {
        byte = static_cast<std::uint8_t>(random_());
        if (numbers && (byte & 0x7F) == 0x7F) byte ^= 1;  // NaN keeps no sign where it is rounded
      }
    }
    if (p.packed) tensors_.cu_seqlens_q = tensors_.cu_seqlens_k = cu_seqlens_.data();
  }

  std::uint8_t element(int b, int key, int head, int column) const {
    const core::Sequence sequence = sequences_of(problem_, tensors_).at(b);
    const std::int64_t at = sequence.key_offset(strides_of(tensors_.v), key, head) + column;
    return static_cast<const std::uint8_t*>(tensors_.v.data)[at];
  }

  /// What the kernel makes of it.
  Bytes laid(int columns) {
    PlanData plan;
    plan.problem = problem_;
    plan.kernel = row_of(columns);
    Workspace counter;
    layout_gpu_values(counter, plan);
    std::vector<Sixteen> workspace(size(static_cast<std::int64_t>(counter.bytes() / 16 + 4)));
    std::memset(workspace.data(), kUntouched, workspace.size() * sizeof(Sixteen));
    Workspace memory(workspace.data());
    const GpuValueLayout layout = layout_gpu_values(memory, plan);
    const cuda::aux::LayValuesParams params = cuda::lay_values_params(plan, tensors_, layout);
    host::launch(static_cast<unsigned>(params.blocks), [&] { cuda::aux::lay_values(params); });
    Bytes bytes(workspace.size() * sizeof(Sixteen));
    std::memcpy(bytes.data(), workspace.data(), bytes.size());
    for (std::size_t i = counter.bytes(); i < bytes.size(); ++i) {
      EXPECT_EQ(bytes[i], kUntouched) << "behind the workspace";
    }
    const std::int64_t used = (problem_.packed ? 1 : problem_.batch) * layout.batch_bytes;
    bytes.resize(size(used));
    return bytes;
  }

  /// The same by literal loops.
  Bytes expected(int columns) const {
    const Problem& p = problem_;
    const core::ValueTiles tiles = {columns};
    const std::int64_t head_bytes = tiles_of_head(p) * tiles.tile_bytes();
    Bytes bytes(size((p.packed ? 1 : p.batch) * p.num_heads_k * head_bytes), kUntouched);
    for (int b = 0; b < p.batch; ++b) {
      const core::Sequence sequence = sequences_of(p, tensors_).at(b);
      const int keys = core::round_up(sequence.seqlen_k, core::ValueTiles::kKeys);
      for (int head = 0; head < p.num_heads_k; ++head) {
        const std::int64_t first = (sequence.entry_k * p.num_heads_k + head) * head_bytes +
                                   core::ValueTiles::first_of(sequence) * tiles.tile_bytes();
        for (int key = 0; key < keys; ++key) {
          for (int column = 0; column < tiles.rows(); ++column) {
            const bool there = key < sequence.seqlen_k && column < p.head_dim_v;
            std::uint8_t& byte = bytes[size(first + tiles.offset(key, column))];
            EXPECT_EQ(byte, kUntouched);
            byte = column >= columns ? core::ValueTiles::kOne
                   : there           ? element(b, key, head, column)
                                     : 0;
          }
        }
      }
    }
    return bytes;
  }

  Problem random_problem(int dim) {
    std::string text = "fwd e4m3 scales=tensor/tensor/tensor d=" + std::to_string(dim) + " ";
    text += below(2) == 0 ? "h=4/2 " : "h=3 ";
    const int keys = below(5) == 0 ? 128 * below(4) : below(400);
    text += "q=" + std::to_string(keys + 1) + " k=" + std::to_string(keys) + " ";
    const int batch = 1 + below(4);
    text += "b=" + std::to_string(batch) + " ";
    if (below(2) == 0) text += "packed=0,0 ";
    return *parse_problem(text);
  }

  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  Problem problem_;
  Tensors tensors_;
  std::vector<Sixteen> memory_;
  std::vector<std::int32_t> cu_seqlens_;
};

// Every number of columns, in tiles that have as many and in wider ones.
TEST_F(LayValues, EveryByteIsWhereTilesHaveIt_S14) {
  for (const int columns : {64, 96, 128, 192, 256}) {
    for (int dim = 16; dim <= columns; dim += 16) {
      draw(random_problem(dim), false);
      ASSERT_EQ(laid(columns), expected(columns)) << to_string(problem_) << " columns " << columns;
    }
  }
}

// The tiles that quantize() makes of the same elements, of which a scale of 1 changes none.
TEST_F(LayValues, TheyAreThoseOfQuantize_S14) {
  for (int dim = 16; dim <= 256; dim += 16) {
    draw(random_problem(dim), true);
    const Problem& p = problem_;
    const ConstTensor& v = tensors_.v;
    std::vector<float> wide(memory_.size() * sizeof(Sixteen));
    for (std::size_t i = 0; i < wide.size(); ++i) {
      wide[i] = static_cast<float>(
          reference::load(Dtype::e4m3, memory_.data(), static_cast<std::int64_t>(i)));
    }
    const std::int64_t start =
        reinterpret_cast<std::intptr_t>(v.data) - reinterpret_cast<std::intptr_t>(memory_.data());
    const int columns = core::ValueTiles::padded(dim);
    const Bytes made = laid(columns);
    Bytes quantized(made.size(), kUntouched);
    const float one = 1.0F;
    QuantizeShape shape;
    shape.problem = p;
    shape.problem.v_tiles = true;
    shape.problem.seqlen_q = shape.problem.total_q = 0;
    shape.dtype = Dtype::f32;
    QuantizeTensors t;
    t.v = {wide.data() + start, v.stride_batch, v.stride_seqlen, v.stride_head};
    const std::int64_t head = shape.problem.value_tile_bytes();
    t.v_out = {quantized.data(), p.num_heads_k * head, 0, head};
    t.v_scale = {const_cast<float*>(&one)};
    std::vector<std::int32_t> no_queries(size(p.batch + 1), 0);
    if (p.packed) {
      t.cu_seqlens_q = no_queries.data();
      t.cu_seqlens_k = cu_seqlens_.data();
    }
    const Status status = quantize(shape, t, this_cpu());
    ASSERT_TRUE(status) << status.text;
    ASSERT_EQ(made, quantized) << to_string(p);
  }
}

// It is launched to begin early: until the grids before it are done, no element is there.
TEST_F(LayValues, WaitForWhatIsEnqueuedBefore) {
  draw(*parse_problem("fwd e4m3 q=1 k=150 d=64 scales=tensor/tensor/tensor"), false);
  const std::vector<Sixteen> given = memory_;
  const Bytes right = expected(64);
  memory_.assign(memory_.size(), {});
  std::once_flag done;
  cuda::ptx::grids_before = [&] {
    std::call_once(done, [&] { std::copy(given.begin(), given.end(), memory_.begin()); });
  };
  EXPECT_EQ(laid(64), right);
  cuda::ptx::grids_before = nullptr;
}

// ---- the launches

class RowsLaunches : public Launches {
 protected:
  /// Scales of 1, and a workspace that fits.
  Status enqueue_rows(const Problem& p, const Tensors& given, void* stream = nullptr) {
    Tensors t = given;
    t.q_scale = t.k_scale = t.v_scale = {numbers_.data()};
    const Result<Plan> planned = plan(p, gpu_);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    workspace_.resize(planned->workspace_bytes() / sizeof(Line) + 1);
    Execution execution;
    execution.stream = stream;
    return run(*planned, t, workspace_.data(), planned->workspace_bytes(), execution);
  }
  struct alignas(Plan::workspace_alignment) Line {
    std::byte bytes[Plan::workspace_alignment];
  };
  std::vector<Line> workspace_;
};

constexpr const char* kRows = "fwd e4m3 b=2 h=6/2 q=200 k=300 d=128 scales=tensor/tensor/tensor";

// Both on the caller's stream, and nothing else: they can be captured in a CUDA graph.
TEST_F(RowsLaunches, TilesAreLaidOutBeforeTheForwardReadsThem_S14) {
  const Problem p = problem_of(kRows);
  const Tensors t = tensors_of(p);
  int stream = 0;
  cuda::aux::LayValuesParams laid;
  cuda::sm90::ForwardParams forward;
  fake::state().on_launch = [&](const fake::Launch& launch, const void* parameters) {
    if (launch.kernel == "lay_values") {
      laid = *static_cast<const cuda::aux::LayValuesParams*>(parameters);
      EXPECT_TRUE(launch.begins_early);
      EXPECT_EQ(launch.block_x, 128U);
    } else {
      forward = *static_cast<const cuda::sm90::ForwardParams*>(parameters);
      EXPECT_TRUE(launch.begins_early);
    }
    EXPECT_EQ(launch.stream, &stream);
  };
  ASSERT_TRUE(enqueue_rows(p, t, &stream));
  fake::state().on_launch = nullptr;
  // Three tiles of two sequences' two heads, by halves of columns.
  EXPECT_EQ(launched(), "lay_values 24\ntessera_sm90_forward_e4m3_d128_128x128 24\n");
  constexpr std::int64_t kTile = std::int64_t{128} * 136;
  EXPECT_EQ(laid.from.data, t.v.data);
  EXPECT_EQ(laid.from.strides.seqlen, 256);
  EXPECT_EQ(laid.to, workspace_.data());
  EXPECT_EQ(forward.v_source.data, laid.to);
  EXPECT_EQ(forward.v_source.strides.batch, 6 * kTile);
  EXPECT_EQ(forward.v_source.strides.head, 3 * kTile);
  for (const char* waits : {"cuStreamSynchronize", "cuMemAlloc", "cuMemAllocAsync"}) {
    EXPECT_EQ(calls(waits), 0) << waits;
  }
}

TEST_F(RowsLaunches, TilesThatAreGivenAreRead_S14) {
  const Problem p = problem_of((std::string(kRows) + " v_tiles").c_str());
  Tensors t = tensors_of(p);
  t.v.stride_head = p.value_tile_bytes();
  t.v.stride_batch = 2 * t.v.stride_head;
  ASSERT_TRUE(enqueue_rows(p, t));
  EXPECT_EQ(launched(), "tessera_sm90_forward_e4m3_d128_128x128 24\n");
}

// Where the copy engine cannot address o, threads store it.
TEST_F(RowsLaunches, LargeTilesSendBoxesOfRows) {
  const Problem p = problem_of("fwd e4m3 b=2 h=6/2 q=900 k=2000 d=256 scales=tensor/tensor/tensor");
  Tensors t = tensors_of(p);
  cuda::sm90::ForwardParams forward;
  fake::state().on_launch = [&](const fake::Launch& launch, const void* parameters) {
    if (launch.kernel == "lay_values") return;
    EXPECT_EQ(launch.kernel, "tessera_sm90_forward_e4m3_d256_128x128");
    forward = *static_cast<const cuda::sm90::ForwardParams*>(parameters);
  };
  ASSERT_TRUE(enqueue_rows(p, t));
  EXPECT_TRUE(forward.o_in_boxes);
  fake::EncodedMap map;
  std::memcpy(static_cast<void*>(&map), &forward.o_map, sizeof map);
  EXPECT_EQ(map.address, static_cast<const char*>(t.o.data));
  EXPECT_EQ(map.box, (std::array<unsigned, 4>{64, 16, 1, 1}));
  EXPECT_EQ(map.sizes, (std::array<std::uint64_t, 4>{256, 900, 6, 2}));
  t.o.stride_batch = std::int64_t{1} << 40;
  ASSERT_TRUE(enqueue_rows(p, t));
  EXPECT_FALSE(forward.o_in_boxes);
  fake::state().on_launch = nullptr;
}

// Without keys there is nothing to lay out, and without queries nobody who asks.
TEST_F(RowsLaunches, WithoutRowsNothingIsLaidOut) {
  for (const char* text :
       {"fwd e4m3 h=2 q=9 k=0 d=64 scales=tensor/tensor/tensor",
        "fwd e4m3 b=3 h=2 q=9 k=9 d=64 scales=tensor/tensor/tensor packed=9,0"}) {
    const Problem p = problem_of(text);
    ASSERT_TRUE(enqueue_rows(p, tensors_of(p))) << text;
    EXPECT_EQ(launched().find("lay_values"), std::string::npos) << text;
  }
  const Problem p = problem_of("fwd e4m3 h=2 q=0 k=64 d=64 scales=tensor/tensor/tensor");
  ASSERT_TRUE(enqueue_rows(p, tensors_of(p)));
  EXPECT_EQ(launched(), "");
}

// Sixteen columns are loaded at once. Heads may share their rows.
TEST_F(RowsLaunches, RowsMustBeAligned) {
  const Problem p = problem_of(kRows);
  Tensors t = tensors_of(p);
  t.v.stride_head = 0;
  EXPECT_FALSE(needs_unaligned(p, t));
  EXPECT_TRUE(enqueue_rows(p, t));
  launched();
  t.v.stride_seqlen += 8;
  EXPECT_TRUE(needs_unaligned(p, t));
  const Status status = enqueue_rows(p, t);
  EXPECT_EQ(status.code, Code::invalid);
  EXPECT_EQ(status.text,
            "v.stride_seqlen = 264: must be a multiple of 16 elements; or plan the problem as "
            "unaligned");
  EXPECT_EQ(launched(), "");
}

}  // namespace
}  // namespace tessera
