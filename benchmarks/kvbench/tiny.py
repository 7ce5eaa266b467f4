"""A model that takes no time."""

from __future__ import annotations

from typing import Any


def tiny_tokenizer() -> Any:
    """Byte-level, 258 tokens: any text encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def tiny_model() -> Any:
    """A random llama of two layers with a byte-level tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvboost_rag.models.load import load_model

    fields = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    config = AutoConfig.for_model("llama", **fields, **heads, bos_token_id=256, eos_token_id=257, pad_token_id=257)
    torch.manual_seed(0)
    return load_model(AutoModelForCausalLM.from_config(config).requires_grad_(False), tokenizer=tiny_tokenizer())
