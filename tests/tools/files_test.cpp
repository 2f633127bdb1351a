// Tensor files: what is written comes back with its bits, as .npy and .safetensors; alignment;
// addresses; conversions; and a failed write leaves everything as it was.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "files/convert.h"
#include "files/mapped_file.h"
#include "files/output_file.h"
#include "files/safetensors.h"
#include "files/tensor_file.h"
#include "tools/temporary_folder.h"

namespace tessera::tools {
namespace {

using std::string;

constexpr Element kElements[] = {Element::f16, Element::bf16, Element::f32,
                                 Element::f64, Element::i32,  Element::i64};

/// A tensor of random bytes, NaN patterns included, with up to 5 dimensions, some of them 0 or 1.
struct RandomTensor {
  RandomTensor(std::mt19937& random, string tensor_name) : name(std::move(tensor_name)) {
    element = kElements[random() % std::size(kElements)];
    std::uint64_t size = size_of(element);
    for (std::size_t rank = random() % 6; rank > 0; --rank) {
      shape.push_back(random() % 12 == 0 ? 0 : 1 + static_cast<std::int64_t>(random() % 5));
      size *= static_cast<std::uint64_t>(shape.back());
    }
    bytes.resize(size);
    for (char& byte : bytes) byte = static_cast<char>(random() % 256);
  }

  NamedTensor named() const { return {name, element, shape, bytes.data()}; }

  void expect_equal(const Result<FileTensor>& tensor) const {
    ASSERT_TRUE(tensor.ok()) << tensor.status().text;
    EXPECT_EQ(tensor->element, element);
    EXPECT_EQ(tensor->shape, shape);
    ASSERT_EQ(static_cast<std::uint64_t>(tensor->count()) * size_of(element), bytes.size());
    ASSERT_NE(tensor->data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor->data) % size_of(element), 0U);
    EXPECT_EQ(std::memcmp(tensor->data, bytes.data(), bytes.size()), 0);
  }

  string name;
  Element element = Element::f32;
  std::vector<std::int64_t> shape;
  string bytes;
};

TEST(TensorFile, NpyComesBack) {
  const TemporaryFolder folder;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int trial = 0; trial < 50; ++trial) {
    const RandomTensor tensor(random, "");
    const string path = folder / "t.npy";
    const NamedTensor named = tensor.named();
    const Status status = write_tensors(path, {&named, 1});
    ASSERT_TRUE(status.ok()) << status.text;
    tensor.expect_equal(read_tensor(path, TwoBytes::bf16));
    EXPECT_EQ((bytes_of(path).size() - tensor.bytes.size()) % 64, 0U);
    EXPECT_EQ(read_tensor(path).ok(), tensor.element != Element::bf16);
  }
  EXPECT_EQ(folder.size(), 1);
}

TEST(TensorFile, SafetensorsComeBack) {
  const TemporaryFolder folder;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<RandomTensor> tensors;
    std::vector<NamedTensor> named;
    const std::size_t count = 1 + random() % 6;
    for (std::size_t i = 0; i < count; ++i) {
      tensors.emplace_back(random, "layer:" + std::to_string(i) + ".\"q\" \u00e9\n");
    }
    for (const RandomTensor& tensor : tensors) named.push_back(tensor.named());
    const string path = folder / "t.safetensors";
    const Status status = write_tensors(path, named);
    ASSERT_TRUE(status.ok()) << status.text;
    const auto entries = list_tensors(path);
    ASSERT_EQ(entries.value().size(), count);
    EXPECT_EQ(entries->front().offset % 64, 0U);
    for (const Entry& entry : *entries) EXPECT_EQ(entry.offset % size_of(*entry.element), 0U);
    for (const RandomTensor& tensor : tensors) {
      tensor.expect_equal(read_tensor(path + ":" + tensor.name));
    }
    if (count == 1) tensors[0].expect_equal(read_tensor(path));
  }
}

