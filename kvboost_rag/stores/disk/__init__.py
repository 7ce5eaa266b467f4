"""Chunk KV on disk."""
