"""Kernels for keys and values that are reused at new positions. Independent of `kvboost_rag`.

Ops, each a folder with the same three parts (`reference.py` in plain torch, `triton.py`, documentation and dispatch
in `__init__.py`):

- `place_chunk`: dequantise, rotate and write stored chunks into prompt-long buffers, many chunks in one launch;
- `row_attention`: attention of selected rows against a whole buffer, with attention mass and entropy on request.

On CUDA and HIP tensors the Triton kernels run where Triton is installed, otherwise the plain torch reference.
No import of this package imports Triton; the first launch does. Modules named `cpu` hold loops for processors, which
numba compiles (`compiled.py`, `lanes.py`, `amx.py`).

    from kvboost_kernels.place_chunk import Chunk, Quantised, Rotation, place_chunk
    from kvboost_kernels.row_attention import row_attention
"""
