#include "files/tensor_file.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "files/mapped_file.h"
#include "files/safetensors.h"

namespace tessera::tools {
namespace {

constexpr std::string_view kNpy = ".npy";
constexpr std::string_view kSafetensors = ".safetensors";
constexpr std::size_t kMaxPathShown = 400;
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 62;  // what no disk holds

/// The status with the path in front.
Status at(const std::string& path, Status status) {
  status.text = printable(path, kMaxPathShown) + ": " + status.text;
  return status;
}

/// Known formats that people hand over by mistake.
std::string other_format(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.starts_with("PK\x03\x04")) return "is a zip archive (.npz or .pt)";
  if (text.starts_with("\x80\x02") || text.starts_with("\x80\x04")) return "is a Python pickle";
  if (text.starts_with("GGUF")) return "is a GGUF file";
  if (text.starts_with("\x89HDF")) return "is an HDF5 file";
  return "";
}

/// The format follows from the first bytes; the path decides only where they say nothing.
Result<std::vector<Entry>> parse(const std::string& path, std::span<const std::byte> bytes,
                                 TwoBytes two_bytes) {
  if (is_npy(bytes)) {
    auto entry = parse_npy(bytes, two_bytes);
    if (!entry.ok()) return entry.status();
    return std::vector{std::move(entry).value()};
  }
  if (const std::string other = other_format(bytes); !other.empty()) {
    return Status::unsupported(other + "; accepted: .npy (np.save) and .safetensors");
  }
  if (path.ends_with(kNpy)) return parse_npy(bytes, two_bytes).status();
  if (path.ends_with(kSafetensors)) return parse_safetensors(bytes);
  return Status::unsupported("is neither a .npy nor, by its name, a .safetensors file");
}

/// "'a', 'b', 'c' and 9 more".
std::string names_of(std::span<const Entry> entries) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (const Entry& entry : entries.first(std::min(kShown, entries.size()))) {
    text += (text.empty() ? "" : ", ") + in_quotes(entry.name);
  }
  if (entries.size() > kShown) text += concat(" and ", entries.size() - kShown, " more");
  return text;
}

Result<Entry> select(std::span<const Entry> entries, const std::string& name) {
  if (entries.empty()) return Status::invalid("holds no tensors");
  if (name.empty()) {
    if (entries.size() == 1) return entries.front();
    return Status::invalid(concat("holds ", entries.size(), " tensors: ", names_of(entries),
                                  "; name one as FILE.safetensors:NAME"));
  }
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const Entry& entry) { return entry.name == name; });
  if (found != entries.end()) return *found;
  return Status::invalid(
      concat("has no tensor ", in_quotes(name), "; it holds ", names_of(entries)));
}

Result<FileTensor> view(std::shared_ptr<const MappedFile> file, const Entry& entry) {
  if (!entry.element) {
    return Status::unsupported(concat("tensor ", in_quotes(entry.name), " is of type ",
                                      in_quotes(entry.stored_type),
                                      "; accepted: F32, F16, BF16, F64, I32, I64"));
  }
  FileTensor tensor{*entry.element, entry.shape, nullptr, nullptr};
  if (entry.bytes == 0) {
    static constexpr double kNothing = 0;
    tensor.data = &kNothing;
    return tensor;
  }
  const auto bytes = file->bytes().subspan(entry.offset, entry.bytes);
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % size_of(*entry.element) != 0) {
    // A crafted or careless writer may place data at any byte.
    auto copy = allocate(bytes.size());
    if (!copy.ok()) return copy.status();
    std::memcpy(copy->get(), bytes.data(), bytes.size());
    tensor.data = copy->get();
    tensor.owner = std::move(copy).value();
    return tensor;
  }
  tensor.data = bytes.data();
  tensor.owner = std::move(file);
  return tensor;
}

Result<FileTensor> read(const TensorAddress& address, TwoBytes two_bytes) {
  auto mapped = MappedFile::open(address.path);
  if (!mapped.ok()) return mapped.status();
  const auto file = std::make_shared<const MappedFile>(std::move(mapped).value());
  const auto entries = parse(address.path, file->bytes(), two_bytes);
  if (!entries.ok()) return entries.status();
  const auto entry = select(entries.value(), address.name);
  if (!entry.ok()) return entry.status();
  return view(file, entry.value());
}

