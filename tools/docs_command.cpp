// tessera docs: opens the documentation's site, where it is installed or built.
#include <spawn.h>

#include <array>
#include <cstdio>
#include <filesystem>

#include "commands.h"

extern char** environ;  // NOLINT(readability-redundant-declaration): not every unistd.h has it

namespace tessera::tools {

namespace {

namespace fs = std::filesystem;

/// The site's first page: beside the installed command (CMAKE_INSTALL_DOCDIR), or beside the build
/// folder that the command lies in, where `./dev docs` puts it. Errors: unsupported.
Result<fs::path> find_docs() {
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  const std::array<fs::path, 2> places = {folder / "../share/doc/tessera/html/index.html",
                                          folder / "../site/index.html"};
  for (const fs::path& place : places) {
    if (!error && fs::exists(place, error)) return fs::canonical(place, error);
  }
  return Status::unsupported("documentation: not at " + places[0].lexically_normal().string() +
                             ", nor at " + places[1].lexically_normal().string() +
                             "; `./dev docs` builds it, and `cmake --install` then installs it");
}

/// Hands the page to the desktop's browser; false: there is no desktop.
bool open_page(const fs::path& page) {
  std::string opener = "xdg-open", path = page.string();
  const std::array<char*, 3> words = {opener.data(), path.data(), nullptr};
  pid_t child = 0;
  return posix_spawnp(&child, opener.c_str(), nullptr, nullptr, words.data(), environ) == 0;
}

int run_docs(bool only_path) {
  const Result<fs::path> page = find_docs();
  if (!page) return fail(page.status());
  std::printf("%s\n", page->c_str());
  if (!only_path && !open_page(*page)) {
    std::fprintf(stderr, "tessera: no xdg-open here; open the page above in a browser\n");
  }
  return kSuccess;
}

}  // namespace

void add_docs(CLI::App& app, Context& context) {
  auto only_path = std::make_shared<bool>(false);
  CLI::App* command = app.add_subcommand(
      "docs", "Open the documentation in a browser, with an explorer of what the planner does");
  command->add_flag("--path", *only_path, "print where it is, and open nothing");
  command->callback([only_path, &context] { context.exit_code = run_docs(*only_path); });
}

}  // namespace tessera::tools
