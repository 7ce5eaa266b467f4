"""Keys and values as tensors: keys of chunks, codecs, rotation, the prompt-long buffer."""
