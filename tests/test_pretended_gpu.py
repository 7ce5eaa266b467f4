"""The whole engine on GPUs that are pretended: same answers as on a CPU, no operand in the wrong place, no copy read
before it has arrived; and several processes with a GPU each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.cli.jobs import encode_in_processes, worker_specs
from kvboost_rag.cli.model_choice import ModelChoice
from kvboost_rag.cli.options import StoreChoice
from kvboost_rag.config import EncodingConfig, GenerationParams
from kvboost_rag.models.load import load_model
from kvboost_rag.stores import DeviceStore, DiskStore, MemoryStore, TieredStore, open_store
from tests.pretend_cuda import pretend_cuda

DOCUMENTS = [
    "The store holds keys and values of every document. It was built in 1851 and its lamp burned oil.",
    "A question is answered from the documents in front of it. The keeper in 1890 was Marta Lind.",
    "def rotate(keys, positions):\n    return keys * cos(positions) + half(keys) * sin(positions)\n",
]
ANSWER = GenerationParams(max_new_tokens=5)
VARIANTS = [
    ("llama", {}, {"sensitivity": True}, "disk"),
    ("gemma3_text", {"sliding_window": 32}, {"quantization": "k8v4"}, "memory"),
    ("phi3", {}, {"quantization": "k8v8"}, "memory"),
]


def prompt(*order: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join([*(DOCUMENTS[i] for i in order), "Who kept it?"])}]


def answers(engine: KVBoost) -> dict[str, tuple]:
    """Every strategy, cold and warm, in two orders; exact and no reuse; sampled."""
    assert engine.probe.reusable, engine.probe.reason
    engine.warm(DOCUMENTS[:2], neighbours=[[], [DOCUMENTS[0]]])
    calls = {
        f"{repair} {order}": ({"repair": repair, "recompute_ratio": 0.1}, prompt(*order))
        for repair in ("none", "selective", "cacheblend", "query", "full")
        for order in ((0, 1, 2), (2, 1, 0))
    }
    if engine.encoding.sensitivity:
        calls["sensitivity"] = {"repair": "sensitivity"}, prompt(0, 1)
    calls |= {f"{reuse} {n}": ({"reuse": reuse}, prompt(0, 1)) for n, reuse in enumerate(("exact", "off", "exact"))}
    calls["sampled"] = {"params": GenerationParams(max_new_tokens=5, temperature=0.8, seed=3)}, prompt(1, 0)
    found = {}
    for name, (options, messages) in calls.items():
        result = engine.generate(messages, **{"params": ANSWER, "strict": True, **options})
        found[name] = result.token_ids, result.usage, result.reuse
    assert not engine.stats().fallbacks
    return found


@pytest.mark.parametrize(("model_type", "fields", "encoding", "place"), VARIANTS, ids=[v[0] for v in VARIANTS])
def test_answers_are_those_of_a_cpu(tiny_model, tmp_path, monkeypatch, model_type, fields, encoding, place):
    monkeypatch.setenv("KVBOOST_KERNELS", "off")  # they need a GPU's memory, or the interpreter
    found = {}
    for device in ("cpu", "cuda:1"):
        loaded = tiny_model(model_type, num_hidden_layers=3, **fields)
        store = "memory" if place == "memory" else tmp_path / device
        with pretend_cuda(2):
            if device != "cpu":
                loaded.model.to(device)
            with KVBoost(loaded, store=store, encoding=EncodingConfig(**encoding), profile=None) as engine:
                found[device] = answers(engine)
                assert ("device" in engine.stats().bytes_held) is (device != "cpu")
    assert found["cuda:1"] == found["cpu"]


SPREAD = {
    "model.embed_tokens": "cuda:0",
    "model.rotary_emb": "cuda:0",
    "model.layers.0": "cuda:0",
    "model.layers.1": "cuda:1",
    "model.layers.2": "cuda:1",
    "model.norm": "cuda:1",
    "lm_head": "cuda:1",
}


def test_a_model_spread_over_gpus(model_folder, monkeypatch):
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    encoding = EncodingConfig(sensitivity=True)
    with KVBoost.from_pretrained(model_folder, encoding=encoding, profile=None) as engine:
        expected = answers(engine)
    with (
        pretend_cuda(2),
        KVBoost.from_pretrained(model_folder, encoding=encoding, profile=None, device_map=SPREAD) as engine,
    ):
        groups = engine.probe.require_layout.groups
        assert [(group.layers, str(group.device)) for group in groups] == [((0,), "cuda:0"), ((1, 2), "cuda:1")]
        assert answers(engine) == expected
        waited_for, synchronize = set(), torch.cuda.synchronize
        with monkeypatch.context() as patch:  # undone before what is pretended is
            patch.setattr(torch.cuda, "synchronize", lambda gpu: waited_for.add(str(gpu)) or synchronize(gpu))
            engine.generate(prompt(0, 1), params=ANSWER)
        assert waited_for == {"cuda:0", "cuda:1"}, "or stage times would be another's"


def test_a_seed_touches_the_model_s_gpu_only(tiny_model, monkeypatch):
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    with pretend_cuda(2):
        touched, state = [], torch.cuda.get_rng_state
        loaded = tiny_model("llama", num_hidden_layers=3)
        loaded.model.to("cuda:1")
        with KVBoost(loaded, profile=None) as engine:
            sampling = GenerationParams(max_new_tokens=3, temperature=0.8, seed=3)
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "get_rng_state", lambda gpu: touched.append(str(gpu)) or state(gpu))
                first, again = (engine.generate(prompt(0), params=sampling, strict=True).token_ids for _ in range(2))
        assert first == again
        assert touched == ["cuda:1"] * 2


def test_logits_do_not_depend_on_the_tier(tiny_model, tmp_path, monkeypatch):
    """Small tiers, so that chunks wander between device, page-locked memory and disk."""
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    orders = (0, 1, 2), (1,), (2, 1), (0,)
    with pretend_cuda(1):
        loaded = tiny_model("llama", num_hidden_layers=3)
        loaded.model.to("cuda:0")
        with KVBoost(loaded, profile=None) as engine:
            engine.warm(DOCUMENTS)
            reference = [engine.logits(prompt(*order), strict=True).cpu() for order in orders]
            largest = max(info.num_bytes for info in engine.store.entries())
        store = TieredStore(
            DeviceStore("cuda:0", largest), MemoryStore(2 * largest), DiskStore(tmp_path / "kv", 10 << 20)
        )
        with KVBoost(loaded, store=store, profile=None) as engine:
            engine.warm(DOCUMENTS)
            for _ in range(3):
                for order, expected in zip(orders, reference, strict=True):
                    engine.prefetch([DOCUMENTS[i] for i in order])
                    assert torch.equal(engine.logits(prompt(*order), strict=True).cpu(), expected)
            assert store.tier_stats["device"].evictions
            assert store.bytes_held["device"] <= largest


def test_page_locked_memory_counts_as_what_torch_takes(tiny_model, monkeypatch):
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    with pretend_cuda(1):
        store = MemoryStore(1 << 20)
        loaded = tiny_model("llama", num_hidden_layers=3)
        loaded.model.to("cuda:0")
        with KVBoost(loaded, store=store, profile=None) as engine:
            engine.warm(DOCUMENTS[:1])
            (held,) = store._entries.values()
            assert all(tensor.is_pinned() for tensor in held.tensors.values())
            sizes = [tensor.numel() * tensor.element_size() for tensor in held.tensors.values()]
            assert store.bytes_held["memory"] == sum(1 << (size - 1).bit_length() for size in sizes) > sum(sizes)


PRETEND_AT_START = """
import os
from tests import pretend_cuda
which, used = pretend_cuda.current_stream, set()

