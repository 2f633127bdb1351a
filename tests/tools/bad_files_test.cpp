// Malformed, truncated and hostile files: each gives one printable line that begins with the path
// and names the byte or the field, and nothing crashes or throws.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>
#include <span>
#include <string>
#include <vector>

#include "files/npy.h"
#include "files/safetensors.h"
#include "files/tensor_file.h"
#include "tools/temporary_folder.h"

namespace tessera::tools {
namespace {

using std::string;

struct BadFile {
  const char* what;
  string bytes;
  const char* message;       ///< a part of the expected error
  const char* address = "";  ///< follows the path
};

string npy(const string& dictionary, std::size_t data, char version = '\1') {
  string length = {static_cast<char>(dictionary.size() & 255),
                   static_cast<char>(dictionary.size() >> 8 & 255)};
  if (version != '\1') {
    length += {static_cast<char>(dictionary.size() >> 16 & 255), '\0'};
  }
  return "\x93NUMPY" + string{version, '\0'} + length + dictionary + string(data, 'x');
}

string npy_descr(const string& descr) {
  return npy("{'descr': " + descr + ", 'fortran_order': False, 'shape': (2,)}\n", 8);
}

string npy_shape(const string& shape, std::size_t data = 8) {
  return npy("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + ", }\n", data);
}

string safetensors(const string& header, std::size_t data) {
  string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 255);
  return length + header + string(data, 'x');
}

string one(const string& fields, std::size_t data = 8) {
  return safetensors("{\"t\":{" + fields + "}}", data);
}

/// Two tensors with ranges [begin, end) each, of one-byte type so that sizes do not matter.
string two(const string& a, const string& b, std::size_t data, const char* second = "b") {
  const string head = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)";
  return safetensors(
      head + a + "},\"" + second + R"(":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
      data);
}

/// One line, the path first, the fragment in it.
void expect_error(const string& path, const Status& status, const string& fragment) {
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.text.find(fragment), string::npos) << status.text;
  EXPECT_EQ(status.text.rfind(path + ": ", 0), 0U) << status.text;
  EXPECT_LT(status.text.size(), path.size() + 1000) << status.text;
  for (const char c : status.text) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << status.text;
}

void expect_errors(const std::vector<BadFile>& table, const string& ending) {
  const TemporaryFolder folder;
  for (const BadFile& bad : table) {
    SCOPED_TRACE(bad.what);
    const string path = folder.file("bad" + ending, bad.bytes);
    expect_error(path, read_tensor(path + bad.address).status(), bad.message);
  }
}

