"""Donors: found by MinHash, trusted only as far as tokens are identical."""

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.encode.similarity import DonorIndex, DonorPlan, DonorRules
from kvboost_rag.encode.token_diff import ReusedSpan, reusable_spans
from kvboost_rag.stores import Catalog

SETTLE = 8


def computed(plan):
    """Places in the wanted chunk that no span covers."""
    reused = {span.start + i for span in plan.spans for i in range(span.num_tokens)}
    return tuple(i for i in range(plan.num_tokens) if i not in reused)


def some_tokens(num, seed=0):
    source = random.Random(seed)
    return tuple(source.randrange(5, 30_000) for _ in range(num))


def checked_spans(donor, wanted, min_tokens=16, settle_tokens=None):
    """Spans that are, whichever alignment was taken, identical, long enough and in order."""
    spans = reusable_spans(donor, wanted, min_tokens, settle_tokens)
    at = donor_at = 0
    for span in spans:
        assert span.start >= at
        assert span.donor_start >= donor_at
        at, donor_at = span.start + span.num_tokens, span.donor_start + span.num_tokens
        assert tuple(donor[span.donor_start : donor_at]) == tuple(wanted[span.start : at])
        assert span.num_tokens >= min_tokens
    return spans


tokens = st.lists(st.integers(0, 3), max_size=60)


@settings(max_examples=300, deadline=None)
@given(tokens, tokens, tokens, tokens, st.sampled_from([None, 0, 3]))
def test_spans_are_identical_settled_and_in_order(before, inside, after, other, settle):
    donor, wanted = before + inside + after, before + other + after
    spans = checked_spans(donor, wanted, 4, settle)
    shared = next(
        (i for i, (a, b) in enumerate(zip(donor, wanted, strict=False)) if a != b), min(len(donor), len(wanted))
    )
    if shared >= 4:
        assert spans[0] == ReusedSpan(0, 0, shared)
    if settle is None:
        assert len(spans) == (shared >= 4)
    for span in spans[shared >= 4 :]:
        settled = range(span.start - settle, span.start)
        assert all(donor[span.donor_start - span.start + i] == wanted[i] for i in settled)