TEST(TensorFile, NoTensorsAndNoElements) {
  const TemporaryFolder folder;
  const string path = folder / "none.safetensors";
  ASSERT_TRUE(write_tensors(path, {}).ok());
  EXPECT_TRUE(list_tensors(path).value().empty());
  const NamedTensor empty{"e", Element::f32, {4, 0, 2}, nullptr};
  ASSERT_TRUE(write_tensors(folder / "e.npy", {&empty, 1}).ok());
  EXPECT_EQ(read_tensor(folder / "e.npy")->count(), 0);
  const float value = 3;
  const NamedTensor scalar{"s", Element::f32, {}, &value};
  ASSERT_TRUE(write_tensors(folder / "s.npy", {&scalar, 1}).ok());
  EXPECT_EQ(read_tensor(folder / "s.npy")->count(), 1);
}

string npy(const string& dictionary, const string& data, char version = '\1') {
  string length = {static_cast<char>(dictionary.size()), '\0'};
  if (version != '\1') length += string(2, '\0');
  return "\x93NUMPY" + string{version, '\0'} + length + dictionary + data;
}

TEST(TensorFile, NpyAsOthersWriteIt) {
  const TemporaryFolder folder;
  const string data = "\1\2\3\4\5\6\7\x08";
  struct Case {
    string bytes;
    Element element;
    std::vector<std::int64_t> shape;
  };
  const Case cases[] = {
      {npy("{\"shape\":(2,),\"fortran_order\":False,\"descr\":\"<f4\"}", data), Element::f32, {2}},
      {npy("{'descr': '<f8', 'fortran_order': False, 'shape': (), }\n", data, '\2'),
       Element::f64,
       {}},
      {npy(" { 'descr':'<f2' ,'fortran_order' : False,'shape':( 2 , 2 , ) } \n", data, '\3'),
       Element::f16,
       {2, 2}},
      {npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1L,), }", data), Element::i64, {1}},
      {npy("{'descr': '<V2', 'fortran_order': False, 'shape': (4, 1)}", data),
       Element::bf16,
       {4, 1}},
      {npy("{'descr': '|V2', 'fortran_order': False, 'shape': (4,)}", data), Element::bf16, {4}},
      {npy("{'descr': '<u2', 'fortran_order': False, 'shape': (4,)}", data), Element::bf16, {4}},
      {npy("{'descr': 'bfloat16', 'fortran_order': False, 'shape': (4,)}", data),
       Element::bf16,
       {4}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.bytes);
    // The name says nothing, the first bytes do; an odd header length misaligns the data.
    const auto tensor = read_tensor(folder.file("t.bin", c.bytes), TwoBytes::bf16);
    ASSERT_TRUE(tensor.ok()) << tensor.status().text;
    EXPECT_EQ(tensor->element, c.element);
    EXPECT_EQ(tensor->shape, c.shape);
    EXPECT_EQ(std::memcmp(tensor->data, data.data(), data.size()), 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor->data) % size_of(c.element), 0U);
  }
}

TEST(TensorFile, SafetensorsAtAnyByte) {
  const TemporaryFolder folder;
  const float values[] = {1.5F, -2.25F};
  for (std::size_t padding = 0; padding < 8; ++padding) {
    const string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                          R"("t":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})" +
                          string(padding, ' ');
    string file(8, '\0');
    file[0] = static_cast<char>(header.size());
    file += header + "x" + string(reinterpret_cast<const char*>(values), sizeof values);
    const auto tensor = read_tensor(folder.file("t.safetensors", file) + ":t");
    ASSERT_TRUE(tensor.ok()) << tensor.status().text;
    const auto* const floats = static_cast<const float*>(tensor->data);
    EXPECT_EQ(floats[0], values[0]);
    EXPECT_EQ(floats[1], values[1]);
  }
}

