#include "json.h"

namespace tessera::explorer {

Json& Json::value(std::string_view string) {
  separate();
  text_ += '"';
  for (const char c : string) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      text_ += {'\\', c};
    } else if (c == '\n') {
      text_ += "\\n";
    } else if (code < 0x20) {
      text_ += {'\\', 'u', '0', '0', kDigits[code >> 4], kDigits[code & 15]};
    } else {
      text_ += c;
    }
  }
  text_ += '"';
  return *this;
}

}  // namespace tessera::explorer
