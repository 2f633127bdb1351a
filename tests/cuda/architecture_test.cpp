// What the device compiler and the launches are told of each architecture.
#include "cuda/architecture.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/storage.h"
#include "cuda/symbol.h"
#include "cuda/target.h"
#include "plan/catalog.h"

namespace tessera::cuda {
namespace {

const Architecture* architecture_of(Arch arch) {
  const Architecture* found = nullptr;
  for (const Architecture* one : architectures()) {
    if (one->arch != arch) continue;
    EXPECT_EQ(found, nullptr) << "two of one arch";
    found = one;
  }
  return found;
}

// Every GPU row has an architecture that makes its program and a target that launches it.
TEST(Architectures, EveryRowHasAProgramOfItsOwn) {
  std::set<std::string> values, programs;
  for (const core::Kernel& row : kCatalog) {
    if (!is_gpu(row.arch)) continue;
    const Architecture* const one = architecture_of(row.arch);
    ASSERT_NE(one, nullptr) << name_of(row);
    const std::string program = one->row_program(row, symbol_of(row));
    EXPECT_NE(program.find(value_text(row)), std::string::npos) << name_of(row);
    EXPECT_NE(program.find(symbol_of(row) + "("), std::string::npos) << name_of(row);
    EXPECT_TRUE(values.insert(value_text(row)).second) << name_of(row);
    EXPECT_TRUE(programs.insert(program).second) << name_of(row);
    EXPECT_GT(one->threads(row), 0);
    EXPECT_GT(one->shared_bytes(row), 0);
    const Target* const target = target_of(row.arch);
    ASSERT_NE(target, nullptr) << name_of(row);
    EXPECT_EQ(target->architecture, one);
  }
}

// A block of threads gets the shared memory that it needs from every device that is planned for.
TEST(Architectures, NamedDevicesGrantWhatRowsNeed) {
  int devices = 0;
  for (const std::string& name : device_names()) {
    const Result<Device> device = named_device(name);
    if (!device || !is_gpu(device->arch)) continue;
    ++devices;
    for (const core::Kernel& row : kCatalog) {
      if (!runs(device->arch, row.arch)) continue;
      EXPECT_LE(architecture_of(row.arch)->shared_bytes(row), device->l1_bytes)
          << name << " " << name_of(row);
    }
  }
  EXPECT_GT(devices, 0);
}

// The text of a row names every member of it: a change of any one changes the text.
TEST(Architectures, AValueNamesEveryMember) {
  const core::Kernel row = kCatalog[Catalog::kCpu + 2 * Catalog::kGpu - 1];
  std::set<std::string> texts = {value_text(row)};
  const auto expect_other = [&](auto member, auto value) {
    core::Kernel other = row;
    other.*member = value;
    EXPECT_TRUE(texts.insert(value_text(other)).second) << value_text(other);
  };
  using K = core::Kernel;
  expect_other(&K::arch, Arch::portable);
  expect_other(&K::pass, Pass::forward);
  expect_other(&K::form, core::Form::decode);
  expect_other(&K::operand, core::Operand::f32);
  for (int K::* const member : {&K::block_m, &K::tile_m, &K::block_n, &K::split_n, &K::lanes,
                                &K::head_dim, &K::head_dim_v, &K::q_rows, &K::q_stages}) {
    expect_other(member, 1000);
  }
  expect_other(&K::extra, core::Extra::softcap);
  expect_other(&K::any_layout, !row.any_layout);
  expect_other(&K::cached, Dtype::i8);
  expect_other(&K::qv, !row.qv);
}

// Code for 9.0 runs on no other device, newer ones included.
TEST(Targets, RunOnTheirDevicesOnly) {
  const Target* const hopper = target_of(Arch::sm90);
  ASSERT_NE(hopper, nullptr);
  EXPECT_TRUE(hopper->runs_on(9, 0));
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 9}, {9, 1}, {10, 0}, {12, 0}}) {
    EXPECT_FALSE(hopper->runs_on(major, minor)) << major << "." << minor;
  }
  EXPECT_EQ(target_of(Arch::avx2), nullptr);
}

// The relation between devices and rows: CPUs include smaller sets, GPUs nothing but themselves.
TEST(Targets, ADeviceRunsWhatItIncludes) {
  EXPECT_TRUE(runs(Arch::avx512, Arch::avx2));
  EXPECT_FALSE(runs(Arch::avx2, Arch::avx512));
  EXPECT_TRUE(runs(Arch::sm90, Arch::sm90));
  EXPECT_FALSE(runs(Arch::sm90, Arch::avx2));
  EXPECT_FALSE(runs(Arch::avx512_bf16, Arch::sm90));
}

// GPU rows of 16 bits, and those that widen 8, are written once and stand for two types, which
// differ in nothing else.
TEST(Storage, GpuRowsComeInPairs) {
  for (unsigned i = Catalog::kCpu; i < Catalog::kCpu + 2 * Catalog::kGpu; i += 2) {
    core::Kernel twin = kCatalog[i];
    EXPECT_EQ(twin.operand, core::Operand::bf16);
    twin.operand = core::Operand::f16;
    EXPECT_EQ(twin, kCatalog[i + 1]);
  }
  constexpr unsigned kEightBit = Catalog::kCpu + 2 * Catalog::kGpu;
  constexpr unsigned kInteger = kEightBit + Catalog::kEightBit;
  for (unsigned i = kEightBit; i < kInteger; ++i) {
    EXPECT_EQ(kCatalog[i].operand, core::Operand::e4m3);
  }
  constexpr unsigned kCache = kInteger + 2 * Catalog::kInteger;
  for (unsigned i = kInteger; i < kCache; i += 2) {
    core::Kernel twin = kCatalog[i];
    EXPECT_EQ(twin.operand, core::Operand::i8_bf16);
    twin.operand = core::Operand::i8_f16;
    EXPECT_EQ(twin, kCatalog[i + 1]);
  }
  constexpr unsigned kLatent = kCache + 2 * Catalog::kCache;
  for (unsigned i = kCache; i < kLatent; i += 2) {
    core::Kernel twin = kCatalog[i];
    EXPECT_EQ(twin.cached, Dtype::e4m3);
    twin.cached = Dtype::i8;
    EXPECT_EQ(twin, kCatalog[i + 1]);
  }
  for (unsigned i = kLatent; i < kCatalog.size(); i += 2) {
    core::Kernel twin = kCatalog[i];
    EXPECT_EQ(twin.qv, i < kLatent + 2 * Catalog::kLatent + 2 * Catalog::kLatentCache);
    EXPECT_EQ(core::widens(twin), twin.qv && i >= kLatent + 2 * Catalog::kLatent);
    EXPECT_NE(twin.qv, twin.prefixes);
    EXPECT_EQ(twin.operand, core::Operand::bf16);
    twin.operand = core::Operand::f16;
    EXPECT_EQ(twin, kCatalog[i + 1]);
  }
}

TEST(Storage, OneDescriptionOfAType) {
  for (int i = 0; i < kDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    if (dtype != Dtype::i8) {
      EXPECT_EQ(core::dtype_of(core::operand_of(dtype)), dtype);
    }
    EXPECT_EQ(core::swizzled_columns(dtype) * size_of(dtype), 128);
    EXPECT_EQ(core::multiplied_columns(dtype) * size_of(dtype), 32);
  }
}

}  // namespace
}  // namespace tessera::cuda
