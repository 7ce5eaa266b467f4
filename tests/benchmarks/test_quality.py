"""The quality suite: what the cases hold, and a run of every kind of arm on a tiny model."""

from __future__ import annotations

import ast
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

DOCUMENTS = [
    f"Title {i}\nThe keeper of lighthouse {i} is called Number{i}. It stands on a cliff by the sea." for i in range(8)
]


def count_tokens(text: str) -> int:
    return len(text) // 4


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "hotpotqa_60.json"
    records = [
        {
            "question": f"Who keeps lighthouse {i}?",
            "answers": [f"Number{i}"],
            "docs": DOCUMENTS[i:] + DOCUMENTS[:i],
            "support": [0, 3],
        }
        for i in range(6)
    ]
    path.write_text(json.dumps(records))
    return path


def prompt_of(case) -> str:
    return "\n".join(m["content"] for m in case.messages())


def test_every_document_stands_in_its_prompt(questions: Path):
    from kvbench.cases import bugs, conversations, edited, from_file, needles, rechunked

    cases = [
        *from_file(questions, 3),
        *needles(count_tokens, 6),
        *bugs(count_tokens, 3),
        *conversations(questions, 2),
        rechunked(from_file(questions, 1)[0], lambda text: 4 * len(text), 64),
        edited(from_file(questions, 1)[0])[0],
    ]
    for case in cases:
        assert case.documents
        for document in case.documents:
            assert document in prompt_of(case)
    assert len({c.name for c in cases[:14]}) == 14


def test_needles_lie_where_they_are_said_to_and_nowhere_else():
    from kvbench.cases import NEEDLE_DEPTHS, NEEDLE_LENGTHS, needles

    cases = needles(count_tokens, len(NEEDLE_DEPTHS) * len(NEEDLE_LENGTHS))
    assert {(dict(c.traits)["documents"], dict(c.traits)["depth"]) for c in cases} == {
        (n, d) for n in NEEDLE_LENGTHS for d in NEEDLE_DEPTHS
    }
    for case in cases:
        traits = dict(case.traits)
        holding = [i for i, d in enumerate(case.documents) if f"is {case.answers[0]}." in d]
        assert holding == [min(traits["documents"] - 1, int(traits["depth"] * traits["documents"]))]
        assert len(case.documents) == traits["documents"]


def test_the_defect_is_in_the_named_file_alone():
    from kvbench.bugs import make_bugs

    made = make_bugs(count_tokens, 12, 4, seed=3)
    assert made == make_bugs(count_tokens, 12, 4, seed=3)
    assert {bug.place for bug in made} == {0, 1, 2, 3}
    for bug in made:
        wrong = bug.traceback.split("'")[-2]
        line = bug.traceback.splitlines()[1].strip()
        holding = [i for i, source in enumerate(bug.sources) if wrong in {n.id for n in names(source)}]
        assert holding == [bug.place]
        assert line in bug.sources[bug.place]
        assert len(set(bug.sources)) == 4


def names(source: str) -> list[ast.Name]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]


def test_a_misspelt_name_is_undefined_when_run():
    from kvbench.bugs import misspell

    lines = ["def total(values):", "    result = 0", "    for value in values:", "        result = result + value"]
    source = "\n".join([*lines, "    return result"])
    found = [misspell(source, random.Random(seed)) for seed in range(8)]
    for broken in filter(None, found):
        namespace: dict = {}
        exec(broken[0], namespace)
        with pytest.raises(NameError, match=f"'{broken[2]}'"):
            namespace["total"]([1, 2])
    assert any(found)
    assert misspell("def f(a):\n    return 1", random.Random(0)) is None


def test_a_misspelling_that_is_another_name_is_no_defect():
    from kvbench.bugs import misspell

    source = "def f(items):\n    tab = 1\n    tba = 2\n    return tab + tba"
    assert all(misspell(source, random.Random(seed)) is None for seed in range(8))