TEST(TensorFile, AddressesSplitAtTheFileName) {
  const struct {
    const char *text, *path, *name;
  } cases[] = {
      {"q.npy", "q.npy", ""},
      {"a/b.safetensors", "a/b.safetensors", ""},
      {"b.safetensors:q", "b.safetensors", "q"},
      {"b.safetensors:", "b.safetensors", ""},
      {"c:/b.safetensors:h.0:q", "c:/b.safetensors", "h.0:q"},
      {"b.safetensors:x.safetensors:y", "b.safetensors", "x.safetensors:y"},
      {"q.npy:0", "q.npy:0", ""},
      {"", "", ""},
  };
  for (const auto& c : cases) {
    const TensorAddress address = TensorAddress::parse(c.text);
    EXPECT_EQ(address.path, c.path) << c.text;
    EXPECT_EQ(address.name, c.name) << c.text;
  }
}

TEST(TensorFile, OutlivesItsFileAndItsReplacement) {
  const TemporaryFolder folder;
  const std::vector<float> first(1000, 1.0F);
  const std::vector<float> second(1000, 2.0F);
  const string path = folder / "t.npy";
  NamedTensor tensor{"", Element::f32, {1000}, first.data()};
  ASSERT_TRUE(write_tensors(path, {&tensor, 1}).ok());
  const FileTensor view = read_tensor(path).value();
  tensor.data = second.data();
  ASSERT_TRUE(write_tensors(path, {&tensor, 1}).ok());
  EXPECT_EQ(static_cast<const float*>(view.data)[999], 1.0F);
  EXPECT_EQ(static_cast<const float*>(read_tensor(path)->data)[999], 2.0F);
  std::filesystem::remove(path);
  EXPECT_EQ(static_cast<const float*>(view.data)[0], 1.0F);
}

/// A sparse file larger than memory and swap: nothing but the touched pages is read.
TEST(TensorFile, LargerThanMemory) {
  const TemporaryFolder folder;
  constexpr std::int64_t kCount = std::int64_t{1} << 40;
  const string path = folder / "large.npy";
  const std::int64_t shape[] = {kCount};
  const string header = npy_header(Element::f32, shape);
  folder.file("large.npy", header);
  if (truncate(path.c_str(), static_cast<off_t>(header.size()) + 4 * kCount) != 0) {
    GTEST_SKIP() << "the file system holds no sparse file of 4 TiB";
  }
  const auto tensor = read_tensor(path);
  ASSERT_TRUE(tensor.ok()) << tensor.status().text;
  EXPECT_EQ(tensor->count(), kCount);
  EXPECT_EQ(static_cast<const float*>(tensor->data)[kCount - 1], 0.0F);
}

TEST(TensorFile, ShrinkingUnderItsMappingExitsWithTwo) {
  const TemporaryFolder folder;
  const string path = folder.file("t.bin", string(1 << 16, 'x'));
  EXPECT_EXIT(
      {
        explain_file_faults();
        const auto file = MappedFile::open(path);
        if (truncate(path.c_str(), 0) != 0) _exit(1);
        const volatile std::byte* bytes = file->bytes().data();
        _exit(static_cast<int>(bytes[1 << 15]) == 0 ? 3 : 4);
      },
      testing::ExitedWithCode(2), "a mapped file became shorter");
}

TEST(Write, RefusesWhatTheFormatsCannotHold) {
  const TemporaryFolder folder;
  const float value = 1;
  const NamedTensor a{"a", Element::f32, {1}, &value};
  const auto error = [&](const string& name, std::vector<NamedTensor> tensors) {
    const Status status = write_tensors(folder / name, tensors);
    EXPECT_FALSE(status.ok()) << name;
    EXPECT_EQ(folder.size(), 0) << name;
    return status.text;
  };
  const auto has = [](const string& text, const char* part) {
    EXPECT_NE(text.find(part), string::npos) << text;
  };
  has(error("o.txt", {a}), "the name must end in .npy or .safetensors");
  has(error("o.npy", {a, a}), "a .npy file holds one tensor, not 2");
  has(error("o.npy", {}), "a .npy file holds one tensor, not 0");
  has(error("o.safetensors", {a, a}), "tensor 'a' is there twice");
  has(error("o.safetensors", {{"__metadata__", Element::f32, {1}, &value}}), "__metadata__");
  has(error("o.safetensors", {{"\xff", Element::f32, {1}, &value}}), "not valid UTF-8");
  has(error("o.npy", {{"", Element::f32, {-1}, &value}}), "has the shape (-1,)");
  has(error("o.npy", {{"", Element::f32, {1L << 62, 4}, &value}}), "has the shape (46116");
  has(error("o.npy", {{"", Element::f32, std::vector<std::int64_t>(65, 1), &value}}),
      "the shape (1,");
  has(error("no/o.npy", {a}), "cannot be created: No such file");
}

