"""Conversations: every turn reuses what the turns before it left, whatever was settled, evicted or restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus_texts import document

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig, ReuseConfig
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.observe.divergence import kl_per_token
from kvboost_rag.observe.recorder import Recorder
from kvboost_rag.serving.history import Transcript
from kvboost_rag.serving.session import Session

MakeEngine = Callable[..., KVBoost]

DOCUMENTS = [document(n, 2) for n in range(4)]
BLOCK = 32
SMALL = EncodingConfig(block_tokens=BLOCK)
FOUR = GenerationParams(max_new_tokens=4)
FIRST = "\n\n".join([*DOCUMENTS, "Which store is full?"])
TURNS = [FIRST, "Why?", "And the index?", "\n\n".join([document(7, 2), "Is this one full as well?"]), "Thanks."]


def say(session: Session, text: str) -> Any:
    return session.generate(text, params=FOUR, strict=True)


def start(engine: KVBoost) -> Session:
    engine.warm([*DOCUMENTS, document(7, 2)])
    return engine.session([{"role": "system", "content": "Answer from the documents."}])


def logits(engine: KVBoost, session: Session, text: str, **options: Any) -> torch.Tensor:
    said = [*session.messages, {"role": "user", "content": text}]
    return engine.logits(said, (5, 6), strict=True, **({"settle": True} | options))


def hits(result: Any) -> list[HitKind]:
    return [s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT]


def test_later_turns_are_served_from_exact_kv(make_engine: MakeEngine) -> None:
    engine = make_engine(encoding=SMALL)
    session = start(engine)
    for number, text in enumerate(TURNS):
        engine.finish_background()
        before = len(session.messages) and engine.stats().settled_tokens
        full, ours = logits(engine, session, text, reuse="off"), logits(engine, session, text)
        result = say(session, text)
        usage = result.usage
        assert usage.input_tokens == usage.cached_tokens + usage.recomputed_tokens + usage.prefilled_tokens
        assert usage.cached_tokens == usage.exact_tokens + usage.approximate_tokens
        if number == 0:
            assert hits(result) == [HitKind.APPROXIMATE] * 4
            assert usage.probe_rows > 0
            continue
        assert before or number == 1
        assert HitKind.APPROXIMATE not in hits(result)[:4], "documents of earlier turns are exact"
        if text != TURNS[3]:
            assert float(kl_per_token(full, ours).max()) < 1e-6
            assert result.reuse == "exact"
        else:
            assert hits(result)[4] is HitKind.APPROXIMATE
            assert usage.exact_tokens > 0


def test_prefilled_is_the_new_message_and_a_block_at_most(make_engine: MakeEngine) -> None:
    engine = make_engine(encoding=SMALL)
    session = start(engine)
    done = 0
    for text in ["Which store is full? " * 9, "Why?", "And then? " * 6, "So?"]:
        result = say(session, text)
        assert result.usage.prefilled_tokens <= result.usage.input_tokens - done + 8, "the block's rest is kept too"
        engine.finish_background()
        done = result.usage.input_tokens + result.usage.output_tokens


def test_the_answer_does_not_depend_on_how_far_settling_got(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Settled, cut off, evicted, and by another engine on the same store: the same bits."""
    settled, cut, late = (make_engine(encoding=SMALL, store=folder) for folder in (tmp_path, None, None))
    seen: list[list[torch.Tensor]] = []
    for engine in (settled, cut, late):
        session, found = start(engine), []
        for text in TURNS:
            if engine is settled:
                engine.finish_background()
            elif engine is cut:
                engine.stop_settling()
            else:
                engine.finish_background()
                for key in list(engine.store.keys()):
                    engine.store.delete(key)
            found.append(logits(engine, session, text))
            say(session, text)
        seen.append(found)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    said = [*session.messages[:-2]]
    settled.close()
    again = make_engine(encoding=SMALL, store=tmp_path)
    resumed = again.session(said)
    assert torch.equal(logits(again, resumed, TURNS[-1]), seen[0][-1])


def test_the_same_prompt_gives_the_same_answer_however_often(make_engine: MakeEngine) -> None:
    """Cold == warm for turns as well: a turn that was served and settled does not make itself exact."""
    engine = make_engine(encoding=SMALL)
    session = start(engine)
    for text in TURNS[:4]:
        first = logits(engine, session, text)
        before = list(session.messages)
        say(session, text)
        engine.finish_background()
        after, session.messages = session.messages, before
        assert torch.equal(logits(engine, session, text), first)
        session.messages = after