def test_conversations_keep_earlier_documents_and_answers(questions: Path):
    from kvbench.cases import conversations

    first, second = conversations(questions, 5)
    roles = [m["role"] for m in first.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert first.messages()[2]["content"] == "Number0"
    assert (first.answers, second.answers) == (("Number2",), ("Number5",))


@pytest.mark.parametrize("order", ["reversed", "shuffled-1", "shuffled-2"])
def test_other_orders_have_the_same_documents_and_question(questions: Path, order: str):
    from kvbench.cases import bugs, conversations, from_file, reordered

    for case in (*from_file(questions, 2), *bugs(count_tokens, 1)):
        other = reordered(case, order)
        assert sorted(other.documents) == sorted(case.documents)
        assert other == reordered(case, order)
        assert (other.dataset, other.name) == (f"{case.dataset}, {order}", f"{case.name}-{order}")
        assert "\n\n".join(other.documents) in prompt_of(other)
        assert len(prompt_of(other)) == len(prompt_of(case))
        assert prompt_of(other)[-60:] == prompt_of(case)[-60:]
    reversed_one, shuffled = (reordered(from_file(questions, 1)[0], o).documents for o in ("reversed", order))
    assert (reversed_one == shuffled) == (order == "reversed")
    with pytest.raises(ValueError, match="turns-0"):
        reordered(conversations(questions, 1)[0], order)


def test_edits_change_one_word_of_each_document(questions: Path):
    from kvbench.cases import edited, from_file

    case = from_file(questions, 1)[0]
    after, before = edited(case)
    assert tuple(before) == case.documents
    for old, new in zip(before, after.documents, strict=True):
        assert sum(a != b for a, b in zip(old.split(" "), new.split(" "), strict=True)) == 1
        assert old not in prompt_of(after)


def test_random_rows_keep_to_the_ratio(tiny_model):
    from kvbench.controls import RandomRepair

    from kvboost_rag import GenerationParams, KVBoost

    with KVBoost(tiny_model(), profile=None) as engine:
        results = [
            engine.generate(
                "\n\n".join([*DOCUMENTS, "who?"]),
                documents=DOCUMENTS,
                repair=RandomRepair(seed),
                recompute_ratio=0.2,
                params=GenerationParams(max_new_tokens=1),
            )
            for seed in (0, 0, 1)
        ]
    assert results[0].repair.recompute_ratio == pytest.approx(0.2, abs=0.01)
    assert results[0].repair.rows == results[1].repair.rows != results[2].repair.rows


def test_the_oracle_takes_what_differs_and_is_looked_at_and_leaves_the_buffer_as_it_was(tiny_model):
    """Alone in front, a document's KV is what full prefill gives: no row of it is worth recomputing."""
    from kvbench.controls import OracleRepair

    from kvboost_rag import GenerationParams, KVBoost
    from kvboost_rag.config import EncodingConfig

    chosen = []

    class Watching(OracleRepair):
        def plan(self, context):
            before = context.buffer.read(*context.documents[-1])
            made = super().plan(context)
            after = context.buffer.read(*context.documents[-1])
            assert all(map(torch.equal, before.keys + before.values, after.keys + after.values))
            chosen.append((made.row_plan.rows, context.documents, context.fresh_rows))
            return made

    with KVBoost(tiny_model("llama"), encoding=EncodingConfig(anchor=""), profile=None) as engine:
        prompt, params = "\n\n".join([*DOCUMENTS, "who?"]), GenerationParams(max_new_tokens=1)
        config = {"repair": Watching(), "recompute_ratio": 0.3, "strict": True}
        engine.generate(prompt, documents=DOCUMENTS, params=params, **config)
    ((rows, documents, fresh),) = chosen
    rows = rows[~torch.isin(rows, fresh)]
    assert len(rows) == round(0.3 * sum(end - start for start, end in documents))
    assert not ((rows > documents[0][0]) & (rows < documents[0][1])).any()


def test_every_arm_runs_and_a_run_can_be_continued(tiny_model, questions: Path, tmp_path: Path, monkeypatch, capsys):
    import quality
    from kvbench import runner
    from kvbench.arms import ABLATIONS, FIDELITY, MAIN

    loaded = tiny_model("llama", num_hidden_layers=4)
    rounded = tiny_model("llama", num_hidden_layers=4, dtype=torch.bfloat16)
    monkeypatch.setattr(runner, "load_model", lambda model, dtype: rounded if dtype == "bfloat16" else loaded)
    monkeypatch.setattr(quality, "load_embedder", lambda: letter_counts)
    out = tmp_path / "quality.jsonl"
    arms = ["main", "fidelity", *ABLATIONS]
    command = ["quality.py", "--out", out, "--files", questions, "--datasets", "hotpotqa", "--arms", *arms]
    monkeypatch.setattr(sys, "argv", [*map(str, command), "--cases", "1", "--answer-tokens", "3"])
    quality.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    expected = {arm.name for group in (MAIN, FIDELITY, *ABLATIONS.values()) for arm in group}
    assert {row["arm"] for row in rows} == expected
    assert len(rows) == len(expected)
    by_arm = {row["arm"]: row for row in rows}
    assert by_arm["none, 0 neighbours"]["recomputed_tokens"] == 0
    once, twice = (by_arm[f"none, 4 neighbours{more}"]["index_tokens"] for more in ("", ", 2 contexts"))
    assert 1.5 < once < twice
    assert by_arm["none, 0 neighbours"]["kl_first"] != by_arm["none, 4 neighbours"]["kl_first"]
    assert by_arm["none, 0 neighbours, anchor none"]["kl_first"] != by_arm["none, 0 neighbours"]["kl_first"]
    quality.main()
    assert len(out.read_text().splitlines()) == len(rows)
    monkeypatch.setattr(sys, "argv", ["quality.py", "--show", str(out)])
    quality.main()
    assert "cacheblend 15 %, 0 neighbours" in capsys.readouterr().out


def letter_counts(texts):
    return np.array([[text.count(c) for c in "0123456789abcdef"] for text in texts], dtype=np.float32)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--datasets", "musique"],
        ["--arms", "magic", "--datasets", "needle"],
        ["--orders", "odd", "--datasets", "needle"],
    ],
)
def test_wrong_arguments_are_said_before_anything_is_loaded(tmp_path: Path, arguments: list[str], monkeypatch):
    import quality
    from kvbench import runner

    monkeypatch.setattr(runner, "load_model", lambda model, dtype: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "argv", ["quality.py", "--out", str(tmp_path / "o"), *arguments])
    with pytest.raises(SystemExit, match=arguments[1]):
        quality.main()