TEST(BadFiles, Npy) {
  const string magic = "\x93NUMPY";
  expect_errors(
      {
          {"wrong magic", "\x93NUMPX\1", "is not a .npy file: byte 0"},
          {"a text file", "hello, world\n", "is not a .npy file: byte 0"},
          {"half a magic", "\x93NUM", "is not a .npy file: byte 0"},
          {"magic only", magic, "is truncated: the version at byte 6 is missing"},
          {"half a version", magic + "\1", "is truncated: the version at byte 6"},
          {"version 0", npy("{}", 0, '\0'), "version 0.0 at byte 6; accepted: 1.0, 2.0, 3.0"},
          {"version 9", npy("{}", 0, '\x09'), "version 9.0 at byte 6"},
          {"version 1.7", magic + "\1\7xx", "version 1.7 at byte 6"},
          {"half a length", magic + string("\1\0v", 3), "header length at byte 8 is incomplete"},
          {"half a long length", magic + string("\2\0v\0\0", 5), "length at byte 8 is incomplete"},
          {"header beyond the file", magic + string("\1\0\xff\xff{}", 6),
           "header length at byte 8 is 65535, but 2 bytes follow"},
          {"a header of 4 GB", magic + string("\2\0\xff\xff\xff\xff", 6),
           "header length at byte 8 is 4294967295; accepted: up to 1048576"},
          {"empty header", npy("", 8), "malformed at byte 10: found the end of the header"},
          {"empty dictionary", npy("{}\n", 8), "header lacks the key 'descr'"},
          {"no fortran_order", npy("{'descr': '<f4', 'shape': (2,)}", 8),
           "lacks the key 'fortran_order'"},
          {"no shape", npy("{'descr': '<f4', 'fortran_order': False}", 8), "lacks the key 'shape'"},
          {"a list", npy("['descr']\n", 8), "malformed at byte 10: found '['descr']\\x0a'"},
          {"not closed", npy("{'descr': '<f4'", 8), "expected ',' or '}'"},
          {"no colon", npy("{'descr' '<f4'}", 8), "found ''<f4'}', expected ':'"},
          {"code after it",
           npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}; import os", 8),
           "found '; import os', expected spaces"},
          {"unknown key", npy("{'descr': '<f4', 'order': 'C'}", 8), "the unknown key 'order'"},
          {"key twice", npy("{'descr': '<f4', 'descr': '<f4'}", 8), "twice the key 'descr'"},
          {"string not closed", npy("{'descr': '<f4}", 8), "a string with a closing quote"},
          {"escape", npy(R"({'descr': '\x3cf4', 'shape': (2,)})", 8), "a string without escapes"},
          {"non-ASCII key", npy("{'\xff\xfe\x1b[31m': 1}", 8), "key '\\xff\\xfe\\x1b[31m'"},
          {"fortran_order 1", npy("{'fortran_order': 1}", 8), "True or False for fortran_order"},
          {"column-major", npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1)}", 8),
           "fortran_order is True (column-major); row-major is accepted: np.save(path, "
           "np.ascontiguousarray(a))"},
          {"big-endian", npy_descr("'>f4'"),
           "descr '>f4' is big-endian; little-endian is accepted: np.save(path, a.astype('<f4'))"},
          {"objects", npy_descr("'|O'"), "descr '|O' (Python objects) is not read"},
          {"complex", npy_descr("'<c8'"), "descr '<c8' is not read; accepted: <f4, <f2"},
          {"no type", npy_descr("''"), "descr '' is not read"},
          {"structured", npy_descr("[('a', '<f4')]"), "descr is a list (a structured array)"},
          {"bf16 unasked", npy_descr("'<V2'"), "descr '<V2' does not say what its two bytes mean"},
          {"u2 unasked", npy_descr("'<u2'"),
           "descr '<u2' does not say what its two bytes mean (NumPy has no bf16); accepted when "
           "read as bf16"},
          {"negative size", npy_shape("(-2,)"),
           "shape[0] is -2; accepted: 0 to 9223372036854775807"},
          {"minus zero", npy_shape("(1, -0)"), "shape[1] is -0; accepted"},
          {"size over 2^63", npy_shape("(9223372036854775808,)"),
           "shape[0] is 9223372036854775808"},
          {"size of 90 digits", npy_shape("(" + string(90, '9') + ",)"), "9999999...; accepted"},
          {"product over 2^64", npy_shape("(4294967296, 4294967296)"),
           "shape (4294967296, 4294967296) overflows: over 2^63 bytes"},
          {"bytes over 2^63", npy_shape("(2305843009213693952,)"), "overflows: over 2^63 bytes"},
          {"overflow times zero", npy_shape("(9223372036854775807, 9223372036854775807, 0)", 0),
           "overflows"},
          {"8 EB", npy_shape("(2305843009213693951,)"), "needs 9223372036854775804 bytes"},
          {"float size", npy_shape("(2.0,)"), "found '.0,), }"},
          {"named size", npy_shape("(n,)"), "expected a whole number"},
          {"shape is a number", npy_shape("2"), "a tuple such as (2, 3) for shape"},
          {"a tuple without comma", npy_shape("(2)"), "a tuple of one is written (n,)"},
          {"two sizes without comma", npy_shape("(2 1)"), "found '1), }"},
          {"nested tuples", npy_shape(string(5000, '(')), "found '(((((((((((('"},
          {"size of 130 digits", npy_shape("(" + string(130, '1') + ")"), "shape[0] is 1111111111"},
          {"65 ones", npy_shape([] {
             string shape = "(";
             for (int i = 0; i < 65; ++i) shape += "1,";
             return shape + ")";
           }()),
           "shape has more than 64 dimensions"},
          {"one byte short", npy_shape("(2,)", 7),
           "is truncated: shape (2,) of f32 needs 8 bytes from byte"},
          {"no data", npy_shape("(2,)", 0), "but 0 are there"},
          {"one byte too many", npy_shape("(2,)", 9),
           "is too long: shape (2,) of f32 needs 8 bytes"},
          {"data of an empty array", npy_shape("(0, 3)", 4), "needs 0 bytes"},
          {"an .npz archive", "PK\x03\x04xxxx", "is a zip archive (.npz or .pt); accepted: .npy"},
          {"a pickle", "\x80\x04xxxx", "is a Python pickle"},
          {"a GGUF file", "GGUF\3xxx", "is a GGUF file"},
      },
      ".npy");
}