def test_a_history_that_was_served_elsewhere_keeps_its_documents_approximate(make_engine: MakeEngine) -> None:
    """Chains put other documents in front of the same history each time: those must not be prefilled."""
    engine = make_engine(encoding=SMALL)
    engine.warm(DOCUMENTS)
    history = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    for chosen in (DOCUMENTS[:2], DOCUMENTS[2:], DOCUMENTS[1:3]):
        system = {"role": "system", "content": "\n\n".join(["Answer from these.", *chosen])}
        messages = [system, *history, {"role": "user", "content": "Which store is full?"}]
        for _ in range(2):
            result = engine.generate(messages, params=FOUR, strict=True, settle=True)
            engine.finish_background()
            assert hits(result) == [HitKind.APPROXIMATE] * 2
        history += [messages[-1], {"role": "assistant", "content": result.text}]


def test_a_trimmed_history_falls_back_to_what_still_matches(make_engine: MakeEngine) -> None:
    engine = make_engine(encoding=SMALL)
    engine.warm(DOCUMENTS)
    system = {"role": "system", "content": "\n\n".join(["Answer from these.", *DOCUMENTS])}
    session = engine.session([system])
    for text in ("Hello?", "Which one?", "Why?"):
        say(session, text)
    engine.finish_background()
    session.messages = [system, *session.messages[-2:]]
    full = logits(engine, session, "Really?", reuse="off")
    assert float(kl_per_token(full, logits(engine, session, "Really?")).max()) < 1e-6
    result = say(session, "Really?")
    assert result.usage.exact_tokens >= sum(s.num_tokens for s in result.segments[:6]) - BLOCK


def test_one_shot_calls_settle_nothing_and_are_not_served_from_turns(make_engine: MakeEngine) -> None:
    engine = make_engine(encoding=SMALL)
    session = start(engine)
    said = [{"role": "user", "content": FIRST}]
    once = engine.logits(said, strict=True)
    engine.generate(said, params=FOUR)
    engine.finish_background()
    assert engine.stats().settled_tokens == 0
    say(session, FIRST)
    engine.finish_background()
    assert engine.stats().settled_tokens > 0
    assert torch.equal(engine.logits(said, strict=True), once)


def test_a_prompt_without_documents_is_served_exactly_and_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(encoding=SMALL)
    text = "An agent's instructions, which are long and always the same. " * 4
    cold = engine.logits(text + "Step one.", strict=True)
    first = engine.generate(text + "Step one.", params=FOUR, strict=True)
    second = engine.generate(text + "Step two.", params=FOUR, strict=True)
    assert (first.reuse, second.reuse) == ("exact", "exact")
    assert second.usage.prefilled_tokens <= second.usage.input_tokens - second.usage.exact_tokens
    assert second.usage.exact_tokens > 3 * BLOCK
    assert torch.equal(engine.logits(text + "Step one.", strict=True), cold)
    plain = engine.logits(text + "Step one.", reuse="off")
    torch.testing.assert_close(cold, plain, atol=5e-5, rtol=1e-4)


def test_a_request_waits_for_one_block_of_settling_at_the_most(make_engine: MakeEngine) -> None:
    seen: list[tuple[int, Future[int]]] = []

    class Busy(Recorder):
        """Somebody asks while the first block is settled."""

        def record_settled(self, num_tokens: int) -> None:
            if not seen:
                stats = lambda: engine.stats().settled_tokens  # noqa: E731
                seen.append((num_tokens, engine._parts.worker.submit(stats)))

    engine = make_engine(encoding=SMALL, metrics=Busy())
    say(start(engine), FIRST)
    engine.finish_background()
    first, asked = seen[0]
    assert asked.result() <= first + BLOCK < engine.stats().settled_tokens


def test_settling_can_be_stopped(make_engine: MakeEngine) -> None:
    engine = make_engine(encoding=SMALL)
    session, gate = start(engine), threading.Event()
    say(session, FIRST)
    engine._parts.worker.submit(lambda: gate.wait(20))
    stopped = engine.stop_settling()
    gate.set()
    engine.finish_background()
    assert engine.stats().settled_tokens <= stopped * BLOCK
    assert engine.stop_settling() == 0


def test_deleting_a_document_ends_the_settling_of_what_holds_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(encoding=SMALL, store=tmp_path)
    session = start(engine)
    gate = threading.Event()
    engine._parts.worker.submit(lambda: gate.wait(20))
    asked = threading.Thread(target=say, args=(session, FIRST))
    asked.start()
    gate.set()
    asked.join()
    engine.evict(DOCUMENTS[:1])
    engine.finish_background()
    held = [info for info in engine.store.entries() if info.key not in engine.store.catalog.hashes()]
    assert not held, "no exact block came back"


@pytest.mark.parametrize("own", [None, True, False])
def test_an_engine_says_whether_chats_settle(make_engine: MakeEngine, own: bool | None) -> None:
    from kvboost_rag.adapters.reuse_settings import settles

    engine = make_engine(config=ReuseConfig(settle=own))
    assert settles(engine, None) is (own is not False)
    assert settles(engine, False) is False
    assert settles(engine, True) is True


