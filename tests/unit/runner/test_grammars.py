"""Constraints in the runner: masks follow the tokens of each slot, whatever happens to the request."""

from __future__ import annotations

import json
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ferrule.assembly.vocabulary import open_backend, open_tokenizer, read_vocabulary
from ferrule.forms import Form, GrammarSpec, Json, Regex
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary
from ferrule.plugin import Plugins, discover
from ferrule.runner.grammars import Grammars
from ferrule.runner.outcome import Outcome
from ferrule.types import Admit, Chunk, CompiledGrammar, FinishReason, StepPlan, TokenSampling
from ferrule_testkit.harness import Harness
from ferrule_testkit.tokenizers import ByteTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [21, 22, 23], [31, 32, 33, 34, 35]]


@pytest.fixture(scope="module")
def harness(tiny_llama: Path) -> Iterator[Harness]:
    with Harness(tiny_llama, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def backend(harness: Harness) -> GrammarBackend:
    tokenizer = partial(open_tokenizer, harness.config, harness.plugins, Path(harness.config.model.tokenizer))
    return open_backend(harness.config, harness.plugins, tokenizer, harness.info.vocab_size, "guidance")


def compiled(backend: GrammarBackend, form: Form) -> CompiledGrammar:
    data = backend.compile(GrammarSpec(form=form, any_whitespace=False))
    return CompiledGrammar(backend="guidance", digest=data, data=data)


def text(backend: GrammarBackend, ids: Sequence[int]) -> str:
    return b"".join(backend.vocabulary.tokens[id] for id in ids).decode()


@pytest.mark.parametrize("depth", [1, 2])
def test_constrained_output_has_its_form_and_neighbours_keep_their_tokens(
    harness: Harness, backend: GrammarBackend, depth: int
) -> None:
    alone = harness.engine().run(PROMPTS, max_tokens=24)
    ends = {"max_tokens": 48, "stop_token_ids": backend.vocabulary.stop_ids}
    mixed = harness.engine(depth=depth).run(PROMPTS, grammars=[compiled(backend, Json(SCHEMA))], **ends)
    assert mixed[0].finish is FinishReason.STOP
    found = json.loads(text(backend, mixed[0].token_ids))
    assert set(found) == {"a", "b"}
    assert found["b"] in {"x", "y"}
    for output, before in zip(mixed[1:], alone[1:], strict=True):
        assert output.token_ids[:24] == before.token_ids


def test_preemption_and_chunks_change_nothing(harness: Harness, backend: GrammarBackend) -> None:
    constraint = compiled(backend, Regex("[a-z]{30}[0-9]{8}"))
    settings = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "stop_token_ids": backend.vocabulary.stop_ids}
    prompts = [[5, 6, 7, 8, 9, 10, 11, number] for number in range(5)]
    plenty = harness.engine().run(prompts, grammars=[constraint] * 5, **settings)
    tight = harness.engine(num_blocks=26, max_num_batched_tokens=6).run(prompts, grammars=[constraint] * 5, **settings)
    assert sum(output.num_preemptions for output in tight) > 0
    for output, before in zip(tight, plenty, strict=True):
        assert output.token_ids == before.token_ids
        assert re.fullmatch("[a-z]{30}[0-9]{8}", text(backend, output.token_ids))


def test_a_mask_that_the_other_parameters_empty_ends_that_request(harness: Harness, backend: GrammarBackend) -> None:
    stops = backend.vocabulary.stop_ids
    failed, other = harness.engine().run(
        PROMPTS[:2],
        grammars=[compiled(backend, Regex("ab")), compiled(backend, Regex("[a-z]+"))],
        max_tokens=12,
        min_tokens=10,
        stop_token_ids=stops,
    )
    assert failed.finish is FinishReason.ERROR
    assert "No token is allowed" in str(failed.error)
    assert failed.invalid
    assert other.finish in {FinishReason.STOP, FinishReason.LENGTH}


class Planted(Plugins):
    """All plugins that are installed, and `CountingBackend` as "counting"."""

    def load(self, kind: str, name: str) -> Any:
        return CountingBackend if name == "counting" else super().load(kind, name)

    def origin(self, kind: str, name: str) -> str:
        return "planted" if name == "counting" else super().origin(kind, name)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("script", ["slow", "complex"])
