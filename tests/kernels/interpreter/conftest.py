"""These tests run kernels in Triton's interpreter, which must be chosen before Triton is first imported.

So they are collected only in a process started with `TRITON_INTERPRET=1`; in an ordinary run,
`tests/kernels/test_interpreter.py` starts that process.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