TEST(BadFiles, Safetensors) {
  const string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const string too_many = [] {
    string numbers = "1";
    for (int i = 0; i < 64; ++i) numbers += ",1";
    return R"("dtype":"F32","shape":[)" + numbers + "]";
  }();
  expect_errors(
      {
          {"seven bytes", string(7, '\0'), "is truncated: 7 bytes"},
          {"header of 2^64 bytes", string(8, '\xff') + "{}",
           "header length at byte 0 is 18446744073709551615; accepted: up to 100000000"},
          {"header beyond the file", string("\x10\0\0\0\0\0\0\0{}", 10),
           "is truncated: header length at byte 0 is 16, but 2 bytes follow"},
          {"no header", string(8, '\0'), "header at byte 8 does not begin with '{'"},
          {"an array", safetensors("[]", 0), "does not begin with '{'"},
          {"a space first", safetensors(" {}", 0), "does not begin with '{'"},
          {"a byte order mark", safetensors("\xef\xbb\xbf{}", 0), "does not begin with '{'"},
          {"a zero byte", safetensors(string("{}\0 ", 4), 0), "byte 10 is zero"},
          {"not closed", safetensors("{", 0), "header is not valid JSON at byte 9, after '{'"},
          {"a comma too many", safetensors("{},", 0), "not valid JSON at byte 10, after '{},'"},
          {"two objects", safetensors("{}{}", 0), "not valid JSON at byte 10"},
          {"comment", safetensors("{/**/}", 0), "not valid JSON at byte"},
          {"invalid UTF-8", safetensors("{\"\xff\":1}", 0), "not valid UTF-8 at byte 10"},
          {"overlong UTF-8", safetensors("{\"\xc0\xaf\":1}", 0), "not valid UTF-8 at byte"},
          {"lone surrogate", safetensors(R"({"\ud800":1})", 0), "not valid JSON"},
          {"no tensors", safetensors("{}", 0), "holds no tensors"},
          {"tensor is a number", safetensors(R"({"t":1})", 0),
           "'t' is 1; accepted: an object {dtype, shape, data_offsets}"},
          {"tensor is an array", safetensors(R"({"t":[]})", 0),
           "'t' is an array; accepted: an object"},
          {"tensor is null", safetensors(R"({"t":null})", 0), "'t' is null"},
          {"tensor is true", safetensors(R"({"t":true})", 0), "'t' is true"},
          {"metadata is a number", safetensors(R"({"__metadata__":3})", 0), "'__metadata__' is 3"},
          {"metadata holds a number", safetensors(R"({"__metadata__":{"a":3}})", 0),
           "a value of '__metadata__' is 3; accepted: a string"},
          {"metadata nests", safetensors(R"({"__metadata__":{"a":{}}})", 0), "is an object"},
          {"metadata twice", safetensors(R"({"__metadata__":{},"__metadata__":{}})", 0),
           "the key '__metadata__' twice"},
          {"empty tensor", one(""), "tensor 't' lacks the field dtype"},
          {"no shape", one(R"("dtype":"F32")"), "tensor 't' lacks the field shape"},
          {"no offsets", one(R"("dtype":"F32","shape":[2])"), "'t' lacks the field data_offsets"},
          {"dtype twice", one(R"("dtype":"F32","dtype":"F32")"),
           "tensor 't': dtype is there twice"},
          {"unknown field", one(R"("strides":[1])"), "tensor 't' has the unknown field 'strides'"},
          {"dtype is a number", one(R"("dtype":4)"),
           "dtype is 4; accepted: a string such as 'F32'"},
          {"dtype is an array", one(R"("dtype":["F32"])"), "dtype is an array"},
          {"dtype not known", one(R"("dtype":"F3\u001b2","shape":[2],"data_offsets":[0,8])"),
           "tensor 't' is of type 'F3\\x1b2'; accepted: F32, F16, BF16, F64, I32, I64"},
          {"shape is a string", one(R"("shape":"2")"),
           "shape is '2'; accepted: an array of integers"},
          {"shape is an object", one(R"("shape":{})"), "shape is an object"},
          {"nested shape", one(R"("shape":[[2]])"), "shape[0] is an array"},
          {"a nesting bomb", one("\"shape\":" + string(1 << 20, '[')), "shape[0] is an array"},
          {"a bomb of objects",
           safetensors(
               [] {
                 string text;
                 for (int i = 0; i < 100'000; ++i) text += "{\"a\":";
                 return text;
               }(),
               0),
           "tensor 'a' has the unknown field 'a'"},
          {"negative size", one(R"("shape":[2,-1])"),
           "shape[1] is -1; accepted: 0 to 92233720368547"},
          {"fractional size", one(R"("shape":[2.0])"), "shape[0] is 2.0; accepted"},
          {"huge exponent", one(R"("shape":[1e999])"), "not valid JSON at byte"},
          {"size of 2^63", one(R"("shape":[9223372036854775808])"),
           "shape[0] is 9223372036854775808"},
          {"size of 2^64", one(R"("shape":[18446744073709551616])"),
           "shape[0] is 18446744073709551616"},
          {"65 dimensions", one(too_many), "shape[64] has more than 64 numbers"},
          {"product over 2^64",
           one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])", 0),
           "shape (4294967296, 4294967296) of F32 overflows"},
          {"one offset", one(R"("data_offsets":[0])"), "data_offsets is not a pair [begin, end]"},
          {"three offsets", one(R"("data_offsets":[0,4,8])"), "data_offsets is not a pair"},
          {"offsets swapped", one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
           "data_offsets [8, 0] end before they begin"},
          {"beyond the file", one(good, 7), "data_offsets [0, 8] exceed the 7 data bytes"},
          {"far beyond the file",
           one(R"("dtype":"F32","shape":[2],"data_offsets":[0,9223372036854775807])"),
           "exceed the 8 data bytes that are there (is the file truncated?)"},
          {"shape too small", one(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"),
           "hold 8 bytes, but shape (1,) of F32 needs 4"},
          {"shape too large", one(R"("dtype":"F64","shape":[2,3],"data_offsets":[0,8])"),
           "hold 8 bytes, but shape (2, 3) of F64 needs 48"},
          {"bytes after the last", one(good, 9),
           "the tensors end at data byte 8, but 9 data bytes"},
          {"data without tensors", safetensors("{}", 3), "end at data byte 0, but 3 data bytes"},
          {"a hole first", one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"),
           "[4, 8] leave a hole after the tensors before, which end at 0"},
          {"overlap", two("[0,4]", "[2,6]", 6), "tensor 'b': data_offsets [2, 6] overlap"},
          {"the same bytes", two("[0,4]", "[0,4]", 4), "overlap the tensors before"},
          {"a hole", two("[0,4]", "[5,9]", 9), "tensor 'b': data_offsets [5, 9] leave a hole"},
          {"the same name", two("[0,4]", "[4,8]", 8, "a"), "tensor 'a' is there twice"},
          {"the same name, escaped", two("[0,4]", "[4,8]", 8, "\\u0061"),
           "tensor 'a' is there twice"},
          {"not named", two("[0,4]", "[4,8]", 8),
           "holds 2 tensors: 'a', 'b'; name one as FILE.safetensors:NAME"},
          {"missing", two("[0,4]", "[4,8]", 8), "has no tensor 'q'; it holds 'a', 'b'", ":q"},
          {"a hostile name", safetensors(R"({"\u001b[2J\n":1})", 0), "'\\x1b[2J\\x0a' is 1"},
          {"a pickle", "\x80\x02xxxxxxxx", "is a Python pickle"},
      },
      ".safetensors");
}

TEST(BadFiles, ManyNamesAreCutShort) {
  const TemporaryFolder folder;
  string header = "{";
  for (int i = 0; i < 12; ++i) {
    header += "\"layer." + std::to_string(i + 10) +
              R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)";
  }
  header.back() = '}';
  const string path = folder.file("many.safetensors", safetensors(header, 0));
  expect_error(path, read_tensor(path).status(), "'layer.17' and 4 more");
  EXPECT_EQ(list_tensors(path).value().size(), 12U);
  EXPECT_TRUE(read_tensor(path + ":layer.21").ok());
}