/// The tensors as entries in the order of the file: the largest elements first, so that every
/// tensor is aligned for its type. `offset` counts from the end of the header; `index` says whose
/// each is.
Result<std::vector<Entry>> lay_out(std::span<const TensorSpec> tensors,
                                   std::vector<std::size_t>& index) {
  std::vector<Entry> entries;
  std::uint64_t offset = 0;
  for (const std::uint64_t size : {8U, 4U, 2U}) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const TensorSpec& tensor = tensors[i];
      if (size_of(tensor.element) != size) continue;
      const auto bytes = byte_count(tensor.shape, tensor.element);
      if (!bytes || tensor.shape.size() > kMaxRank || *bytes > kMaxBytes - offset) {
        return Status::invalid(concat("cannot be written: tensor ", in_quotes(tensor.name),
                                      " has the shape ", printable(shape_text(tensor.shape))));
      }
      entries.push_back({tensor.name, "", tensor.element, tensor.shape, offset, *bytes});
      index.push_back(i);
      offset += *bytes;
    }
  }
  return entries;
}

Result<std::string> header_of(const std::string& path, std::span<const Entry> entries) {
  if (path.ends_with(kSafetensors)) return safetensors_header(entries);
  if (!path.ends_with(kNpy)) {
    return Status::invalid("cannot be written: the name must end in .npy or .safetensors");
  }
  if (entries.size() != 1) {
    return Status::invalid(concat("cannot be written: a .npy file holds one tensor, not ",
                                  entries.size(), "; .safetensors holds any number"));
  }
  return npy_header(*entries[0].element, entries[0].shape);
}

}  // namespace

std::int64_t FileTensor::count() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (size == 0) return 0;
    product *= size;
  }
  return product;
}

Result<std::shared_ptr<void>> allocate(std::uint64_t bytes) {
  constexpr std::align_val_t kAlign{64};
  void* const memory = ::operator new(std::max<std::uint64_t>(bytes, 1), kAlign, std::nothrow);
  if (memory == nullptr) return Status::device(concat("needs ", bytes, " bytes of memory"));
  return std::shared_ptr<void>(memory, [=](void* p) { ::operator delete(p, kAlign); });
}

TensorAddress TensorAddress::parse(std::string_view text) {
  const std::size_t ending = text.find(concat(kSafetensors, ":"));
  if (ending == std::string_view::npos) return {std::string(text), ""};
  const std::size_t colon = ending + kSafetensors.size();
  return {std::string(text.substr(0, colon)), std::string(text.substr(colon + 1))};
}

Result<FileTensor> read_tensor(std::string_view address, TwoBytes two_bytes) {
  const TensorAddress parsed = TensorAddress::parse(address);
  auto tensor = read(parsed, two_bytes);
  return tensor.ok() ? std::move(tensor) : at(parsed.path, tensor.status());
}

Result<std::vector<Entry>> list_tensors(const std::string& path) {
  const auto file = MappedFile::open(path);
  if (!file.ok()) return at(path, file.status());
  auto entries = parse(path, file->bytes(), TwoBytes::bf16);
  return entries.ok() ? std::move(entries) : at(path, entries.status());
}

Result<TensorOutput> TensorOutput::create(const std::string& path,
                                          std::span<const TensorSpec> tensors) {
  std::vector<std::size_t> index;
  const auto entries = lay_out(tensors, index);
  if (!entries) return at(path, entries.status());
  const auto header = header_of(path, *entries);
  if (!header) return at(path, header.status());
  const std::uint64_t data_bytes =
      entries->empty() ? 0 : entries->back().offset + entries->back().bytes;
  auto file = OutputFile::create(path, header->size() + data_bytes);
  if (!file) return at(path, file.status());
  std::byte* const bytes = file->bytes().data();
  std::memcpy(bytes, header->data(), header->size());
  std::vector<void*> data(tensors.size());
  for (std::size_t i = 0; i < index.size(); ++i) {
    data[index[i]] = bytes + header->size() + (*entries)[i].offset;
  }
  return TensorOutput(path, std::move(*file), std::move(data));
}

Status TensorOutput::commit() {
  Status status = file_.commit();
  return status.ok() ? status : at(path_, std::move(status));
}

Status write_tensors(const std::string& path, std::span<const NamedTensor> tensors) {
  std::vector<TensorSpec> specs;
  for (const NamedTensor& t : tensors) specs.push_back({t.name, t.element, t.shape});
  auto output = TensorOutput::create(path, specs);
  if (!output) return output.status();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t bytes = *byte_count(tensors[i].shape, tensors[i].element);
    if (bytes > 0) std::memcpy(output->data(i), tensors[i].data, bytes);
  }
  return output->commit();
}

}  // namespace tessera::tools
