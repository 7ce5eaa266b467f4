"""The command line, run in this process on a tiny model: what it does, twice, and what it says when it cannot."""

from __future__ import annotations

import re
from importlib import import_module

import numpy as np
import pytest

from kvboost_rag.cli.demo import demo_documents

COMMANDS = ("demo", "warm", "ask", "inspect", "probe")


class Letters:
    """An embedder that counts letters: similar words, similar vectors."""

    def embed(self, texts):
        return np.array([[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])


@pytest.fixture(autouse=True)
def small_embedder(monkeypatch):
    monkeypatch.setattr("kvboost_rag.indexing.retrieval.MiniLM", Letters)


@pytest.fixture
def documents(tmp_path):
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "store.md").write_text("# Store\n\nThe store holds keys and values of every document. " * 12)
    (folder / "deep" / "rotate.py").write_text("def rotate(keys, positions):\n    return keys * positions\n" * 9)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\xff")
    return folder


def summary(output):
    """The numbers of warm's last line."""
    found = re.search(r"(\d+) files, (\d+) chunks, .*: (\d+) encoded, (\d+) stored already, (\d+) dropped", output)
    assert found, output
    return dict(zip(("files", "chunks", "encoded", "stored", "dropped"), map(int, found.groups()), strict=True))


def warm_arguments(documents, model_folder, *more):
    return ("warm", documents, "--model", model_folder, "--chunk-tokens", 64, "--neighbours", 1, *more)