TEST(BadFiles, WhatIsNotARegularFile) {
  const TemporaryFolder folder;
  const string missing = folder / "missing.npy";
  expect_error(missing, read_tensor(missing).status(), "cannot be opened: No such file");
  const string nul = folder / "";
  expect_error(nul, read_tensor(nul).status(), "is a directory; a regular file is accepted");
  const string pipe = folder / "pipe.npy";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_error(pipe, read_tensor(pipe).status(), "is a pipe");  // and does not wait for a writer
  expect_error("/dev/zero", read_tensor("/dev/zero").status(), "is a device");
  const string empty = folder.file("empty.npy", "");
  expect_error(empty, read_tensor(empty).status(), "is empty (0 bytes)");
  const string loop = folder / "loop.npy";
  ASSERT_EQ(symlink("loop.npy", loop.c_str()), 0);
  expect_error(loop, read_tensor(loop).status(), "cannot be opened: Too many levels");
  const string long_name = folder / (string(300, 'n') + ".npy");
  expect_error(long_name, read_tensor(long_name).status(), "cannot be opened: File name too long");
  if (geteuid() != 0) {
    const string secret = folder.file("secret.npy", "x");
    ASSERT_EQ(chmod(secret.c_str(), 0), 0);
    expect_error(secret, read_tensor(secret).status(), "cannot be opened: Permission denied");
  }
  expect_error("", read_tensor("").status(), "cannot be opened: No such file");
  const string text = folder.file("notes.txt", "some words");
  expect_error(text, read_tensor(text).status(), "neither a .npy nor, by its name, a .safetensors");
  const string ugly = folder / "a\nb.npy";
  EXPECT_NE(read_tensor(ugly).status().text.find("a\\x0ab.npy: cannot be opened"), string::npos);
}