def test_an_engine_ends_a_request_whose_constraint_is_too_much_and_the_others_of_its_step_go_on(
    tiny_llama: Path, backend: GrammarBackend, depth: int, script: str
) -> None:
    """Blame the client, whom the API answers 400, and count that the server is not corrupted."""
    found = discover()
    constraints = [grammar_of(script), None, compiled(backend, Json(SCHEMA)), grammar_of(script)]
    prompts = [*PROMPTS, [41, 42, 43, 44]]
    ends = {"max_tokens": 24, "stop_token_ids": backend.vocabulary.stop_ids}
    STOPPED.clear()
    with Harness(tiny_llama, dtype="float32", plugins=Planted(refs=found.refs, selection=found.selection)) as harness:
        alone = harness.engine(depth=depth).run(prompts[1:3], grammars=constraints[1:3], **ends)
        engine = harness.engine(depth=depth)
        try:
            first, *others, last = engine.run(prompts, grammars=constraints, **ends)
            for output in (first, last):
                assert (output.finish, output.invalid) == (FinishReason.ERROR, True)
                assert str(output.error).startswith("The constraint on the output ")
            assert [output.token_ids for output in others] == [output.token_ids for output in alone]
            assert engine.stats.corrupted_requests == 0
            again = engine.run(prompts[1:3], grammars=constraints[1:3], **ends)
            assert [output.token_ids for output in again] == [output.token_ids for output in alone]
        finally:
            STOPPED.set()


# ------------------------------------------------------------------------------------------- without a model


STOPPED = threading.Event()


def spin() -> None:
    """Compute for as long as the test runs, like a library that was given too much."""
    while not STOPPED.is_set():
        pass


class Counting(Grammar):
    """A grammar in which token n may follow n - 1; `script` says what goes wrong: "accept" raises, "fill" raises,
    "refuse" refuses.
    """

    def __init__(self, script: str) -> None:
        self.script = script
        self.count = 0

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        if self.script == "fill":
            raise RuntimeError("planted")
        if self.script == "complex":
            raise ValueError("too many states")
        if self.script.startswith("slow") and self.count:
            spin()
        mask[:] = 0
        mask[0] = 1 << self.count

    def accept(self, ids: Sequence[int]) -> bool:
        if self.script == "accept" and ids:
            raise RuntimeError("planted")
        self.count += len(ids)
        return self.script != "refuse"

    def rollback(self, count: int) -> None:
        self.count -= count

    def fork(self) -> Grammar:
        fork = Counting(self.script)
        fork.count = self.count
        return fork


class CountingBackend(GrammarBackend):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.loads = 0
        self.loaded: weakref.WeakSet[Grammar] = weakref.WeakSet()

    def refuses(self, spec: GrammarSpec) -> str | None:
        return None

    def compile(self, spec: GrammarSpec) -> bytes:
        return b""

    def load(self, data: bytes) -> Grammar:
        self.loads += 1
        if data == b"load":
            raise RuntimeError("planted")
        first = Counting(data.decode())
        self.loaded.add(first)
        return first


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda _: CountingBackend(Vocabulary((), 32, ())))
    STOPPED.clear()
    yield made
    STOPPED.set()
    made.close()


def grammar_of(script: str, backend: str = "counting", digest: bytes = b"") -> CompiledGrammar:
    return CompiledGrammar(backend=backend, digest=digest or script.encode(), data=script.encode())


def admit(slot: int, script: str, *generated: int) -> Admit:
    ids = (9, 9, *generated)
    return Admit(
        slot=slot,
        id=f"r{slot}",
        epoch=1,
        known_ids=ids,
        num_prompt=2,
        work=TokenSampling(seed=0, max_tokens=9),
        grammar=grammar_of(script),
    )


def chunk(slot: int) -> Chunk:
    return Chunk(slot=slot, id=f"r{slot}", epoch=1, start=0, count=1, ends="sample")


class Sampled(Outcome):
    """A step whose token is known."""

    def token_ids(self, row: int) -> Sequence[int]:
        return (7,)


def follow(grammars: Grammars, *slots: int) -> tuple[dict[int, int], dict[int, str]]:
    """Run one step: return the lowest allowed token, or the error, by slot."""
    chunks = [chunk(slot) for slot in slots]
    pending = grammars.masks(chunks, 1)
    assert pending is not None
    masks = pending.result()
    grammars.sampled(list(enumerate(chunks)), Sampled(StepPlan(step=0, chunks=()), {}))
    allowed = {slot: int(np.frombuffer(bits[0], np.int32)[0]).bit_length() - 1 for slot, bits in masks.bits.items()}
    return allowed, masks.errors


def test_states_follow_what_was_sampled(grammars: Grammars) -> None:
    grammars.apply((), [admit(0, ""), admit(2, "", 4, 5)])
    assert follow(grammars, 0, 1, 2) == ({0: 0, 2: 2}, {})
    assert follow(grammars, 0, 2) == ({0: 1, 2: 3}, {})


