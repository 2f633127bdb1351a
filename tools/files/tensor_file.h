// Tensor files as the `tessera` command sees them: one tensor named on the command line comes in,
// as a view of the mapped file; named results go out, whole or not at all. Every error is one line
// that begins with the file's path; nothing throws.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/entry.h"
#include "files/npy.h"
#include "files/output_file.h"
#include "tessera/status.hpp"
#include "tessera/types.hpp"

namespace tessera::tools {

/// A dense row-major tensor, aligned for its element type, that keeps its memory alive.
struct FileTensor {
  Element element = Element::f32;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;  ///< never null, not even for zero elements
  std::shared_ptr<const void> owner;

  std::int64_t count() const;  ///< elements
};

/// Memory aligned to 64 bytes, also for zero bytes; freed with its last owner.
Result<std::shared_ptr<void>> allocate(std::uint64_t bytes);

/// A tensor to be written.
struct TensorSpec {
  std::string name;  ///< .npy has no names and ignores it
  Element element = Element::f32;
  std::vector<std::int64_t> shape;
};

/// The same with its data, dense and row-major.
struct NamedTensor {
  std::string name;
  Element element = Element::f32;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;
};

/// Where a tensor is: "q.npy", "model.safetensors:layer.0.q", or "one.safetensors" for the only
/// tensor of a file. The name begins after the first ".safetensors:".
struct TensorAddress {
  std::string path;
  std::string name;  ///< empty: not given

  static TensorAddress parse(std::string_view text);
};

/// Maps the file (copies only data that is misaligned for its element type).
Result<FileTensor> read_tensor(std::string_view address, TwoBytes two_bytes = TwoBytes::refuse);

/// What a file holds, without touching the data.
Result<std::vector<Entry>> list_tensors(const std::string& path);

/// Tensors that are computed where they are stored: the file is mapped, so results larger than
/// memory can be written, and appears at commit(), whole or not at all (output_file.h).
class TensorOutput {
 public:
  /// A .npy (exactly one tensor) or a .safetensors file, chosen by the path's ending. A disk too
  /// full for it is an error here.
  static Result<TensorOutput> create(const std::string& path, std::span<const TensorSpec> tensors);

  /// Dense, row-major memory of tensors[i], zero at first; null for no tensor, not even an empty
  /// one. The file's first data byte is aligned to 64; .safetensors allows no gaps, so what follows
  /// is aligned for its element type only.
  void* data(std::size_t i) const { return data_[i]; }

  Status commit();

 private:
  TensorOutput(std::string path, OutputFile file, std::vector<void*> data)
      : path_(std::move(path)), file_(std::move(file)), data_(std::move(data)) {}

  std::string path_;
  OutputFile file_;
  std::vector<void*> data_;
};

/// Writes copies of the tensors to such a file.
Status write_tensors(const std::string& path, std::span<const NamedTensor> tensors);

}  // namespace tessera::tools
