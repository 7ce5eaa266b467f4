"""Offline, with two kinds of models: tiny random ones of any architecture, and the real bundled one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The environment of the person who runs the tests must not change what they test.
for name in [name for name in os.environ if name.startswith("KVBOOST_") and name != "KVBOOST_CACHE_DIR"]:
    del os.environ[name]
# Embedding and encoding contexts are not what most tests look at; those that do say so.
os.environ["KVBOOST_NEIGHBOURS"] = "0"
os.environ["KVBOOST_CONTEXTS"] = "1"  # where a test wants neighbours it counts those of one context

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvboost_rag import KVBoost
    from kvboost_rag.models.load import LoadedModel

TinyModel = Callable[..., "LoadedModel"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TRAINING_TEXT = [
    "The store holds keys and values of every document that was encoded when the index was built.",
    "A question is answered from the documents in front of it; the first token comes soon.",
    "def rotate(keys, positions):\n    return keys * cos(positions) + half(keys) * sin(positions)\n",
    "You are a helpful assistant. Answer from the documents. system user assistant",
]


@pytest.fixture(scope="session", autouse=True)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A machine's GPU changes no test (it would page-lock memory and be the commands' device) unless `-m gpu` asks."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if "gpu" not in request.config.getoption("markexpr"):
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_documents_are_reused() -> Iterator[None]:
    """Tests have short documents, which an engine computes as a rule; those of that rule set it themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBOOST_FULL_BELOW", "0")
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE of 384 tokens with a ChatML template: any text encodes, and decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    bos, turn, end = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=turn, eos_token=end, pad_token=end, unk_token=bos
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: PreTrainedTokenizerBase) -> TinyModel:
    """`tiny_model("llama", num_hidden_layers=3, …)`: a fresh random model, the same weights for the same arguments.

    `attn_implementation` and `dtype` are taken out of the keywords; the others go into the model's config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvboost_rag.models.load import load_model

    def build(model_type: str = "llama", **config_fields: Any) -> LoadedModel:
        attention = config_fields.pop("attn_implementation", "sdpa")
        dtype = config_fields.pop("dtype", torch.float32)
        fields = {
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "bos_token_id": tiny_tokenizer.bos_token_id,
            "eos_token_id": tiny_tokenizer.eos_token_id,
            "pad_token_id": tiny_tokenizer.pad_token_id,
            # Wider than usual: attention that is not flat, logits that are not ties.
            "initializer_range": 0.1,
        }
        fields |= config_fields
        if fields["head_dim"] is None:  # some configs derive it and refuse to be told
            del fields["head_dim"]
        config = AutoConfig.for_model(model_type, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        return load_model(model.requires_grad_(False), tokenizer=tiny_tokenizer)

    return build


@pytest.fixture
def make_engine(tiny_model: TinyModel) -> Iterator[Callable[..., KVBoost]]:
    """`make_engine("gemma3", store=…)`: an engine on a tiny model of `architectures.REUSABLE`, closed at the end."""
    from architectures import REUSABLE

    from kvboost_rag import KVBoost

    made: list[KVBoost] = []

    def make(family: str = "llama", **options: Any) -> KVBoost:
        model_type, fields = REUSABLE[family]
        made.append(KVBoost(tiny_model(model_type, **fields), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., KVBoost]) -> KVBoost:
    """An engine that knows no documents."""
    return make_engine()


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32, converted into the user's cache at first use (about 25 seconds)."""
    import torch

    from kvboost_rag.models.load import ModelLoadError, load_model

    try:
        return load_model("bundled:smollm2", dtype=torch.float32)
    except ModelLoadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model_folder(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model as it lies on disk, for commands and processes that load their own."""
    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_model("llama", num_hidden_layers=3, max_position_embeddings=4096)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`run("warm", path, …)` gives (exit code, stdout, stderr); caches and stores lie in the test's folder."""
    from kvboost_rag import cli

    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kvboost-rag", *map(str, arguments)])
        capsys.readouterr()  # what came before, such as progress of saving a model
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return exit_info.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return run_command