BASE = some_tokens(256)
CUT = 100
EDITS = {
    "one changed token": (*BASE[:CUT], 1, *BASE[CUT + 1 :]),
    "one inserted token": (*BASE[:CUT], 1, *BASE[CUT:]),
    "one deleted token": (*BASE[:CUT], *BASE[CUT + 1 :]),
    "a deleted sentence": (*BASE[:CUT], *BASE[CUT + 20 :]),
    "a moved paragraph": (*BASE[:CUT], *BASE[150:200], *BASE[CUT:150], *BASE[200:]),
    "another end": (*BASE[:CUT], *some_tokens(100, seed=2)),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_an_edit_is_recomputed_from_the_change_to_the_end(name):
    wanted = EDITS[name]
    plan = DonorPlan("k", len(wanted), reusable_spans(BASE, wanted))
    assert plan.spans == (ReusedSpan(0, 0, CUT),)
    assert computed(plan) == tuple(range(CUT, len(wanted)))
    assert plan.num_reused == CUT


@pytest.mark.parametrize("name", sorted(EDITS))
def test_with_a_settling_length_the_rest_is_reused_but_never_a_changed_token(name):
    wanted = EDITS[name]
    plan = DonorPlan("k", len(wanted), checked_spans(BASE, wanted, settle_tokens=SETTLE))
    assert set(range(CUT, CUT + SETTLE)) <= set(computed(plan))
    if name != "another end":
        assert len(computed(plan)) < 90


def test_an_insertion_at_the_start_leaves_nothing_by_default():
    wanted = (1, 2, 3, *BASE)
    assert reusable_spans(BASE, wanted) == ()
    assert reusable_spans(BASE, wanted, settle_tokens=SETTLE) == (ReusedSpan(11, 8, 248),)


def test_overlapping_windows_share_their_overlap():
    stream = some_tokens(400, seed=4)
    assert reusable_spans(stream[:256], stream[128:384], settle_tokens=SETTLE) == (ReusedSpan(8, 136, 120),)


def test_find_takes_the_donor_that_spares_most():
    index = DonorIndex()
    chunks = {
        "late": EDITS["one changed token"],
        "later": (*BASE[:200], 7, *BASE[201:]),
        "far": some_tokens(256, seed=9),
    }
    index.add(chunks)
    plan = index.find(BASE, chunks.get)
    assert plan == DonorPlan("later", 256, (ReusedSpan(0, 0, 200),))
    without = {key: ids for key, ids in chunks.items() if key != "later"}
    assert index.find(BASE, without.get).donor == "late"
    index.remove(["late", "later", "nobody"])
    assert index.find(BASE, chunks.get) is None
    assert "later" not in index
    assert len(index) == 1


def test_the_same_words_in_another_order_are_no_donor():
    words = random.Random(1)
    shuffled = list(BASE)
    words.shuffle(shuffled)
    index = DonorIndex(DonorRules(settle_tokens=0))
    index.add({"shuffled": shuffled})
    assert index.find(BASE, {"shuffled": tuple(shuffled)}.get) is None
    # Even where the search is made to offer it, the comparison finds nothing to reuse.
    assert reusable_spans(shuffled, BASE, settle_tokens=0) == ()


def test_chunks_below_a_span_take_no_part():
    index = DonorIndex()
    index.add({"short": BASE[:15], "empty": ()})
    assert len(index) == 0
    assert index.find(BASE[:15], {}.get) is None
    assert index.find((), {}.get) is None


def test_recall_by_similarity():
    """Close edits are found surely, unrelated texts never; that is all the threshold is for."""
    index = DonorIndex()
    originals = {f"k{i}": some_tokens(256, seed=i) for i in range(100)}
    index.add(originals)
    found = 0
    for i, ids in enumerate(originals.values()):
        at = random.Random(i).randrange(256)
        edited = (*ids[:at], 3, *ids[at + 1 :])
        found += f"k{i}" in index.candidates(edited)
        assert index.candidates(some_tokens(256, seed=1000 + i)) == []
    assert found == 100


def test_the_index_survives_a_restart_and_other_kinds_are_not_mixed_up(tmp_path):
    path = tmp_path / "arrays.sqlite3"

    def table(rules=DonorRules(), namespace=""):  # noqa: B008 - frozen
        return Catalog(path).arrays(rules.signature_kind, "model", namespace, np.uint32)

    index = DonorIndex(table=table())
    index.add({"base": BASE, "gone": some_tokens(99)})
    index.remove(["gone"])
    again = DonorIndex(table=table())
    assert len(again) == 1
    assert again.candidates(EDITS["one changed token"]) == ["base"]
    assert len(DonorIndex(table=table(namespace="other"))) == 0
    other = DonorRules(num_permutations=64)
    assert len(DonorIndex(other, table(other))) == 0


def test_signatures_do_not_depend_on_the_process():
    code = "from kvboost_rag.encode.similarity import DonorIndex as D;print(D().signature(range(100)).tobytes().hex())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == DonorIndex().signature(range(100)).tobytes().hex()


def test_arrays_of_many_keys(tmp_path):
    arrays = Catalog(tmp_path / "a.sqlite3").arrays("embedding/x", "model", "", np.float32)
    held = {f"k{i:04}": np.arange(i, i + 3, dtype=np.float32) for i in range(1203)}
    arrays.put(held)
    arrays.put({"k0007": np.zeros(3)})
    assert [key for key, _ in arrays.items()] == sorted(held)
    found = arrays.get([*held, "nobody"])
    assert set(found) == set(held)
    np.testing.assert_array_equal(found["k0007"], np.zeros(3))
    np.testing.assert_array_equal(found["k1202"], held["k1202"])
    arrays.delete(["k0000", "nobody"])
    assert len(list(arrays.items())) == 1202


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ImportError, match=r"kvboost-rag\[semantic\]"):
        DonorIndex()


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0}, {"threshold": 1.5}, {"num_permutations": 8}, {"settle_tokens": -1}, {"shingle_tokens": 0}],
)
def test_rules_that_cannot_be_used(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DonorRules(**wrong)