TEST(Write, ReplacesOnlyRegularFilesAndKeepsTheirMode) {
  const TemporaryFolder folder;
  const float value = 1;
  const NamedTensor tensor{"a", Element::f32, {1}, &value};
  const string pipe = folder / "pipe.npy";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(write_tensors(pipe, {&tensor, 1}).text.find("not a regular file"), string::npos);
  std::filesystem::create_directory(folder / "dir.npy");
  EXPECT_FALSE(write_tensors(folder / "dir.npy", {&tensor, 1}).ok());
  const auto device = OutputFile::create("/dev/null", 1);
  EXPECT_FALSE(device.ok());
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));

  const string target = folder.file("target.npy", "old");
  ASSERT_EQ(chmod(target.c_str(), 0600), 0);
  std::filesystem::create_symlink("target.npy", folder / "link.npy");
  ASSERT_TRUE(write_tensors(folder / "link.npy", {&tensor, 1}).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link.npy"));
  EXPECT_TRUE(read_tensor(target).ok());
  EXPECT_EQ(std::filesystem::status(target).permissions(), std::filesystem::perms(0600));
}

/// A file size limit stands in for the full disk: it too lets the first part of a write through.
TEST(Write, FullDiskLeavesTheOldFile) {
  const TemporaryFolder folder;
  const string path = folder.file("o.npy", "old");
  const std::vector<float> data(1 << 16, 1.0F);
  const NamedTensor tensor{"", Element::f32, {1 << 16}, data.data()};
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{100'000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = write_tensors(path, {&tensor, 1});
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code, Code::device);
  EXPECT_EQ(status.text, path + ": cannot be made 262272 bytes long: File too large");
  EXPECT_EQ(bytes_of(path), "old");
  EXPECT_EQ(folder.size(), 1);
}

/// A reader that polls sees the old file or the new one, whole.
TEST(Write, AppearsAtOnce) {
  const TemporaryFolder folder;
  const string path = folder / "o.npy";
  const std::vector<float> data(1 << 18, 1.0F);
  const NamedTensor tensor{"", Element::f32, {1 << 18}, data.data()};
  ASSERT_TRUE(write_tensors(path, {&tensor, 1}).ok());
  std::thread writer([&] {
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(write_tensors(path, {&tensor, 1}).ok());
  });
  for (int i = 0; i < 200; ++i) {
    const auto result = read_tensor(path);
    EXPECT_TRUE(result.ok()) << result.status().text;
  }
  writer.join();
  EXPECT_EQ(folder.size(), 1);
}

TEST(Convert, SixteenBitPatternsComeBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const bool nan16 = (bits & 0x7c00) == 0x7c00 && (bits & 0x3ff) != 0;
    const bool nan_b = (bits & 0x7f80) == 0x7f80 && (bits & 0x7f) != 0;
    EXPECT_EQ(std::isnan(from_f16(pattern)), nan16);
    EXPECT_EQ(std::isnan(from_bf16(pattern)), nan_b);
    const std::uint16_t again16 = to_f16(from_f16(pattern));
    const std::uint16_t again_b = to_bf16(from_bf16(pattern));
    EXPECT_TRUE(nan16 ? std::isnan(from_f16(again16)) : again16 == pattern) << bits;
    EXPECT_TRUE(nan_b ? std::isnan(from_bf16(again_b)) : again_b == pattern) << bits;
  }
  EXPECT_EQ(from_f16(0x3555), 0.333251953125F);
  EXPECT_EQ(from_f16(0x0001), 0x1p-24F);
  EXPECT_EQ(from_f16(0x7bff), 65504.0F);
  EXPECT_EQ(from_bf16(0x3f81), 1.0078125F);
}

