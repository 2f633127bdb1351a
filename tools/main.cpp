// The tessera command.
#include "cli.h"
#include "files/mapped_file.h"

int main(int argc, char** argv) {
  tessera::tools::explain_file_faults();
  return tessera::tools::run_cli(argc, argv);
}
