"""Settings: arguments beat environment beat defaults, and a bad value names itself."""

from __future__ import annotations

import pytest

from kvboost_rag.config import ConfigError, GenerationParams, ReuseConfig


def test_defaults() -> None:
    resolved = ReuseConfig().resolve({})
    assert (resolved.reuse, resolved.repair, resolved.recompute_ratio) == ("blend", "query", 0.05)
    assert resolved.max_recompute_ratio == 0.30


def test_arguments_beat_environment_beats_defaults() -> None:
    env = {"KVBOOST_RECOMPUTE_STRATEGY": "cacheblend", "KVBOOST_RECOMPUTE_TOPK": "7"}
    assert ReuseConfig().resolve(env).repair == "cacheblend"
    assert ReuseConfig().resolve(env).top_k == 7
    assert ReuseConfig(repair="none").resolve(env).repair == "none"
    assert ReuseConfig(top_k=3).resolve(env).top_k == 3
    # An argument for another rule of the same choice beats the environment's rule.
    assert ReuseConfig(recompute_ratio=0.2).resolve(env).top_k is None


def test_the_environment_is_read_at_each_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ReuseConfig()
    assert config.resolve().reuse == "blend"
    monkeypatch.setenv("KVBOOST_DISABLE", "1")
    assert config.resolve().reuse == "off"
    monkeypatch.setenv("KVBOOST_DISABLE", "0")
    assert config.resolve().reuse == "blend"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reuse": "sometimes"}, "reuse='sometimes'"),
        ({"repair": 7}, "repair=7"),
        ({"recompute_ratio": 1.5}, "recompute_ratio=1.5"),
        ({"recompute_ratio": -0.1}, "recompute_ratio=-0.1"),
        ({"recompute_ratio": float("nan")}, "recompute_ratio=nan"),
        ({"recompute_ratio": "a lot"}, "recompute_ratio='a lot'"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": True}, "top_k=True"),
        ({"tau_reuse": 0.5, "tau_recompute": 0.1}, "tau_recompute=0.1"),
        ({"top_k": 3, "deviation_threshold": 0.1}, "alternatives"),
        ({"recompute_ratio": 0.5, "max_recompute_ratio": 0.2}, "recompute_ratio=0.5"),
        ({"namespace": 7}, "namespace=7"),
        ({"namespace": "\udcff"}, "namespace="),
    ],
)
def test_bad_values_name_themselves(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        ReuseConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "env",
    [
        {"KVBOOST_DEVIATION_THRESHOLD": "high"},
        {"KVBOOST_DEVIATION_THRESHOLD": "-1"},
        {"KVBOOST_RECOMPUTE_TOPK": "1.5"},
        {"KVBOOST_RECOMPUTE_TOPK": "²"},
        {"KVBOOST_RECOMPUTE_TOPK": "9" * 5000},
        {"KVBOOST_DISABLE": "maybe"},
    ],
)
def test_bad_environment_variables_name_themselves(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(env))):
        ReuseConfig().resolve(env)


def test_unknown_overrides_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"recompute_ration.*recompute_ratio"):
        ReuseConfig().override(recompute_ration=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 2.0},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"seed": "today"},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": None},
        {"stop": b"END"},
        {"stop_token_ids": 2},
        {"stop_token_ids": ("</s>",)},
        {"extra": ["num_beams"]},
    ],
)
def test_bad_generation_parameters(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        GenerationParams(**fields)  # type: ignore[arg-type]


def test_one_stop_string_may_be_given_bare() -> None:
    assert GenerationParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_stop_settings_may_be_generators():
    params = GenerationParams(stop=(s for s in ("a", "b")), stop_token_ids=(i for i in (3, 4)))
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 4))