def current_stream(device=None):
    stream = which(device)
    if stream.device not in used:
        used.add(stream.device)
        with open(os.environ["PRETENDED_GPUS_LOG"], "a") as log:
            print(os.getpid(), stream.device, file=log)
    return stream

pretend_cuda.current_stream = current_stream
gpus = pretend_cuda.pretend_cuda(2)
gpus.__enter__()
"""


def test_jobs_use_every_gpu(model_folder, tmp_path, monkeypatch):
    """One process a GPU, each with its own model; every key written once, with the bytes of a single process."""
    (tmp_path / "sitecustomize.py").write_text(PRETEND_AT_START)
    root, log = Path(__file__).parents[1], tmp_path / "devices"
    path = [str(tmp_path), str(root), str(root / "kernels"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("PRETENDED_GPUS_LOG", str(log))
    monkeypatch.setenv("KVBOOST_KERNELS", "off")
    texts = [f"Chunk number {n} tells of the tide and of the clock. " * 4 for n in range(6)]
    encoding = EncodingConfig(neighbours=0)
    choice = ModelChoice(model_folder, "float32")
    with pretend_cuda(2):
        specs = worker_specs(choice, StoreChoice(tmp_path / "kv"), "", encoding, 2)
    assert [spec.model.device for spec in specs] == ["cuda:0", "cuda:1"]
    loaded = load_model(model_folder, dtype="float32")
    with KVBoost(loaded, store=tmp_path / "kv", encoding=encoding, profile=None) as engine:
        keys = engine.warm(texts, encode=False).content_hashes
    state = encode_in_processes(specs, [(key,) for key in keys])
    assert (state.num_encoded, state.num_already_stored) == (len(keys), 0)
    used = dict(line.split() for line in log.read_text().splitlines())
    assert sorted(used.values()) == ["cuda:0", "cuda:1"], "by one process each"
    with KVBoost(loaded, store="memory", encoding=encoding, profile=None) as engine:
        engine.warm(texts)
        alone = {entry.key: entry for key in keys if (entry := engine.store.load(key)[0])}
    store = open_store(tmp_path / "kv")
    try:
        assert set(store.keys()) == set(keys) == set(alone)
        for key in keys:
            ours = store.load(key)[0]
            assert ours is not None
            for name, tensor in alone[key].tensors.items():
                torch.testing.assert_close(ours.tensors[name], tensor)
    finally:
        store.close()