/// Between each pair of neighbours: below the middle goes down, above it up, the middle to even.
TEST(Convert, RoundsToNearestEvenEverywhere) {
  const auto check = [](auto narrow, auto widen, std::uint16_t infinity) {
    for (std::uint16_t low = 0; low < infinity; ++low) {
      const auto high = static_cast<std::uint16_t>(low + 1);
      const double a = widen(low);
      // The step beyond the largest number is as wide as the step before it.
      const double step = high == infinity ? a - widen(static_cast<std::uint16_t>(low - 1))
                                           : static_cast<double>(widen(high)) - a;
      const double middle = a + step / 2;
      EXPECT_EQ(narrow(std::nextafter(middle, 0.0)), low) << low;
      EXPECT_EQ(narrow(middle), low % 2 == 0 ? low : high) << low;
      EXPECT_EQ(narrow(std::nextafter(middle, INFINITY)), high) << low;
      EXPECT_EQ(narrow(-middle), 0x8000 | (low % 2 == 0 ? low : high)) << low;
    }
    for (const double large : {1e39, 1e300, std::numeric_limits<double>::max(), double{INFINITY}}) {
      EXPECT_EQ(narrow(large), infinity);
      EXPECT_EQ(narrow(-large), 0x8000 | infinity);
    }
    for (const double small : {5e-324, 1e-300, 1e-60}) EXPECT_EQ(narrow(-small), 0x8000);
  };
  check(to_f16, from_f16, 0x7c00);
  check(to_bf16, from_bf16, 0x7f80);
}

TEST(Convert, TensorsBetweenAllFloatingPointTypes) {
  const double f64[] = {1.0, -0.1, 1e300, 3.0e-8};
  const float f32[] = {1.0F, -0.1F, INFINITY, 3.0e-8F};
  const FileTensor wide{Element::f64, {2, 2}, f64, nullptr};
  const auto narrowed = as_dtype(wide, Dtype::f32);
  ASSERT_TRUE(narrowed.ok());
  EXPECT_EQ(narrowed->shape, wide.shape);
  EXPECT_EQ(std::memcmp(narrowed->data, f32, sizeof f32), 0);
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
    const auto once = as_dtype(wide, dtype);
    ASSERT_TRUE(once.ok());
    const auto back = as_dtype(as_dtype(*once, Dtype::f32).value(), dtype);
    EXPECT_EQ(std::memcmp(once->data, back->data, 8), 0);
    EXPECT_EQ(as_dtype(*once, dtype)->data, once->data);  // no copy
    for (std::size_t i = 0; i < 4; ++i) {
      const auto expected = dtype == Dtype::f16 ? to_f16(f64[i]) : to_bf16(f64[i]);
      EXPECT_EQ(static_cast<const std::uint16_t*>(once->data)[i], expected);
    }
  }
  const std::int32_t ints[] = {1, 2, 3, 4};
  const auto refused = as_dtype({Element::i32, {4}, ints, nullptr}, Dtype::f32);
  EXPECT_EQ(refused.status().text, "holds i32; accepted: f32, f16, bf16, f64");
}

TEST(Convert, SequenceBoundaries) {
  const std::int32_t narrow[] = {0, 5, -7};
  EXPECT_EQ(as_int32({Element::i32, {3}, narrow, nullptr}).value(), (std::vector{0, 5, -7}));
  std::int64_t wide[] = {0, 2147483647, -2147483648};
  EXPECT_EQ(as_int32({Element::i64, {3}, wide, nullptr})->back(), -2147483647 - 1);
  wide[1] = 2147483648;
  EXPECT_EQ(as_int32({Element::i64, {3}, wide, nullptr}).status().text,
            "holds 2147483648 at index 1; accepted: values that fit int32");
  EXPECT_FALSE(as_int32({Element::i32, {1, 3}, narrow, nullptr}).ok());
  EXPECT_FALSE(as_int32({Element::f32, {3}, narrow, nullptr}).ok());
}

}  // namespace
}  // namespace tessera::tools
