"""The dual hash: different things never share a key."""

from __future__ import annotations

import subprocess
import sys

from kvboost_rag.kv.keys import ROOT_HASH, content_hash, context_hash, hash_fields, prefix_hash


def test_fields_cannot_run_into_each_other() -> None:
    assert hash_fields("d", b"ab", b"c") != hash_fields("d", b"a", b"bc")
    assert hash_fields("d", b"a") != hash_fields("d", b"a", b"")
    assert hash_fields("da", b"") != hash_fields("d", b"a")
    # A namespace that spells part of a fingerprint, and the other way round.
    assert content_hash("model", "x", [1]) != content_hash("modelx", "", [1])


def test_domains_are_apart() -> None:
    ids = [1, 2, 3]
    assert len({content_hash("m", "", ids), prefix_hash("m", "", ROOT_HASH, ids), context_hash(ids)}) == 3


def test_the_prefix_hash_chains() -> None:
    one, other = (prefix_hash("m", "", ROOT_HASH, ids) for ids in ([1], [2]))
    assert prefix_hash("m", "", one, [5]) != prefix_hash("m", "", other, [5])
    assert content_hash("m", "", [5]) == content_hash("m", "", (5,))


def test_hashes_are_the_same_in_another_process() -> None:
    code = "from kvboost_rag.kv.keys import content_hash; print(content_hash('m', 'n', [1, 2 ** 40]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == content_hash("m", "n", [1, 2**40])
