#!/bin/sh
# Run the Triton tests with an older Triton: the one of common GPU images, whose interpreter needs numpy < 2.4.
#
#     sh benchmarks/triton_versions.sh [pytest's arguments]
#
# Makes .venv-triton36 beside .venv (PYTHON chooses its Python, 3.11 or newer) and leaves it for the next run.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-triton36
if [ ! -f "$venv/installed" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    grep -v '^numpy==' constraints.txt > "$venv/constraints.txt"
    "$venv/bin/python" -m pip install --quiet --constraint "$venv/constraints.txt" \
        torch triton==3.6.0 numpy==2.2.6 --editable .
    touch "$venv/installed"
fi
"$venv/bin/python" -c 'import numpy, torch, triton; print("triton", triton.__version__, "numpy", numpy.__version__, "torch", torch.__version__)'
[ $# -gt 0 ] || set -- tests/test_triton.py tests/test_triton_compile.py tests/test_triton_compile_features.py tests/test_gpu_script.py tests/test_isolated.py
exec "$venv/bin/python" -m pytest -q "$@"
