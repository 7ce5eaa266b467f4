"""Tiny random models of many architectures, for tests that must hold on all of them."""

from __future__ import annotations

from typing import Any

WINDOW = 16
"""Sliding window of the tiny models: shorter than every test prompt."""

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 10_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Attention that caches the compressed KV and one rotated key for all heads (DeepSeek and its kin)."""
INDEX = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}

REUSABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-eager": ("llama", {"attn_implementation": "eager"}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "gemma2-eager": ("gemma2", {"sliding_window": WINDOW, "attn_implementation": "eager"}),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "phi-partial": ("phi", {}),
    "olmo2": ("olmo2", {}),
    "glm4-interleaved": ("glm4", {}),
    "granite": ("granite", {}),
    "stablelm-partial": ("stablelm", {}),
    "gpt_neox-partial": ("gpt_neox", {}),
    "gptj-interleaved": ("gptj", {"n_embd": 64, "n_layer": 5, "n_head": 4, "rotary_dim": 8, "n_positions": 2048}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW}),
    "smollm3-nope": ("smollm3", {}),
    "starcoder2": ("starcoder2", {}),
    "gpt_oss-sinks": ("gpt_oss", {"num_local_experts": 4, "sliding_window": WINDOW, "attn_implementation": "eager"}),
    "llama4": ("llama4_text", {"num_local_experts": 2}),
    "deepseek_v3-latent": ("deepseek_v3", LATENT),
    "nanochat-backwards": ("nanochat", {}),
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}, "absolute position"),
    "opt": ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 64}, "absolute position"),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 3, "attn_implementation": "eager"}, "position_ids"),
    "falcon-alibi": ("falcon", {"alibi": True, "head_dim": None, "attn_implementation": "eager"}, "ALiBi"),
    "falcon-rotary": ("falcon", {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2}, "interface"),
    "gpt_neox_japanese": ("gpt_neox_japanese", {"head_dim": None, "attn_implementation": "eager"}, "interface"),
    "doge": ("doge", {}, "mask of its own making"),
    "bert-encoder": ("bert", {"head_dim": None}, "as that of an encoder"),
    "deepseek_v32-indexed": ("deepseek_v32", LATENT | INDEX, "more than keys and values"),
    "qwen3_next": ("qwen3_next", {}, "not attention"),
    "mamba": ("mamba", {"attn_implementation": "eager"}, "not attention"),
}