/// Every cut of a good file, and files with a few bytes changed: an error or a sound tensor, no
/// crash.
TEST(BadFiles, CutAndChangedAnywhere) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto check = [&](const string& whole, const auto& parse) {
    ASSERT_TRUE(parse(whole).ok()) << parse(whole).text;
    for (std::size_t size = 0; size < whole.size(); ++size) {
      EXPECT_FALSE(parse(whole.substr(0, size)).ok()) << size;
    }
    for (int trial = 0; trial < 5000; ++trial) {
      string changed = whole;
      for (std::size_t i = random() % 4 + 1; i > 0; --i) {
        changed[random() % changed.size()] = static_cast<char>(random() % 256);
      }
      const Status status = parse(changed);
      EXPECT_LT(status.text.size(), 1000U);
      for (const char c : status.text) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << status.text;
    }
  };
  const auto sound = [](const Entry& entry, std::size_t size) {
    EXPECT_LE(entry.bytes, size);
    EXPECT_LE(entry.offset, size - entry.bytes);
    if (entry.element) {
      EXPECT_EQ(byte_count(entry.shape, *entry.element), entry.bytes);
    }
  };
  check(npy_shape("(2, 3)", 24), [&](const string& file) {
    const auto entry = parse_npy(std::as_bytes(std::span(file)), TwoBytes::bf16);
    if (entry.ok()) sound(*entry, file.size());
    return entry.status();
  });
  check(two("[0,4]", "[4,8]", 8), [&](const string& file) {
    const auto entries = parse_safetensors(std::as_bytes(std::span(file)));
    for (std::size_t i = 0; entries.ok() && i < entries->size(); ++i)
      sound((*entries)[i], file.size());
    return entries.status();
  });
}

}  // namespace
}  // namespace tessera::tools
