// What the device compiler and the launches are told of each architecture.
#include "cuda/architecture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "core/storage.h"
#include "cuda/symbol.h"
#include "cuda/target.h"
#include "plan/catalog.h"
#include "plan/select.h"

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
    EXPECT_FALSE(one->images.empty());
    const Target* const target = target_of(row.arch);
    ASSERT_NE(target, nullptr) << name_of(row);
    EXPECT_EQ(target->architecture, one);
  }
}

// A block of threads gets the shared memory that it needs from every device that is planned for:
// what would need more is refused.
TEST(Architectures, NamedDevicesGrantWhatRowsNeed) {
  int devices = 0;
  for (const std::string& name : device_names()) {
    const Result<Device> device = named_device(name);
    if (!device || !is_gpu(device->arch)) continue;
    ++devices;
    int most = 0;
    for (const core::Kernel& row : kCatalog) {
      if (!runs(device->arch, row.arch)) continue;
      const int bytes = architecture_of(row.arch)->shared_bytes(row);
      Problem problem;
      problem.pass = row.pass;
      const std::string why = refusal(row, problem, *device);
      const bool refused = why.find("bytes of shared memory") != std::string::npos;
      EXPECT_EQ(refused, bytes > device->l1_bytes) << name << " " << name_of(row) << " " << why;
      most = std::max(most, bytes);
    }
    EXPECT_GT(most, device->l1_bytes / 2) << name;
  }
  EXPECT_GT(devices, 0);
}

// The text of a row names every member of it: a change of any one changes the text.
TEST(Architectures, AValueNamesEveryMember) {
  const core::Kernel row = *std::find_if(kCatalog.begin(), kCatalog.end(), [](const auto& one) {
    return one.pass == Pass::backward && one.operand == core::Operand::bf16 && one.any_layout;
  });
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
  for (int K::* const member :
       {&K::block_m, &K::tile_m, &K::block_n, &K::split_n, &K::lanes, &K::head_dim, &K::head_dim_v,
        &K::q_rows, &K::q_stages, &K::stages, &K::blocks}) {
    expect_other(member, 1000);
  }
  expect_other(&K::extra, core::Extra::softcap);
  expect_other(&K::any_layout, !row.any_layout);
  expect_other(&K::cached, Dtype::i8);
  expect_other(&K::qv, !row.qv);
  expect_other(&K::prefixes, !row.prefixes);
}

// Code for 9.0 runs on no other device, newer ones included; mma.sync on all since 8.0, and what
// Turing has of it on all since 7.5, though it is nobody's own but Turing's.
TEST(Targets, RunOnTheirDevicesOnly) {
  const Target* const hopper = target_of(Arch::sm90);
  const Target* const others = target_of(Arch::sm80);
  ASSERT_NE(hopper, nullptr);
  const Target* const turing = target_of(Arch::sm75);
  ASSERT_NE(others, nullptr);
  ASSERT_NE(turing, nullptr);
  for (const int capability : {70, 75, 80, 86, 87, 89, 90, 91, 100, 103, 110, 120, 121, 130}) {
    EXPECT_EQ(hopper->runs_on(capability), capability == 90) << capability;
    EXPECT_EQ(others->runs_on(capability), capability >= 80) << capability;
    EXPECT_EQ(turing->runs_on(capability), capability >= 75) << capability;
    EXPECT_EQ(own_target(capability) == turing, capability == 75) << capability;
  }
  EXPECT_EQ(target_of(Arch::avx2), nullptr);
}

// A Hopper without code of its own runs what is everybody's, if there is code of that.
TEST(Targets, WhatHasNoCodeIsPassedOver) {
  const auto on_hopper = [](bool (*has)(const Architecture&, int)) {
    return target_on(90, has)->architecture->arch;
  };
  EXPECT_EQ(on_hopper([](const Architecture&, int) { return true; }), Arch::sm90);
  EXPECT_EQ(on_hopper([](const Architecture& one, int) { return one.arch == Arch::sm90; }),
            Arch::sm90);
  EXPECT_EQ(on_hopper([](const Architecture& one, int) { return one.arch == Arch::sm80; }),
            Arch::sm80);
  EXPECT_EQ(on_hopper([](const Architecture&, int) { return false; }), Arch::sm90)
      << "whoever runs it is told what is missing";
  EXPECT_EQ(own_target(90)->architecture->arch, Arch::sm90);
  EXPECT_EQ(own_target(89)->architecture->arch, Arch::sm80);
  EXPECT_EQ(own_target(70), nullptr);
  EXPECT_EQ(target_on(70, [](const Architecture&, int) { return true; }), nullptr);
}

