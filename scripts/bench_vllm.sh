#!/bin/sh
# vLLM with prefix caching beside ours, and vLLM with the connector: the same prompts (see benchmarks/vllm_peer.py).
#
#   BENCH_ARGS  handed on to benchmarks/vllm_peer.py prompts: --documents, --rounds, --chunk-tokens
set -eu
cd "$(dirname "$0")/.."

MAIN="${MAIN_PYTHON:-.venv/bin/python}"
PROMPTS=".benchmarks/vllm_prompts.json"
OUT="benchmarks/results/ttft_vllm.jsonl"

scripts/setup_vllm.sh
mkdir -p .benchmarks
# shellcheck disable=SC2086
"$MAIN" benchmarks/vllm_peer.py prompts "$PROMPTS" ${BENCH_ARGS:-}
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind \
    .venv-vllm/bin/python benchmarks/vllm_peer.py run "$PROMPTS" --out "$OUT"
