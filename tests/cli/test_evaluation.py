"""`kvboost-rag calibrate` and `profile`, run in this process."""

from __future__ import annotations

import json

DOCUMENTS = [
    "The store holds keys and values of every document that was encoded when the index was built.",
    "A question is answered from the documents in front of it; the first token comes soon.",
]


def test_profile_of_reordered_prompts(run, tmp_path):
    path = tmp_path / "log.jsonl"
    long = [" ".join(f"{letter}{i}" for i in range(200)) for letter in "abcd"]
    with path.open("w") as file:
        for i in range(6):
            documents = long[i % 4 :] + long[: i % 4]
            print(json.dumps({"prompt": "\n\n".join([*documents, f"why {i}?"])}), file=file)
    code, out, _ = run("profile", path)
    assert code == 0
    assert "6 prompts" in out
    assert "use document reuse" in out
    code, _, err = run("profile", tmp_path / "missing.jsonl")
    assert code == 1
    assert "missing.jsonl" in err
    assert len(err.strip().splitlines()) == 1


def test_calibrate_saves_what_the_engine_loads(run, tmp_path, tiny_model):
    from kvboost_rag import KVBoost

    loaded = tiny_model("llama", num_hidden_layers=5)
    folder = tmp_path / "model"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    data = tmp_path / "questions.json"
    data.write_text(json.dumps([{"question": f"number {i}?", "docs": DOCUMENTS} for i in range(3)]))
    code, out, err = run("calibrate", folder, "--data", data, "--quick", "--max-kl", "1000")
    assert (code, err) == (0, "")
    assert "chosen" in out
    assert len(list((tmp_path / "cache" / "profiles").iterdir())) == 1
    with KVBoost.from_pretrained(folder) as engine:
        assert engine.profile is not None
        assert engine.profile.passed
        assert engine.profile.data == str(data)
    code, out, _ = run("calibrate", folder, "--data", data, "--quick", "--max-kl", "1e-9")
    assert code == 3
    assert "only exact reuse" in out
    with KVBoost.from_pretrained(folder) as engine:
        assert not engine.profile.passed


def test_unusable_questions_are_one_line(run, tmp_path, tiny_model):
    folder = tmp_path / "model"
    loaded = tiny_model("llama", num_hidden_layers=2)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    data = tmp_path / "q.json"
    data.write_text('[{"question": "q"}]')
    code, _, err = run("calibrate", folder, "--data", data)
    assert code == 1
    assert "record 0: docs" in err


def test_a_model_without_a_profile_is_said_once_and_not_logged(run, tmp_path, tiny_model):
    import re

    from kvboost_rag.models import profile

    folder = tmp_path / "model"
    loaded = tiny_model("llama", num_hidden_layers=3, intermediate_size=96)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    page = tmp_path / "page.md"
    page.write_text("\n\n".join(DOCUMENTS))
    command = ("warm", page, "--model", folder, "--store", tmp_path / "store", "--neighbours", "0")
    profile._said.clear()
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    assert len(re.findall("never\\s+calibrated", out)) == 1
    assert not re.search("never\\s+calibrated", run(*command)[1])
