// Variables of the environment, for as long as a test lasts.
#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace tessera::cuda {

class Environment {
 public:
  Environment() = default;
  ~Environment() {
    for (const auto& [name, value] : before_) {
      if (value) {
        setenv(name.c_str(), value->c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

  void set(const std::string& name, const std::string& value) {
    const char* const now = std::getenv(name.c_str());
    before_.try_emplace(name, now == nullptr ? std::optional<std::string>() : now);
    setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace tessera::cuda