def test_help_and_version(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    for command in COMMANDS:
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"Example: kvboost-rag {command}" in out
    assert run("--version")[1].startswith("kvboost-rag 0.")


def test_without_arguments_it_says_what_to_do_first(run):
    code, out, _ = run()
    assert code == 0
    assert re.search(r"First: +kvboost-rag demo", out)
    assert len(out.splitlines()) < 12


def test_warm_twice_ask_and_inspect(run, documents, model_folder):
    code, out, err = run(*warm_arguments(documents, model_folder))
    assert code == 0, err
    first = summary(out)
    assert first["files"] == 2
    assert first["encoded"] == first["chunks"] > 2
    assert "picture.png" in out

    again = summary(run(*warm_arguments(documents, model_folder))[1])
    assert (again["encoded"], again["stored"]) == (0, first["chunks"])

    code, out, err = run("ask", "What does the store hold?", "--model", model_folder, "-k", 2, "--max-new-tokens", 4)
    assert code == 0, err
    assert re.search(r"prompt tokens: [1-9]\d* reused", out)
    assert "store.md" in out
    assert out.count("approximate") == 2

    code, out, err = run("inspect", "--sources")
    assert code == 0, err
    held = re.search(r"\(default\) +│ +[0-9a-f]{12} +│ +(\d+) +│ +(\d+)", out)
    assert held.groups() == (str(first["chunks"]), str(first["chunks"]))
    assert "store.md" in out


def test_warm_follows_what_happens_to_files(run, documents, model_folder):
    first = summary(run(*warm_arguments(documents, model_folder))[1])
    (documents / "store.md").write_text("Nothing is as it was. " * 5)
    changed = summary(run(*warm_arguments(documents, model_folder))[1])
    assert changed["dropped"] > 0
    assert changed["chunks"] < first["chunks"]
    (documents / "deep" / "rotate.py").unlink()
    gone = summary(run(*warm_arguments(documents, model_folder))[1])
    assert gone["dropped"] > 0
    out = run("ask", "rotate keys", "--model", model_folder, "--max-new-tokens", 2)[1]
    assert "rotate.py" not in out


def test_namespaces_see_their_own_chunks_only(run, documents, model_folder):
    assert run(*warm_arguments(documents, model_folder, "--namespace", "a"))[0] == 0
    code, _, err = run("ask", "store?", "--model", model_folder, "--namespace", "b")
    assert code == 1
    assert "nothing has been warmed" in err
    assert run("ask", "store?", "--model", model_folder, "--namespace", "a", "--max-new-tokens", 2)[0] == 0


def test_demo_starts_from_disk_the_second_time(run, model_folder, monkeypatch, tmp_path):
    few = demo_documents()[:4]
    monkeypatch.setattr(import_module("kvboost_rag.cli.demo"), "demo_documents", lambda: few)
    shown = tmp_path / "shown.html"
    arguments = ("demo", "--model", model_folder, "--neighbours", 1, "--passages", 3, "--max-new-tokens", 3)
    arguments += ("--page", shown)
    code, out, err = run(*arguments)
    assert code == 0, err
    assert re.search(r"[1-9]\d* encoded \(0 on disk already\)", out)
    rows = re.findall(r"^ +([123]) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+ s +[\d.]+ s", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for row in rows:
        prompt, reused, recomputed, prefilled = (int(cell.replace(",", "")) for cell in row[1:])
        assert prompt == reused + recomputed + prefilled
        assert reused > prompt // 2
    written = shown.read_text("utf-8")
    assert str(shown) in out.replace("\n", "")
    for row in rows:  # what the page colours is what the table counts
        assert f"{row[2]} reused" in written
    assert written.count("<svg") == 1
    assert not re.search(r"(src|href)=|url\(|@import", written)  # nothing is fetched to look at it
    assert few[0].text.split()[0] in re.sub("<[^>]*>", "", written)
    code, out, _ = run(*arguments)
    assert code == 0
    assert "all on disk from an earlier run" in out


def test_probe_says_what_it_found(run, model_folder, tiny_model, tmp_path):
    code, out, _ = run("probe", model_folder)
    assert code == 0
    assert "3 (0-2): 2 KV heads of 16, 16 dimensions rotated, half pairing" in out
    absolute = tiny_model("gpt2", n_embd=64, n_layer=2, n_head=4)
    absolute.model.save_pretrained(tmp_path / "gpt2")
    absolute.tokenizer.save_pretrained(tmp_path / "gpt2")
    code, out, _ = run("probe", tmp_path / "gpt2")
    assert code == 3
    assert "not reusable" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("warm", "nowhere"), "no such file or folder: .*nowhere"),
        (("warm", "."), "no text files"),
        (("warm", "blob", "--chunk-tokens", 64), "blob holds binary data|blob is not UTF-8"),
        (("warm", "note.txt", "--chunk-tokens", 100), "chunk_tokens=100"),
        (("warm", "note.txt", "--model", "missing/folder/x"), "no such folder"),
        (("warm", "note.txt", "--model", "bundled:x"), "known: gemma3"),
        (("ask", "what?"), "kvboost-rag warm PATH"),
        (("ask", " "), "question is empty"),
        (("ask", "what?", "--reuse", "sometimes"), "reuse='sometimes'"),
        (("ask", "what?", "--repair", "glue"), "repair='glue'"),
        (("inspect",), "no store at"),
        (("probe", "none.gguf"), "no such GGUF file"),
    ],
)
def test_errors_are_one_line(run, tmp_path, monkeypatch, arguments, said):
    folder = tmp_path / "work"
    folder.mkdir()
    if arguments[1:2] != (".",):
        (folder / "blob").write_bytes(b"\0\1")
        (folder / "note.txt").write_text("a note")
    monkeypatch.chdir(folder)
    code, _, err = run(*arguments)
    assert code == 1
    assert re.search(said, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_unexpected_errors_are_one_line_too(run, monkeypatch):
    def fail(*_):
        raise KeyError("lost")

    monkeypatch.setattr("kvboost_rag.indexing.corpus.read_paths", fail)
    code, _, err = run("warm", ".")
    assert code == 1
    assert re.fullmatch(r"error: KeyError: 'lost' \(KVBOOST_DEBUG=1 shows where\)\n", err)


def test_usage_errors_and_interrupts(run, monkeypatch):
    assert run("warm")[0] == 2
    assert run("nothing")[0] == 2

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvboost_rag.indexing.corpus.read_paths", interrupt)
    assert run("warm", ".")[0] in (1, 130)
