"""Reading files and folders, and the corpus that every Python carries."""

from __future__ import annotations

import os

import pytest

from kvboost_rag.indexing import corpus
from kvboost_rag.indexing.corpus import CorpusError, pydoc_corpus, read_paths


def test_folders_give_their_text_files_once_and_in_order(tmp_path):
    (tmp_path / "b.md").write_text("b", encoding="utf-8")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / ".hidden").write_text("h")
    for name in (".git", "node_modules", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("c = 'ü'", encoding="utf-8")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    read = read_paths([tmp_path, tmp_path / "b.md", tmp_path / "sub"])
    assert [(os.path.relpath(t.source, tmp_path), t.text) for t in read.texts] == [
        ("a.txt", "with a mark"),
        ("b.md", "b"),
        ("sub/c.py", "c = 'ü'"),
    ]
    assert read.skipped == ()


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"\xff\xfe\x00", "not UTF-8"), (b"text\0text", "binary"), (b" \n", "empty"), (b"x" * 65, "larger than")],
)
def test_what_is_no_text_is_skipped_in_folders_and_refused_by_name(tmp_path, monkeypatch, content, fault):
    monkeypatch.setattr(corpus, "MAX_FILE_BYTES", 64)
    file = tmp_path / "file.bin"
    file.write_bytes(content)
    read = read_paths([tmp_path])
    assert not read.texts
    assert [path for path, _ in read.skipped] == [os.path.realpath(file)]
    assert fault in read.skipped[0][1]
    with pytest.raises(CorpusError, match=rf"file\.bin .*{fault}"):
        read_paths([file])


def test_a_name_that_is_not_utf8_is_skipped_or_refused(tmp_path):
    name = os.path.join(os.fsencode(tmp_path), b"\xff.txt")
    with open(name, "w") as file:
        file.write("text")
    assert ["not UTF-8: rename it" in fault for _, fault in read_paths([tmp_path]).skipped] == [True]
    with pytest.raises(CorpusError, match="rename it"):
        read_paths([os.fsdecode(name)])


def test_pipes_and_missing_paths(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in read_paths([tmp_path]).skipped[0][1]
    with pytest.raises(CorpusError, match="no such file or folder"):
        read_paths([tmp_path / "none"])


def test_pydoc_corpus_is_the_same_on_each_run_and_names_no_machine():
    first, second = pydoc_corpus(), pydoc_corpus()
    assert first == second
    assert len({text.source for text in first.texts}) == len(first.texts)
    for text in first.texts:
        assert text.text.startswith("NAME\n")
        assert "\b" not in text.text
        assert " at 0x" not in text.text
        assert "\nFILE\n" not in text.text
    whole = "".join(text.text for text in first.texts)
    assert 60_000 < len(whole) < 140_000
    assert "Push an item on the heap" in whole or "Push item on the heap" in whole