/// Images that a device takes, best first.
std::string images_on(Arch arch, int capability) {
  std::string text;
  for (const Image& image : architecture_of(arch)->images) {
    if (image.runs_on(capability)) text += (text.empty() ? "" : " ") + std::string(image.target);
  }
  return text;
}

// Machine code runs where the major number is the same and the minor one not lower; not on Orin,
// whose driver is another. PTX runs on all that is newer.
TEST(Images, RunWhereTheDriverTakesThem) {
  for (const int capability : {80, 86, 88, 89}) {
    EXPECT_EQ(images_on(Arch::sm80, capability), "sm_80 compute_80") << capability;
  }
  for (const int capability : {87, 90, 100, 103, 110, 130}) {
    EXPECT_EQ(images_on(Arch::sm80, capability), "compute_80") << capability;
  }
  for (const int capability : {120, 121}) {
    EXPECT_EQ(images_on(Arch::sm80, capability), "sm_120 compute_80") << capability;
  }
  EXPECT_EQ(images_on(Arch::sm80, 75), "");
  EXPECT_EQ(images_on(Arch::sm75, 75), "sm_75 compute_75");
  EXPECT_EQ(images_on(Arch::sm75, 86), "compute_75");
  EXPECT_EQ(images_on(Arch::sm75, 72), "");
  EXPECT_EQ(images_on(Arch::sm90, 90), "sm_90a");
  EXPECT_EQ(images_on(Arch::sm90, 100), "");
  EXPECT_EQ(all_targets(), (std::vector<std::string>{"sm_90a", "sm_80", "sm_120", "compute_80",
                                                     "sm_75", "compute_75"}));
}

// What is compiled when it is needed is for the very device.
TEST(Images, AreOfTheVeryDeviceWhereTheyAreCompiled) {
  EXPECT_EQ(architecture_of(Arch::sm75)->target_on(75), "sm_75");
  EXPECT_EQ(architecture_of(Arch::sm75)->target_on(90), "compute_75");
  EXPECT_EQ(architecture_of(Arch::sm80)->target_on(86), "sm_86");
  EXPECT_EQ(architecture_of(Arch::sm80)->target_on(90), "sm_90");
  EXPECT_EQ(architecture_of(Arch::sm80)->target_on(103), "sm_103");
  EXPECT_EQ(architecture_of(Arch::sm90)->target_on(90), "sm_90a");
}

// Every architecture has what merges, appends and quantises, at the same numbers.
TEST(Architectures, HaveWhatAllHaveFirst) {
  for (const Architecture* const one : architectures()) {
    ASSERT_GE(one->auxiliary.size(), kAuxiliary.size());
    for (std::size_t i = 0; i < kAuxiliary.size(); ++i) {
      EXPECT_STREQ(one->auxiliary[i].name, kAuxiliary[i].name);
    }
  }
  EXPECT_STREQ(kAuxiliary[number_of(AuxiliaryKernel::combine_f32)].name, "combine_f32");
  EXPECT_STREQ(kAuxiliary[number_of(AuxiliaryKernel::append_f32)].name, "append_f32");
  EXPECT_STREQ(kAuxiliary[number_of(AuxiliaryKernel::append_quantizing_f32)].name,
               "append_quantizing_f32");
  EXPECT_STREQ(kAuxiliary[number_of(AuxiliaryKernel::quantize_usual_f16)].name,
               "quantize_usual_f16");
  EXPECT_STREQ(kAuxiliary[number_of(AuxiliaryKernel::find_prefixes)].name, "find_prefixes");
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
// differ in nothing else; but Turing multiplies fp16 alone.
TEST(Storage, GpuRowsComeInPairs) {
  using enum core::Operand;
  const auto is_row = [](const core::Kernel& wanted) {
    return std::count(kCatalog.begin(), kCatalog.end(), wanted) == 1;
  };
  for (const core::Kernel& row : kCatalog) {
    if (!is_gpu(row.arch)) continue;
    core::Kernel twin = row;
    if (core::widens(row) && !row.qv) {
      twin.cached = row.cached == Dtype::i8 ? Dtype::e4m3 : Dtype::i8;
    } else if (row.operand == e4m3 || row.arch == Arch::sm75) {
      continue;
    } else {
      const std::pair<core::Operand, core::Operand> pairs[] = {
          {bf16, f16}, {f16, bf16}, {i8_bf16, i8_f16}, {i8_f16, i8_bf16}};
      for (const auto& [one, other] : pairs) {
        if (row.operand == one) twin.operand = other;
      }
    }
    EXPECT_NE(twin, row) << name_of(row);
    EXPECT_TRUE(is_row(twin)) << name_of(row);
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