def test_a_session_keeps_what_was_said_when_the_answer_is_whole(make_engine: MakeEngine) -> None:
    session = start(make_engine())
    events = session.stream("Hello?", params=FOUR)
    next(events)
    events.close()
    assert len(session.messages) == 1
    result = say(session, "Hello?")
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
    assert session.messages[-1]["content"] == result.text


def test_a_conversation_of_plain_text(make_engine: MakeEngine) -> None:
    """Exact KV of what was said, the same bits settled or not; a prompt that was served does not make itself exact."""
    settled, cut = (make_engine(encoding=SMALL) for _ in range(2))
    turns = [f"{FIRST}\n", "\nWhy?\n", "\n\n".join(["", document(7, 2), "Is this one full as well?\n"])]
    seen: list[list[torch.Tensor]] = []
    for engine in (settled, cut):
        engine.warm([*DOCUMENTS, document(7, 2)])
        session, found = engine.session("Answer from the documents.\n\n"), []
        for number, text in enumerate(turns):
            prompt = Transcript(f"{session.text}{text}", said=len(session.text or ""))
            full = engine.logits(str(prompt), (5,), reuse="off")
            found.append(engine.logits(prompt, (5,), settle=True, strict=True))
            before = session.text
            for _ in range(2):
                session.text = before
                result = say(session, text)
                (engine.finish_background if engine is settled else engine.stop_settling)()
                assert torch.equal(engine.logits(prompt, (5,), settle=True, strict=True), found[-1])
            assert session.text == f"{prompt}{result.text}"
            assert hits(result)[4 * (number > 0) :] == [HitKind.APPROXIMATE] * (4, 0, 1)[number]
            if number == 1:
                assert float(kl_per_token(full, found[-1]).max()) < 1e-6
                assert result.usage.exact_tokens > len(engine.tokens.ids(FIRST))
        seen.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    with pytest.raises(TypeError, match="goes on with text"):
        session.generate({"role": "user", "content": "?"})


def test_settling_begins_while_the_answer_is_decoded(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same blocks as afterwards, at the pace that was asked for; a fault ends it and not the answer."""
    after = make_engine(encoding=SMALL)
    session = start(after)
    first = say(session, FIRST)
    after.finish_background()
    expected = logits(after, session, TURNS[1])
    prefixes = after._parts.variants.resting.server.pipeline.prefixes
    whole = prefixes.whole(first.usage.input_tokens - 2)
    for rows, settled in ((BLOCK, 4 * BLOCK), (1_000, whole), (0, 0)):
        engine = make_engine(encoding=SMALL, config=ReuseConfig(settle_rows=rows))
        monkeypatch.setattr(engine._parts.service.settler, "note", lambda *_: None)
        meanwhile = start(engine)
        assert say(meanwhile, FIRST).text == first.text
        assert engine.stats().settled_tokens == settled
        assert not say(engine.session(), "Hello?").usage.approximate_tokens
    engine = make_engine(encoding=SMALL, config=ReuseConfig(settle_rows=1_000))
    meanwhile = start(engine)
    assert say(meanwhile, FIRST).token_ids == first.token_ids
    engine.stop_settling()
    assert torch.equal(logits(engine, meanwhile, TURNS[1]), expected)

    def broken(*args: Any) -> None:
        raise OSError("no room")

    engine = make_engine(encoding=SMALL, config=ReuseConfig(settle_rows=1_000))
    meanwhile = start(engine)
    monkeypatch.setattr("kvboost_rag.serving.settling._Turn.step", broken)
    monkeypatch.setattr(engine._parts.service.settler, "note", lambda *_: None)
    assert say(meanwhile, FIRST).text == first.text
    assert engine.stats().settled_tokens == 0


@pytest.mark.model
def test_four_turns_on_the_real_model() -> None:
    """Documents in the first turn and one in the third; the whole in `benchmarks/conversations.py`."""
    texts = [document(n, 6) for n in range(5)]
    turns = ["\n\n".join([*texts[:4], "What is described here?"]), "Why is that so?"]
    turns += ["\n\n".join([texts[4], "And this?"]), "Thanks. Who would use it?"]
    params = GenerationParams(max_new_tokens=12)
    with KVBoost.from_pretrained("bundled:smollm2", dtype=torch.float32) as engine:
        engine.warm(texts, neighbours=None)
        chat = engine.session([{"role": "system", "content": "Answer from the documents."}])
        settled = 0
        for number, text in enumerate(turns):
            said = [*chat.messages, {"role": "user", "content": text}]
            full = engine.logits(said, reuse="off")
            kl = float(kl_per_token(full, engine.logits(said, settle=True, strict=True)).max())
            usage = chat.generate(text, params=params, strict=True).usage
            engine.finish_background()
            if number in (1, 3):
                assert kl < 1e-4
                assert usage.exact_tokens == usage.cached_tokens
            new = usage.input_tokens - settled
            assert number == 0 or usage.prefilled_tokens <= new + engine.encoding.block_tokens
            settled = usage.input_tokens + usage.output_tokens
