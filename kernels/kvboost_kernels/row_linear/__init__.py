"""`row_linear`: products of few rows with a weight matrix, on a CPU with matrix tiles (`cpu.py`).

The plain twin is `torch.nn.functional.linear`, which every other machine uses.
"""
