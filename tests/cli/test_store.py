"""Commands that look after a store, and the options of those that open one, run in this process on a tiny model."""

from __future__ import annotations

import re
import socket
import urllib.request
from types import SimpleNamespace

import pytest

from kvboost_rag.cli import options
from kvboost_rag.config import ConfigError
from kvboost_rag.stores import DiskStore
from tests.cli.test_cli import Letters, summary

FILES = {
    "store.md": "# Store\n\n" + "The store holds keys and values of every document. " * 12,
    "rotate.py": "def rotate(keys, positions):\n    return keys * positions\n" * 9,
}


@pytest.fixture(autouse=True)
def small_embedder(monkeypatch):
    monkeypatch.setattr("kvboost_rag.indexing.retrieval.MiniLM", Letters)


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


@pytest.mark.parametrize("text", ["", "much", "-1", "4 apples", "1e9", "GB", "9" * 400, "8388609TiB"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"--disk-budget .*(such as 500MB|more than any machine)"):
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

    from kvboost_rag.cli import indexing
    from kvboost_rag.observe import metrics

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


COMMANDS = ("plan", "verify", "gc", "evict")


def test_help_has_examples(run):
    listed = run("--help")[1]
    for command in COMMANDS:
        assert command in listed
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"Example: kvboost-rag {command}" in out


@pytest.mark.usefixtures("warmed")
def test_verify_finds_gc_mends_warm_restores(run, warmed, disk):
    code, out, err = run("verify")
    assert code == 0, err
    assert re.search(r"sound +[1-9]\d* files", out)
    store = disk()
    bent, gone = list(store.keys())[:2]
    path = store.folder.path(bent)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    store.folder.remove(gone)
    code, out, _ = run("verify")
    assert code == 1
    assert re.search(rf"{bent[:16]} +│ corrupt", out)
    assert re.search(rf"{gone[:16]} +│ vanished", out)
    assert "2 problems" in out
    assert bent in store, "verify changes nothing"
    code, out, err = run("gc")
    assert code == 0, err
    assert "1 corrupt removed, 1 rows of vanished files dropped" in out
    assert run("verify")[0] == 0
    assert "nothing to mend" in run("gc")[1]
    assert warmed()["encoded"] == 2


def test_evict_a_source(run, warmed, documents, disk):
    before = len(disk())
    code, out, err = run("evict", "--source", documents / "rotate.py")
    assert code == 0, err
    forgotten = int(re.search(r"(\d+) chunks forgotten", out)[1])
    assert 0 < forgotten < before
    assert "rotate.py" not in run("inspect", "--sources")[1]
    assert len(disk().catalog) == before - forgotten
    code, _, err = run("evict", "--source", documents / "rotate.py")
    assert code == 1
    assert re.fullmatch(r"error: no source .*rotate.py': kvboost-rag inspect --sources lists them\n", err)
    assert warmed()["encoded"] >= forgotten


def test_evict_what_is_unused_and_everything(run, warmed, disk):
    held = len(disk())
    assert "KV of 0 entries removed" in run("evict", "--older-than", 1)[1]
    assert f"0 chunks forgotten, KV of {held} entries removed; 0 B on disk" in run("evict", "--older-than", 0)[1]
    assert len(disk().catalog) == held
    assert warmed()["encoded"] == held
    warmed("--namespace", "a")
    assert len(disk()) == 2 * held
    assert f"{held} chunks forgotten" in run("evict", "--all", "--namespace", "a")[1]
    assert len(disk()) == len(disk().catalog) == held
    code, out, err = run("evict", "--all")
    assert code == 0, err
    assert "0 B on disk" in out
    assert len(disk()) == len(disk().catalog) == 0
    assert disk().catalog.sources.all() == []


@pytest.mark.usefixtures("warmed")
def test_looking_at_a_store_evicts_nothing(run, disk, monkeypatch):
    """However small the file system is, or says that it is."""
    store = disk()
    held = set(store.keys())
    size = sum(store.bytes_held.values())
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=size // 2))
    for command in (("inspect",), ("verify",), ("gc",), ("evict", "--older-than", 1)):
        assert run(*command)[0] == 0
    assert {p.stem for p in store.folder.root.glob("chunks/*/*")} == held


@pytest.mark.parametrize(
    "arguments",
    [
        ("evict", "--older-than", "nan"),
        ("warm", ".", "--watch", "--interval", "nan"),
        ("warm", ".", "--watch", "--interval", "1e300"),
        ("calibrate", "bundled:smollm2", "--max-kl", "nan"),
        ("calibrate", "bundled:smollm2", "--budget", "inf"),
    ],
)
def test_numbers_that_no_command_can_work_with(run, arguments):
    code, _, err = run(*arguments)
    assert code == 2
    assert arguments[-2] in err


@pytest.mark.parametrize("codec", ["none", "k8v4"])
def test_plan(run, documents, model_folder, tmp_path, codec):
    code, out, err = run(
        "plan", documents, "--model", model_folder, "--chunk-tokens", 64, "--neighbours", 2, "--quantization", codec,
        "--memory-budget", "1GB", "--disk-budget", "40kB",
    )  # fmt: skip
    assert code == 0, err
    size = re.search(r"corpus +([\d,]+) tokens in (\d+) chunks of (\d+)", out)
    num_tokens, num_chunks, chunk_tokens = (int(n.replace(",", "")) for n in size.groups())
    assert chunk_tokens == round(num_tokens / num_chunks) <= 64
    per_token = re.search(r"\(([\d.]+) (k?B) a token\)", out)
    per_token = float(per_token[1]) * (1000 if per_token[2] == "kB" else 1)
    plain = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes of a float32
    assert plain < per_token < 1.6 * plain if codec == "none" else 100 < per_token < plain
    assert "fits into the memory budget of 1.0 GB" in out
    assert re.search(r"\d+% of it fits into the disk budget of 40.0 kB", out)
    context = int(re.search(r"([\d,]+) tokens of encoding context", out)[1].replace(",", ""))
    assert context > 2 * chunk_tokens
    assert re.search(r"a chunk +[\d.]+ (ms|s) to load from disk \([\d.]+ [kMG]?B/s\), [\d.]+ (ms|s) to encode", out)
    assert re.search(r"break-even at [\d.]+ [kMG]?B/s of load bandwidth: (loading|computing)", out)
    assert not list(tmp_path.rglob(".kvboost-plan-*"))
    assert not (tmp_path / "cache" / "stores").exists()


def test_plan_counts_what_is_kept_besides(run, documents, model_folder, monkeypatch):
    figures = []
    for value in ("0", "1"):
        monkeypatch.setenv("KVBOOST_LEADING", value)
        code, out, err = run("plan", documents, "--model", model_folder, "--chunk-tokens", 64, "--neighbours", 2)
        assert code == 0, err
        size, unit = re.search(r"\(([\d.]+) (k?B) a token\)", out).groups()
        context = re.search(r"([\d,]+) tokens of encoding context", out)[1].replace(",", "")
        figures.append((float(size) * (1000 if unit == "kB" else 1), int(context)))
    assert figures[1][0] > 1.1 * figures[0][0]
    assert figures[1][1] > figures[0][1]


def test_plan_without_files(run, model_folder):
    code, out, err = run("plan", "--tokens", "1000000", "--model", model_folder, "--chunk-tokens", 256)
    assert code == 0, err
    assert "1,000,000 tokens in 3,907 chunks of 256" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify",), "no store at .*kvboost-rag warm PATH"),
        (("gc",), "no store at"),
        (("evict", "--all"), "no store at"),
        (("evict",), "one of --source ID, --older-than DAYS, --all"),
        (("evict", "--all", "--older-than", 3), "one of --source"),
        (("evict", "--older-than", 3, "--namespace", "a"), "all namespaces"),
        (("plan",), "files and folders, or --tokens N"),
        (("plan", "nowhere"), "no such file or folder"),
        (("plan", "--tokens", 5, "--quantization", "k2"), "quantization='k2'"),
        (("plan", "--tokens", 5, "--disk-budget", "lots"), "--disk-budget 'lots'"),
        (("warm", ".", "--memory-budget", "lots"), "--memory-budget 'lots'"),
        (("ask", "what?", "--disk-budget", "lots"), "--disk-budget 'lots'"),
        (("demo", "--disk-budget", "lots"), "--disk-budget 'lots'"),
    ],
)
def test_errors_are_one_line(run, tmp_path, monkeypatch, arguments, said):
    (tmp_path / "note.txt").write_text("a note")
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 1
    assert re.search(said, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_metrics_port_that_is_taken_shows_before_a_model_is_loaded(run, documents):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("warm", documents, "--model", "missing/folder/x", "--metrics-port", port)
    assert code == 1
    assert re.match(rf"error: .*cannot serve metrics on 127.0.0.1:{port}", err)