def test_chunk_sizes_are_reused_as_such(model_folder, monkeypatch):
    """A document that is known whole must not stand in for its pieces."""
    from kvbench import runner as module
    from kvbench.arms import Arm
    from kvbench.cases import Case

    from kvboost_rag.repair import NoRepair

    document = " ".join(f"The store number {n} holds keys and values." for n in range(20))
    question = f"{document}\n\nWhat do they hold?"
    case = Case("made", "made-0", (document,), ("keys",), (("user", question),))
    compare, num_chunks = module.compare, []

    def counting(engine, *args, **options):
        num_chunks.append(len(engine.store.catalog))
        return compare(engine, *args, **options)

    monkeypatch.setattr(module, "compare", counting)
    arms = [Arm(NoRepair(), 0.0, chunk_tokens=size) for size in (None, 64, 128)]
    with module.Runner(model_folder, "float32", 3) as runner:
        assert len(list(runner.rows(case, arms))) == len(arms)
    assert num_chunks[0] == 1
    assert num_chunks[1] > num_chunks[2] > 1


def test_own_cases_need_no_file():
    from kvbench.own_cases import reference, short

    def letters(texts):
        return np.array([[text.count(c) + 0.1 for c in "aeioust"] for text in texts])

    cases = reference(lambda text: len(text) // 4, letters, 36)
    assert len({case.name for case in cases}) == 36
    assert {dict(case.traits)["split"] for case in cases} == {"fit", "test"}
    assert all(len(set(case.documents)) == 8 for case in cases)
    brief = short(30)
    assert len(brief) == 30
    for case in brief:
        assert 2 <= len(case.documents) <= 6
        assert any(answer.lower() in document.lower() for answer in case.answers for document in case.documents) or (
            case.answers[0] in ("no", "six", "forty", "ten", "four")
        )


def test_code_questions_are_answered_by_one_of_their_functions():
    from kvbench.code import code

    cases = code(40)
    assert len(cases) > 20  # a version of Python may lack some
    assert {dict(case.traits)["split"] for case in cases} == {"fit", "test"}
    for case in cases:
        name = case.messages()[1]["content"].split("the function ")[-1].split()[0].rstrip("?")
        (about,) = [text for text in case.documents if f"def {name}(" in text]
        assert case.answers[0] in about
        assert len(set(case.documents)) == 8
        assert all(document in prompt_of(case) for document in case.documents)


def test_code_questions_leave_out_what_this_python_answers_otherwise(monkeypatch: pytest.MonkeyPatch):
    from kvbench import code

    source = "def f(value):\n    # more\n    # lines\n    return value.strip()"
    assert code.answer_to("returns", code.Function("json/a.py", "f", source)) == "value.strip()"
    assert code.answer_to("where", code.Function("json/a.py", "f", source)) == "json/a.py"
    assert code.answer_to("returns", code.Function("json/a.py", "f", source + "\n    return 2")) is None
    assert code.answer_to("returns", code.Function("json/a.py", "f", source.replace(".strip()", ""))) is None
    everything = code._library()
    before = len(code.code(40))
    gone = next(iter(code.code(1))).documents[0]
    monkeypatch.setattr(code, "_library", lambda: {k: f for k, f in everything.items() if f.document != gone})
    assert len(code.code(40)) < before


def test_made_code_questions_are_the_same_for_a_seed():
    from kvbench.code import make_records

    records = make_records(count_tokens, 6, seed=5)
    assert records == make_records(count_tokens, 6, seed=5) != make_records(count_tokens, 6, seed=6)
    assert [r["kind"] for r in records] == ["returns", "where"] * 3
    assert [r["split"] for r in records] == ["fit"] * 3 + ["test"] * 3
    assert all(r["about"] in r["documents"] for r in records)