def test_a_slot_starts_anew(grammars: Grammars) -> None:
    grammars.apply((), [admit(0, "")])
    follow(grammars, 0)
    grammars.apply([0], [admit(0, "")])
    assert follow(grammars, 0) == ({0: 0}, {})
    grammars.apply([0], [])
    assert grammars.masks([chunk(0)], 1) is None


@pytest.mark.advisory("CVE-2026-105757")
@pytest.mark.parametrize("script", ["accept", "fill", "refuse", "load"])
def test_what_goes_wrong_is_one_requests_fault(grammars: Grammars, script: str) -> None:
    grammars.apply((), [admit(0, ""), admit(1, script), admit(2, "")])
    found = [follow(grammars, 0, 1, 2) for _ in range(2)]
    assert found[1][0] == {0: 1, 2: 1}
    assert set(found[1][1]) == {1}


class Opening:
    """An opener that opens "slow" when it is told to, and any other backend at once."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.backends: dict[str, CountingBackend] = {}

    def __call__(self, name: str) -> GrammarBackend:
        if name == "slow":
            self.begun.set()
            assert self.go_on.wait(60)
        self.backends[name] = CountingBackend(Vocabulary((), 32, ()))
        return self.backends[name]


def within(function: Callable[[], Any]) -> Any:
    """Return the result; fail where a thread that waits for a test's event would never return it."""
    answer: Future[Any] = Future()
    threading.Thread(target=lambda: answer.set_result(function()), daemon=True).start()
    return answer.result(60)


def test_a_backend_that_opens_blocks_nobody() -> None:
    opening = Opening()
    grammars = Grammars(opening)
    try:
        grammars.prepare(grammar_of("")).result(60)
        slow = grammars.prepare(grammar_of("", "slow", b"slow"))
        assert opening.begun.wait(60)
        assert within(lambda: grammars.prepare(grammar_of(""))).done()
        unknown = within(lambda: grammars.prepare(grammar_of("", digest=b"unknown")))
        assert not unknown.done()
        grammars.apply((), [admit(0, "")])
        assert within(lambda: follow(grammars, 0)) == ({0: 0}, {})
        assert not slow.done()
        opening.go_on.set()
        slow.result(60)
        unknown.result(60)
    finally:
        opening.go_on.set()
        grammars.close()


def test_a_backend_that_is_expected_opens_once_and_a_fault_of_it_is_told_with_the_constraint() -> None:
    opening, tries = Opening(), []

    def open_backend(name: str) -> GrammarBackend:
        tries.append(name)
        if name == "broken":
            raise RuntimeError("planted")
        return opening(name)

    grammars = Grammars(open_backend)
    try:
        within(lambda: grammars.expect("slow"))
        assert opening.begun.wait(60)
        first = grammars.prepare(grammar_of("", "slow"))
        assert not first.done()
        opening.go_on.set()
        first.result(60)
        assert tries == ["slow"]
        grammars.expect("broken")
        with pytest.raises(RuntimeError, match="planted"):
            grammars.prepare(grammar_of("", "broken", b"broken")).result(60)
        assert tries == ["slow", "broken", "broken"]
    finally:
        opening.go_on.set()
        grammars.close()


@pytest.mark.advisory("GHSA-hf3c-wxg2-49q9")
def test_a_constraint_that_was_evicted_is_loaded_again_beside_a_backend_that_opens() -> None:
    opening = Opening()
    grammars = Grammars(opening)
    try:
        for number in range(400):
            grammars.prepare(grammar_of("", digest=b"%d" % number)).result(60)
        assert opening.backends["counting"].loads == 400
        assert len(opening.backends["counting"].loaded) < 300
        grammars.prepare(grammar_of("", "slow", b"slow"))
        assert opening.begun.wait(60)
        grammars.apply((), [msgspec.structs.replace(admit(0, ""), grammar=grammar_of("", digest=b"0"))])
        assert within(lambda: follow(grammars, 0)) == ({0: 0}, {})
        assert opening.backends["counting"].loads == 401
    finally:
        opening.go_on.set()
        grammars.close()


def test_requests_of_one_constraint_load_it_once() -> None:
    opening = Opening()
    grammars = Grammars(opening)
    try:
        pending = [grammars.prepare(grammar_of("", "slow")) for _ in range(5)]
        opening.go_on.set()
        for each in pending:
            each.result(60)
        assert opening.backends["slow"].loads == 1
    finally:
        opening.go_on.set()
        grammars.close()


