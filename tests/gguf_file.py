"""A tiny model in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", " ", "c"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def write_gguf(path: Path) -> Path:
    """A two-layer random llama with 8-bit matrices and a BPE tokenizer whose EOS is not its end of turn."""
    import gguf

    writer, rng, hidden = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0), 32
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, len(VOCABULARY)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, VOCABULARY),
        (writer.add_token_types, [3, 3, 3, 1, 1, 1, 1, 1]),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 0),
        (writer.add_chat_template, TEMPLATE),
    ):
        add(value)
    shapes = {"token_embd": (len(VOCABULARY), hidden), "output_norm": (hidden,)}
    for layer in (0, 1):
        rows = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 64, "ffn_up": 64}
        shapes |= {f"blk.{layer}.{name}": (n, hidden) for name, n in rows.items()}
        shapes |= {f"blk.{layer}.{name}": (hidden,) for name in ("attn_norm", "ffn_norm")}
        shapes[f"blk.{layer}.ffn_down"] = (hidden, 64)
    eight_bit = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, eight_bit), raw_dtype=eight_bit)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
