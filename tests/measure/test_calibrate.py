"""Calibration on tiny models: scores, the choice, the gate, and what an engine does with a profile."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from kvboost_rag.config import CalibratedDefaults, ConfigError, EncodingConfig, ReuseConfig
from kvboost_rag.models.profile import Measured, ModelProfile, Setting, load_profile, profile_path, save_profile

DOCUMENTS = (
    "The store holds keys and values of every document that was encoded when the index was built.",
    "A question is answered from the documents in front of it; the first token comes soon.",
    "Rotation turns keys to the positions that they take in this prompt, in float32.",
    "A tenant never sees the chunks of another tenant, whichever tier they are kept in.",
)


def measured(setting: Setting, kl: float, ratio: float) -> Measured:
    return Measured(setting, 5, kl, kl, kl, 1.0, 1.0, None, None, ratio)


def profile(chosen: Setting | None, fingerprint: str = "f" * 64) -> ModelProfile:
    return ModelProfile(fingerprint, version("transformers"), "tiny", 0.05, chosen, (), 5, 0, "test")


def questions(count: int = 4):
    from kvboost_rag.measure.calibrate import EvalQuestion

    return [
        EvalQuestion(f"What is number {i}?", DOCUMENTS[i % 4 :] + DOCUMENTS[: i % 4], ("a store",))
        for i in range(count)
    ]


def one_hot_embedder(texts):
    """Every text is nearest to the one behind it."""
    import numpy as np

    return np.eye(len(texts), dtype=np.float32) + np.roll(np.eye(len(texts), dtype=np.float32), 1, axis=1) / 2


# --- scores


def test_kl_is_that_of_torch_and_zero_for_equal_logits():
    from kvboost_rag.observe.divergence import kl_per_token

    a, b = torch.randn(5, 33), torch.randn(5, 33)
    expected = torch.nn.functional.kl_div(
        b.double().log_softmax(-1), a.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert torch.allclose(kl_per_token(a, b), expected, atol=1e-9)
    assert kl_per_token(a, a).abs().max() < 1e-12
    # A shift of all logits is the same distribution; a certain answer moved elsewhere costs what it was surer by.
    assert kl_per_token(a, a + 3.5).max() < 1e-9


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "counts"),
    [
        ("The Stanley Hall.", ["stanley hall"], 1.0, True),
        ("It was G. Stanley Hall, I think", ["Stanley Hall"], 2 * 2 / (7 + 2), True),
        ("Stan", ["Stanley"], 0.0, False),
        ("", ["x"], 0.0, False),
        ("cat dog", ["dog bird", "cat dog fish"], 2 * 2 / 5, False),
    ],
)
def test_answer_scores(answer: str, gold: list[str], f1: float, counts: bool):
    from kvboost_rag.measure.calibrate import scores

    assert scores.f1(answer, gold) == pytest.approx(f1)
    assert scores.answers(answer, gold) is counts


def test_bootstrap_interval_is_repeatable_and_narrows_with_more_values():
    from kvboost_rag.measure.calibrate.scores import bootstrap

    few, many = [0.0, 1.0] * 5, [0.0, 1.0] * 200
    assert bootstrap(few) == bootstrap(few)
    low, high = bootstrap(few)
    assert 0 < low < 0.5 < high < 1
    narrow = bootstrap(many)
    assert narrow[1] - narrow[0] < (high - low) / 3
    assert bootstrap([2.0, 2.0]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


# --- questions


def test_question_files_of_both_kinds(tmp_path: Path):
    from kvboost_rag.measure.calibrate import read_questions

    records = [
        {"question": "who?", "docs": ["a", "b"], "answers": ["x"], "support": [1]},
        {"question": "why?", "documents": ["c"]},
    ]
    (tmp_path / "list.json").write_text(json.dumps(records))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    first, second = read_questions(tmp_path / "list.json")
    assert (first.documents, first.answers, first.support) == (("a", "b"), ("x",), (1,))
    assert second.answers == ()
    assert read_questions(tmp_path / "lines.jsonl") == [first, second]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "neither a JSON list nor JSON lines"),
        ("[]", "holds no questions"),
        ('[{"docs": ["a"]}]', "record 0: question"),
        ('[{"question": "q", "docs": ["a"]}, {"question": "q", "docs": ["a", " "]}]', "record 1: docs"),
        ("[3]", "record 0: expected an object"),
        ("é", "q.json is not UTF-8"),
    ],
)
def test_question_files_that_cannot_be_used(tmp_path: Path, text: str, message: str):
    from kvboost_rag.measure.calibrate import read_questions

    path = tmp_path / "q.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_questions(path)


def test_builtin_questions_hold_their_answers():
    from kvboost_rag.measure.calibrate import builtin_questions

    made = builtin_questions(lambda text: len(text) // 4, num_questions=12)
    assert made == builtin_questions(lambda text: len(text) // 4, num_questions=12)
    assert len({q.question for q in made}) > 8
    for question in made:
        assert len(set(question.documents)) == 8
        what = question.question.partition(": ")[2].rstrip("?")
        holding = [i for i, d in enumerate(question.documents) if f"{question.answers[0]}(" in d and what in d]
        assert holding == list(question.support)


# --- the choice


def test_fastest_within_the_tolerance_is_chosen():
    from kvboost_rag.measure.calibrate.run import _choose

    a, b, c = Setting("none", 0.0), Setting("query", 0.05), Setting("query", 0.2)
    rows = [measured(a, 0.2, 9.0), measured(b, 0.04, 5.0), measured(c, 0.01, 3.0)]
    assert _choose(rows, 0.05).setting == b
    assert _choose(rows, 0.02).setting == c
    assert _choose(rows, 0.5).setting == a
    assert _choose(rows, 0.001) is None
    close = [measured(b, 0.04, 5.0), measured(c, 0.01, 4.95)]
    assert _choose(close, 0.05).setting == c


def test_a_base_model_without_chat_template_completes_a_text(tiny_model):
    import copy
    from dataclasses import replace

    from kvboost_rag.measure.calibrate import CalibrationPlan, calibrate, prompt_of

    loaded = tiny_model()
    bare = copy.deepcopy(loaded.tokenizer)
    bare.chat_template = None
    asked = questions(2)
    prompt = prompt_of(bare, asked[0].messages())
    assert isinstance(prompt, str)
    assert all(document in prompt for document in asked[0].documents)
    assert prompt_of(loaded.tokenizer, asked[0].messages()) == asked[0].messages()
    plan = CalibrationPlan(asked, "test", [Setting("none", 0.0), Setting("full", 1.0)], codecs=(), answer_tokens=3)
    found = calibrate(replace(loaded, tokenizer=bare), plan)
    assert [m.num_prompts for m in found.measured] == [2, 2]


def test_calibrating_a_tiny_model(tiny_model):
    from kvboost_rag.measure.calibrate import CalibrationPlan, calibrate

    settings = [
        Setting("none", 0.0),
        Setting("query", 0.3),
        Setting("query", 0.3, "deviation", neighbours=2),
        Setting("full", 1.0),
    ]
    plan = CalibrationPlan(questions(), "test", settings, codecs=(), max_kl=1e-6, answer_tokens=5)
    steps = []
    found = calibrate(tiny_model(), plan, one_hot_embedder, steps.append)
    by_setting = {m.setting: m for m in found.measured}
    assert set(by_setting) == set(settings)
    assert all(m.num_prompts == 4 for m in found.measured)
    full = by_setting[Setting("full", 1.0)]
    assert full.kl_upper < 1e-6
    assert full.identical == full.agreement == 1.0
    assert by_setting[Setting("none", 0.0)].kl_first > 1e-4
    # Only recomputing everything is within a millionth of a nat.
    assert found.chosen == Setting("full", 1.0)
    assert [s.step for s in steps] == [1, 2, 3, 4]


def test_quantised_variants_of_the_choice_are_measured(tiny_model):
    from kvboost_rag.measure.calibrate import CalibrationPlan, calibrate

    plan = CalibrationPlan(questions(3), "test", [Setting("query", 0.1)], codecs=("k8v8",), max_kl=1e9, answer_tokens=3)
    found = calibrate(tiny_model(), plan)
    assert [m.setting.quantization for m in found.measured] == ["none", "k8v8"]
    assert found.passed


def test_a_time_limit_keeps_three_prompts_for_every_setting(tiny_model):
    from kvboost_rag.measure.calibrate import CalibrationPlan, calibrate

    plan = CalibrationPlan(
        questions(6), "test", [Setting("none", 0.0), Setting("query", 0.1)], codecs=(), answer_tokens=2, budget_s=0.0
    )
    assert [m.num_prompts for m in calibrate(tiny_model(), plan).measured] == [3, 3]


def test_wrong_rotation_trips_the_gate(tiny_model, monkeypatch):
    """Keys realigned with another base than the model's: what the probe cannot see once an engine runs."""
    from kvboost_rag.kv.rope import RotarySource
    from kvboost_rag.measure.calibrate import CalibrationPlan, calibrate

    loaded = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    plan = CalibrationPlan(
        questions(), "test", [Setting("none", 0.0), Setting("query", 0.1)], codecs=(), max_kl=0.05, answer_tokens=4
    )
    right = calibrate(loaded, replace(plan, max_kl=10.0))
    tolerance = 1.5 * max(m.kl_upper for m in right.measured)
    assert calibrate(loaded, replace(plan, max_kl=tolerance)).passed

    right_tables = RotarySource.tables

    def of_another_base(self, positions):
        cos, sin = right_tables(self, positions)
        steps = torch.linspace(0.0, 1.0, cos.shape[-1], device=cos.device)
        angle = torch.atan2(sin, cos) + positions.reshape(-1, 1).float() * steps
        return angle.cos().to(cos.dtype), angle.sin().to(sin.dtype)

    monkeypatch.setattr(RotarySource, "tables", of_another_base)
    failed = calibrate(loaded, replace(plan, max_kl=tolerance))
    assert not failed.passed
    assert failed.defaults.reuse == "exact"


