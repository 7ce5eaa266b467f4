"""Models in GGUF files, loaded by transformers as plain dense models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost_rag.models.errors import ModelLoadError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_gguf_model(path: Path, **load_options: Any) -> PreTrainedModel:
    """The model in the file at `path`, its weights unpacked unless `load_options` hold another `quantization_config`.

    Packed weights need compiled kernels that most machines lack. Asked to unpack, transformers also forgets that the
    model was quantised, so that it can be saved and cast.

    Raises:
        ModelLoadError: the file is damaged, or its architecture is not known.
    """
    import transformers

    # The oldest releases we accept know no `GgufConfig`: they always unpack.
    gguf_config = getattr(transformers, "GgufConfig", None)
    if "quantization_config" not in load_options and gguf_config is not None:
        load_options["quantization_config"] = gguf_config(dequantize=True)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, **load_options)
    except Exception as error:  # readers of the format raise whatever they meet
        raise ModelLoadError(f"cannot load {path}: {reason(error)}") from error


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the file at `path`, with its chat template if the file has one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:
        raise ModelLoadError(f"cannot load the tokenizer in {path}: {reason(error)}; pass tokenizer=") from error
