"""GPU kernels for keys and values that are reused at new positions. Independent of `kvboost_rag`.

Ops, each a folder with the same three parts (`reference.py` in plain torch, `triton.py`, documentation and dispatch
in `__init__.py`):

- `place_chunk`: dequantise, rotate and write stored chunks into prompt-long buffers, many chunks in one launch;
- `row_attention`: attention of selected rows against a whole buffer, with attention mass and entropy on request;
- `deviation`, `attention_kl`: how far freshly computed keys and values are from stored ones.

On CUDA and HIP tensors the Triton kernels run where Triton is installed, otherwise the plain torch reference.
Importing this package does not import Triton.
"""

from kvboost_kernels.deviation import Deviation, attention_kl, deviation
from kvboost_kernels.dispatch import Backend
from kvboost_kernels.place_chunk import Chunk, Quantised, Rotation, dequantise, place_chunk
from kvboost_kernels.row_attention import RowAttention, row_attention

__all__ = [
    "place_chunk",
    "Chunk",
    "Quantised",
    "Rotation",
    "dequantise",
    "row_attention",
    "RowAttention",
    "deviation",
    "Deviation",
    "attention_kl",
    "Backend",
]
