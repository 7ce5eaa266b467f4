"""A tiny random model of any causal architecture that transformers knows, from nothing but its own default config."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 258
MAX_PARAMETERS = 20_000_000
SIZES: dict[int, tuple[str, ...]] = {
    VOCAB: ("vocab_size", "vocab_size_per_layer_input"),
    64: (
        *(
            "hidden_size",
            "n_embd",
            "d_model",
            "dim",
            "intermediate_size",
            "ffn_hidden_size",
            "d_ff",
            "ffn_dim",
            "n_inner",
        ),
        *(
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "lru_width",
        ),
        *("shared_intermediate_size", "intermediate_size_mlp", "word_embed_proj_dim", "embedding_size", "dense_size"),
        *("expert_ffn_hidden_size", "input_embedding_size", "output_embedding_size", "time_mix_extra_dim", "d_embed"),
        *("attention_hidden_size", "moe_shared_expert_intermediate_size", "shared_expert_size", "block_ff_dim"),
    ),
    4: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
        *(
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
        ),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "swa_num_attention_heads"),
        *("num_decoder_layers", "num_encoder_layers", "num_decoder_attention_heads", "num_encoder_attention_heads"),
    ),
    2: (
        *("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "decoder_kv_heads", "num_experts_per_tok"),
        *("moe_k", "moe_topk", "top_k_experts", "index_n_heads", "num_experts_per_token"),
    ),
    1: (
        "n_group",
        "topk_group",
        "n_shared_experts",
        "num_shared_experts",
        "first_k_dense_replace",
        "num_nextn_predict_layers",
    ),
    16: (
        "head_dim",
        "d_kv",
        "swa_head_dim",
        "index_head_dim",
        "sliding_window",
        "attention_chunk_size",
        "global_head_dim",
    ),
    8: ("qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim", "index_topk", "hidden_size_per_layer_input"),
    12: ("v_head_dim",),
    24: ("q_lora_rank",),
    20: ("kv_lora_rank",),
    2048: ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_sequence_length"),
}
SMALL = {name: size for size, names in SIZES.items() for name in names}
TOKENS = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
VARIATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 16},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"num_key_value_heads": None},
    {"sliding_window": None},
    {"num_hidden_layers": 6},
)
"""Tried one after the other until a model is built and answers; None leaves a field out."""


class NotBuilt(Exception):
    """Why there is no tiny model of an architecture: its configuration does not shrink by itself."""


def architectures() -> list[str]:
    """Model types of every causal architecture in the installed transformers."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """Random weights, wide enough for attention that is not flat; everything small that has a size we know.

    Raises:
        NotBuilt: the architecture cannot be made small without knowing it.
    """
    errors = []
    for variation in VARIATIONS:
        try:
            return _built(model_type, dtype, variation | fields)
        except Exception as error:  # configs and models check what they like
            errors.append(error)
    raise NotBuilt(_line(errors[0]))


def _built(model_type: str, dtype: torch.dtype, changes: dict[str, Any]) -> PreTrainedModel:
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    wanted = _shrunk(default) | _parts(default) | TOKENS | {"initializer_range": 0.1} | changes
    if hasattr(default, "is_decoder"):  # architectures that are encoders unless they are told
        wanted["is_decoder"] = True
    config = kind(**{name: value for name, value in wanted.items() if value is not None})
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise NotBuilt(f"{size / 1e6:.0f}M parameters after shrinking")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
        model(torch.tensor([[5, 6, 7, 8, 9]]))
    return model


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    held = config.to_dict()
    return {
        name: size
        for name, size in SMALL.items()
        if isinstance(held.get(name), int) and not isinstance(held[name], bool) and held[name] > 0
    }


def _parts(config: PreTrainedConfig) -> dict[str, Any]:
    """Sub-configs of text, vision and audio, shrunk alike."""
    found = {}
    for name, kind in getattr(type(config), "sub_configs", {}).items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            found[name] = _shrunk(part) | (TOKENS if "text" in name else {}) | {"initializer_range": 0.1}
            if hasattr(kind, "model_type") and kind.model_type:
                found[name]["model_type"] = kind.model_type
    return found


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:140]
