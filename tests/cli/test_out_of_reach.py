"""What cannot be looked at now is not gone: its chunks are kept until it is back, or surely deleted."""

from __future__ import annotations

import errno
import os

import pytest

from kvboost_rag.cli.indexing import empty_sources, gone_of
from kvboost_rag.cli.watch import FolderWatch
from kvboost_rag.indexing.corpus import read_paths


@pytest.fixture
def share(tmp_path):
    """A folder of two files, `share/sub/b.txt` among them."""
    folder = tmp_path / "share"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "b.txt").write_text("b")
    return folder


@pytest.fixture
def refuse(monkeypatch, share):
    """`refuse(scandir=EACCES, stat=ESTALE)`: what the system says from now on about what lies in `share/sub`."""

    def refuse(**errors):
        for name, code in errors.items():
            monkeypatch.setattr(os, name, refusing(getattr(os, name), code))

    def refusing(real, code):
        def call(path=".", *args, **kwargs):
            below = isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(share / "sub"))
            if below and not (real.__name__ == "stat" and os.fspath(path) == str(share / "sub")):
                raise OSError(code, os.strerror(code), os.fspath(path))
            return real(path, *args, **kwargs)

        call.__name__ = real.__name__
        return call

    return refuse


@pytest.mark.parametrize(
    "errors", [{"scandir": errno.EACCES}, {"scandir": errno.EIO, "stat": errno.EIO}, {"stat": errno.ESTALE}]
)
def test_nothing_is_dropped_that_may_be_there(share, refuse, errors):
    known = [text.source for text in read_paths([share]).texts]
    watch = FolderWatch([share])
    refuse(**errors)
    corpus = read_paths([share])
    assert [os.path.basename(text.source) for text in corpus.texts] == ["a.txt"]
    assert any("cannot be read" in fault for _, fault in corpus.skipped)
    assert gone_of(known, [text.source for text in corpus.texts], empty_sources(corpus), [share]) == []
    assert [watch.poll() for _ in range(3)] == [None] * 3


def test_what_is_back_and_deleted_is_gone(share, refuse, monkeypatch, capsys):
    known = [text.source for text in read_paths([share]).texts]
    watch = FolderWatch([share])
    with monkeypatch.context():
        refuse(scandir=errno.EACCES)
        assert [watch.poll() for _ in range(3)] == [None] * 3
    assert capsys.readouterr().out.replace("\n", "").count("what was read from there is kept") == 1
    monkeypatch.undo()
    (share / "sub" / "b.txt").unlink()
    watch.poll()
    changes = watch.poll()
    assert changes is not None
    assert [os.path.basename(source) for source in changes.gone] == ["b.txt"]
    assert gone_of(known, [str(share / "a.txt")], [], [share]) == list(changes.gone)
