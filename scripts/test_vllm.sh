#!/bin/sh
# The connector's tests in vLLM's own environment. One process a file: vLLM cannot make a second engine in a process.
# One OpenMP thread: two have stalled under load.
set -eu
cd "$(dirname "$0")/.."

scripts/setup_vllm.sh
for file in tests/vllm_kvboost/test_*.py; do
    echo "$file"
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q "$@" "$file"
done