# --- profiles and engines


def test_profile_survives_the_file(tmp_path: Path):
    chosen = Setting("query", 0.1, "deviation", 4, "k8v8")
    written = replace(profile(chosen), measured=(measured(chosen, 0.01, 4.0),))
    save_profile(written, tmp_path)
    assert load_profile(written.fingerprint, tmp_path) == written
    assert load_profile("0" * 64, tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == [profile_path(written.fingerprint, folder=tmp_path).name]


def test_a_shipped_profile_counts_where_the_user_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shipped, own = profile(Setting("query", 0.1)), profile(Setting("none", 0.0))
    monkeypatch.setattr("kvboost_rag.models.profile.SHIPPED", tmp_path / "shipped")
    save_profile(shipped, tmp_path / "shipped")
    assert load_profile(shipped.fingerprint, tmp_path / "own") == shipped
    save_profile(own, tmp_path / "own")
    assert load_profile(shipped.fingerprint, tmp_path / "own") == own


def test_a_shipped_profile_holds_for_the_series_and_one_of_the_users_for_its_version(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("kvboost_rag.models.profile.SHIPPED", tmp_path / "shipped")
    series = version("transformers").partition(".")[0]
    later, other = (replace(profile(Setting()), transformers=f"{number}.99.0") for number in (series, int(series) + 1))
    save_profile(other, tmp_path / "shipped")
    assert load_profile(later.fingerprint, tmp_path / "own") is None
    save_profile(later, tmp_path / "own")
    assert load_profile(later.fingerprint, tmp_path / "own") is None
    save_profile(later, tmp_path / "shipped")
    assert load_profile(later.fingerprint, tmp_path / "own") == later


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 1}', '{"format": 99}', "null"])
def test_damaged_profiles_are_ignored_and_logged(tmp_path: Path, damage: str, caplog):
    path = save_profile(profile(Setting()), tmp_path)
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert load_profile("f" * 64, tmp_path) is None
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    "field", [{"repair": ""}, {"recompute_ratio": 7.0}, {"neighbours": -1}, {"quantization": "k1v1"}]
)
def test_profiles_with_impossible_settings_are_ignored(tmp_path: Path, field, caplog):
    save_profile(profile(replace(Setting(), **field)), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_profile("f" * 64, tmp_path) is None
    assert "ignored" in caplog.text


def test_a_profile_with_a_strategy_that_there_is_not_is_ignored_by_the_engine(tiny_model, caplog):
    from kvboost_rag import KVBoost

    with caplog.at_level(logging.WARNING), KVBoost(tiny_model(), profile=profile(Setting("magic"))) as engine:
        assert engine.profile is None
        assert ask(engine).repair.strategy == "query"
    assert "ignored: repair='magic' is not available" in caplog.text


def test_a_profile_under_another_models_name_is_ignored(tmp_path: Path, caplog):
    other = "e" * 64
    save_profile(profile(Setting()), tmp_path).rename(profile_path(other, folder=tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_profile(other, tmp_path) is None
    assert "another model" in caplog.text


def test_a_profile_holds_for_one_version_of_transformers(tmp_path: Path):
    old = replace(profile(Setting()), transformers="4.0.0")
    save_profile(old, tmp_path)
    assert load_profile(old.fingerprint, tmp_path) is None


def test_precedence_of_profile_environment_and_arguments():
    found = CalibratedDefaults(repair="cacheblend", recompute_ratio=0.2, repair_options={"probe_layer": 2})
    plain, env = ReuseConfig(), {"KVBOOST_RECOMPUTE_STRATEGY": "selective"}
    own = plain.resolve({}, found)
    assert (own.repair, own.recompute_ratio, own.repair_options) == ("cacheblend", 0.2, {"probe_layer": 2})
    by_env = plain.resolve(env, found)
    assert (by_env.repair, by_env.recompute_ratio, by_env.repair_options) == ("selective", 0.05, {})
    by_config = ReuseConfig(repair="none").resolve(env, found)
    assert (by_config.repair, by_config.repair_options) == ("none", {})
    by_call = ReuseConfig(repair="none").override(repair="full").resolve(env, found)
    assert by_call.repair == "full"
    # A ratio alone keeps the profile's strategy; a cap of the user's holds for the profile too.
    assert plain.override(recompute_ratio=0.4).resolve({}, found).repair == "cacheblend"
    assert plain.override(max_recompute_ratio=0.1).resolve({}, found).recompute_ratio == 0.1
    failed = CalibratedDefaults(reuse="exact")
    assert plain.resolve({}, failed).reuse == "exact"
    assert ReuseConfig(reuse="blend").resolve({}, failed).reuse == "blend"
    assert plain.resolve({"KVBOOST_DISABLE": "1"}, failed).reuse == "off"
    with pytest.raises(ConfigError):
        CalibratedDefaults(repair=7)


def test_precedence_at_index_time():
    found = CalibratedDefaults(neighbours=2, quantization="k8v4")
    own = EncodingConfig().resolve({}, found)
    assert (own.neighbours, own.quantization) == (2, "k8v4")
    by_env = EncodingConfig().resolve({"KVBOOST_NEIGHBOURS": "1"}, found)
    assert (by_env.neighbours, by_env.quantization) == (1, "k8v4")
    by_argument = EncodingConfig(neighbours=0, quantization="none").resolve({"KVBOOST_NEIGHBOURS": "1"}, found)
    assert (by_argument.neighbours, by_argument.quantization) == (0, "none")
    by_default = EncodingConfig().resolve({})
    assert (by_default.neighbours, by_default.quantization) == (4, "none")
    with pytest.raises(ConfigError, match="KVBOOST_NEIGHBOURS"):
        EncodingConfig().resolve({"KVBOOST_NEIGHBOURS": "some"})


@pytest.fixture
def profiles_in(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("kvboost_rag.models.profile._said", set())  # once a process, and others may have been first
    return tmp_path


def ask(engine, **options):
    from kvboost_rag import GenerationParams

    return engine.generate(
        questions(1)[0].messages(), documents=DOCUMENTS, params=GenerationParams(max_new_tokens=3), **options
    )


def test_engine_uses_the_saved_profile(tiny_model, profiles_in: Path, caplog):
    from kvboost_rag import KVBoost

    loaded = tiny_model(num_hidden_layers=3)
    with KVBoost(loaded) as engine:
        fingerprint = engine.registry.fingerprint
        with caplog.at_level(logging.WARNING):
            assert ask(engine).repair.strategy == "query"
            ask(engine)
    assert caplog.text.count("never calibrated") == 1
    save_profile(profile(Setting("cacheblend", 0.25), fingerprint))
    with KVBoost(loaded) as engine:
        served = ask(engine)
        assert served.repair.strategy == "cacheblend"
        assert served.repair.recompute_ratio == pytest.approx(0.25, abs=0.05)
        assert ask(engine, repair="none").repair.strategy == "none"
    with KVBoost(loaded, profile=None) as engine:
        assert ask(engine).repair.strategy == "query"


def test_engine_encodes_as_the_saved_profile_says(tiny_model, profiles_in: Path, monkeypatch):
    from kvboost_rag import KVBoost

    monkeypatch.delenv("KVBOOST_NEIGHBOURS")
    loaded = tiny_model(num_hidden_layers=3)
    with KVBoost(loaded, profile=None) as engine:
        fingerprint = engine.registry.fingerprint
    save_profile(profile(Setting("none", 0.0, neighbours=1, quantization="k8v8"), fingerprint))
    with KVBoost(loaded, encoding=EncodingConfig(embedder=one_hot_embedder)) as engine:
        keys = engine.warm(DOCUMENTS).content_hashes
        records = [engine.store.catalog.get(key) for key in keys]
        assert [len(record.neighbours) for record in records] == [1] * len(keys)
        assert {engine.fetcher.load(record).payload.meta["codec"] for record in records} == {"k8v8"}


def test_a_model_that_failed_the_gate_is_served_exactly(tiny_model, profiles_in: Path, caplog):
    from kvboost_rag import KVBoost

    loaded = tiny_model(num_hidden_layers=2)
    with KVBoost(loaded, profile=None) as engine:
        fingerprint = engine.registry.fingerprint
    save_profile(profile(None, fingerprint))
    with KVBoost(loaded) as engine, caplog.at_level(logging.WARNING):
        first, second = ask(engine), ask(engine)
        assert (first.reuse, second.reuse) == ("exact", "exact")
        assert second.usage.cached_tokens > 0
        assert second.token_ids == ask(engine, reuse="off").token_ids
        assert ask(engine, reuse="blend").reuse == "blend"
    assert caplog.text.count("failed calibration") == 1
    assert math.isclose(profile(None).max_kl, 0.05)


def test_settings_say_what_they_are():
    assert Setting("query", 0.05, "deviation", 4, "k8v4").label == "query*deviation 5 %, 4 neighbours, k8v4"
    assert Setting("none", 0.0).label == "none, 0 neighbours"


def test_a_strategy_of_the_callers_own_runs_with_the_default_ratio(tiny_model):
    """Not with the profile's, which was measured with another strategy; and its name need not be known."""
    from typing import ClassVar

    from kvboost_rag import KVBoost
    from kvboost_rag.repair import QueryRepair

    class Own(QueryRepair):
        name: ClassVar[str] = "own"

    with KVBoost(tiny_model(), profile=profile(Setting("cacheblend", 0.25))) as engine:
        served = ask(engine, repair=Own())
    assert served.repair.strategy == "own"
    assert served.repair.recompute_ratio == pytest.approx(0.05, abs=0.02)
