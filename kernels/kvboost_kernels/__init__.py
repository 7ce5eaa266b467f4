"""Triton kernels for placing and repairing KV, each with its plain PyTorch twin. Knows nothing of `kvboost_rag`."""