def test_a_fault_of_masks_made_together_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Together(CountingBackend):
        def fill(self, grammars: Sequence[Grammar], masks: np.ndarray[Any, Any]) -> None:
            raise RuntimeError("planted")

    grammars = Grammars(lambda _: Together(Vocabulary((), 32, ())))
    try:
        grammars.apply((), [admit(0, ""), admit(1, "")])
        with caplog.at_level(logging.ERROR):
            assert [follow(grammars, 0, 1) for _ in range(2)] == [({0: 0, 1: 0}, {}), ({0: 1, 1: 1}, {})]
        assert ["planted" in str(record.exc_info) for record in caplog.records] == [True]
    finally:
        grammars.close()


def test_preparing_reports_what_loading_raised(grammars: Grammars) -> None:
    grammar = admit(0, "load").grammar
    assert grammar is not None
    with pytest.raises(RuntimeError, match="planted"):
        grammars.prepare(grammar).result(60)


def test_tokens_of_a_vocabulary_are_their_bytes() -> None:
    tokenizer = ByteTokenizer()
    stop = tokenizer.eos_token_id
    assert stop is not None
    words = read_vocabulary(tokenizer, 300, (stop,))
    assert words.tokens[stop] == b""
    assert words.words == 10
    ids = tokenizer.encode("a{é", add_special_tokens=False)
    assert b"".join(words.tokens[id] for id in ids) == "a{é".encode()


SLOW = "The constraint on the output takes too long to follow: simplify its repetitions."


def test_a_constraint_that_takes_too_long_ends_its_requests_and_delays_no_other(grammars: Grammars) -> None:
    """Finish the next steps while the constraint's thread is still busy."""
    grammars.apply((), [admit(slot, script) for slot, script in enumerate(["slow", "", "slow", "other"])])
    assert follow(grammars, 0, 1, 2, 3) == (dict.fromkeys(range(4), 0), {})
    assert follow(grammars, 0, 1, 2, 3) == ({1: 1, 3: 1}, {0: SLOW, 2: SLOW})
    assert follow(grammars, 1, 3) == ({1: 2, 3: 2}, {})
    grammars.apply((0,), [admit(0, "slow", 7), admit(4, "slower")])
    assert follow(grammars, 0, 1, 4) == ({1: 3, 4: 0}, {0: SLOW})  # what was too slow is not tried again
    assert follow(grammars, 1, 3, 4) == ({1: 4, 3: 3}, {4: SLOW})


def test_a_constraint_that_gets_slow_after_it_was_loaded_anew_is_not_tried_again(grammars: Grammars) -> None:
    """Begin a preempted request with what it had generated, after its constraint took too long meanwhile."""
    grammars.apply((), [admit(0, "slow"), admit(1, "")])
    follow(grammars, 0, 1)
    assert follow(grammars, 0, 1) == ({1: 1}, {0: SLOW})
    grammars.forget()
    grammars.apply((), [admit(0, "slow", 7, 7), admit(1, "", 7, 7)])
    assert follow(grammars, 0, 1) == ({1: 2}, {0: SLOW})


def test_new_constraints_wait_while_threads_that_were_left_behind_work(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferrule.runner.follower._MOST_LEFT", 2)
    grammars.prepare(grammar_of("known")).result(60)
    grammars.apply((), [admit(0, "slow"), admit(1, "slower"), admit(2, "")])
    assert follow(grammars, 0, 1, 2) == (dict.fromkeys(range(3), 0), {})
    assert follow(grammars, 0, 1, 2) == ({2: 1}, {0: SLOW, 1: SLOW})
    waiting = grammars.prepare(grammar_of("new"))
    assert grammars.prepare(grammar_of("known")).done()
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    assert follow(grammars, 2) == ({2: 2}, {})
    STOPPED.set()
    waiting.result(60)


def test_constraints_that_wait_do_not_outlive_the_runner(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrule.runner.follower._MOST_LEFT", 0)
    waiting = grammars.prepare(grammar_of("new"))
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    grammars.close()
    waiting.result(60)


def test_a_constraint_that_is_too_complex_is_the_clients_fault(grammars: Grammars) -> None:
    grammars.apply((), [admit(0, "complex"), admit(1, "fill"), admit(2, "")])
    pending = grammars.masks([chunk(0), chunk(1), chunk(2)], 1)
    assert pending is not None
    masks = pending.result()
    assert masks.errors[0] == "The constraint on the output could not be followed: too many states"
    assert (masks.invalid, masks.bits.keys()) == ({0}, {2})
