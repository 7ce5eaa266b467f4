"""Commands that look after a store, and the options of those that open one, run in this process on a tiny model."""

from __future__ import annotations

import re
import socket
import urllib.request

import pytest

from kvboost_rag import cli
from kvboost_rag.cli import options
from kvboost_rag.config import ConfigError
from kvboost_rag.stores import DiskStore
from tests.test_cli import Letters, summary

FILES = {
    "store.md": "# Store\n\n" + "The store holds keys and values of every document. " * 12,
    "rotate.py": "def rotate(keys, positions):\n    return keys * positions\n" * 9,
}


@pytest.fixture(scope="module")
def model_folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_model("llama", num_hidden_layers=3, max_position_embeddings=4096)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run("verify", …)` gives (exit code, stdout, stderr); caches and stores lie in the test's folder."""
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("kvboost_rag.retrieval.MiniLM", Letters)

    def run_command(*arguments):
        monkeypatch.setattr("sys.argv", ["kvboost-rag", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return exit_info.value.code or 0, captured.out, captured.err

    return run_command


@pytest.fixture
def documents(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def warmed(run, documents, model_folder):
    """A store with both files; `warmed()` warms again and gives the numbers of the last line."""

    def warm(*more):
        arguments = ("warm", documents, "--model", model_folder, "--chunk-tokens", 64, "--neighbours", 1, *more)
        code, out, err = run(*arguments)
        assert code == 0, err
        return summary(out)

    warm()
    return warm


@pytest.fixture
def disk(tmp_path):
    """Opens the store's folder; what is in it can be changed behind the commands' back."""
    opened = []

    def open_folder():
        opened.append(DiskStore(tmp_path / "cache" / "stores" / "default"))
        return opened[-1]

    yield open_folder
    for store in opened:
        store.close()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("123", 123), ("4GB", 4 * 10**9), ("1.5 GiB", 3 << 29), ("500mb", 5 * 10**8), ("2TiB", 2 << 40)],
)
def test_sizes(text, num_bytes):
    choice = options.StoreChoice.of(None, text, text)
    assert (choice.memory_bytes, choice.disk_bytes) == (num_bytes, num_bytes)


@pytest.mark.parametrize("text", ["", "much", "-1", "4 apples", "1e9", "GB"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"--disk-budget .*such as 500MB"):
        options.StoreChoice.of(None, "1GB", text)


def test_budgets_hold(run, documents, model_folder, disk):
    arguments = ("warm", documents, "--model", model_folder, "--chunk-tokens", 64, "--neighbours", 0)
    code, out, err = run(*arguments, "--memory-budget", "1MB", "--disk-budget", "60kB")
    assert code == 0, err
    assert "1.0 MB of memory at most, 60.0 kB of disk at most" in out
    assert summary(out)["chunks"] > 2
    assert 0 < disk().bytes_held["disk"] <= 60_000


def test_metrics_are_served_while_a_job_runs(run, documents, model_folder, monkeypatch):
    from prometheus_client import CollectorRegistry

    from kvboost_rag import metrics
    from kvboost_rag.cli import indexing

    monkeypatch.setattr(metrics._prometheus(), "REGISTRY", CollectorRegistry())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, pages = f"http://127.0.0.1:{port}/metrics", []
    real = indexing.index_sources

    def index_and_scrape(*args, **kwargs):
        report = real(*args, **kwargs)
        with urllib.request.urlopen(address) as response:
            pages.append(response.read().decode())
        return report

    monkeypatch.setattr(indexing, "index_sources", index_and_scrape)
    code, out, err = run(
        "warm", documents, "--model", model_folder, "--chunk-tokens", 64, "--neighbours", 0, "--metrics-port", port
    )
    assert code == 0, err
    assert address in out
    held = re.search(r'kvboost_cache_bytes\{tier="disk"\} (\S+)', pages[0])
    assert held is not None
    assert float(held[1]) > 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address)
