"""Chunk KV computed from tokens."""
