"""Which model the options of a command mean, in which precision and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelChoice:
    """What the options say about the model."""

    name: str
    dtype: str | None = None
    device: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    """Name and folder of each."""

    def resolved_device(self) -> str:
        return self.device or _device()

    def resolved_dtype(self) -> str | None:
        """None: the checkpoint's own."""
        bundled = self.name.startswith("bundled:")
        return self.dtype or (fast_dtype(self.resolved_device()) if bundled else None)


def fast_dtype(device: str) -> str:
    """Half precision where the hardware computes in it, else float32. The same on each run: stored KV depends on it."""
    import torch

    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "bf16" in flags else "float32"


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
