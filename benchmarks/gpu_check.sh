#!/usr/bin/env bash
# Everything that needs a GPU, once, in less than nine minutes: the contract suites of memory and backends, tests/gpu, and
# a recovery benchmark with random weights. Installs nothing. Exit status: 0 all passed, 1 something failed, 77 it cannot
# run here (the reason is printed).
#
#   benchmarks/gpu_check.sh [--size tiny|1b|3b|8b] [--json FILE] [--only PART,...] [--device cuda|cpu]
#
# PYTHON: the interpreter with torch for CUDA (default: .venv/bin/python, else python3).
# BELAYER_EXTRA: a folder with further packages, for a machine without a package index, made for the interpreter there:
#   pip install --target extra msgspec pydantic google-crc32c cuda-bindings nvidia-ml-py pytest
# --device cpu runs the same parts without a GPU, with the tiny model, to try the script itself.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in "$root/.venv/bin/python" python3; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "import torch" >/dev/null 2>&1; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "gpu_check: skipped: no Python with torch was found (set PYTHON)"
    exit 77
fi
export PYTHONPATH="$root/src:$root${BELAYER_EXTRA:+:$BELAYER_EXTRA}${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/benchmarks/_gpu_check.py" "$@"
