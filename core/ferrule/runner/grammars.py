"""Constraints of the requests in slots: states that follow the sampled tokens, and masks for the next ones.

All work on states is done by one thread of its own, in order, while the worker's thread launches the forward pass: the
interpreter lock is free for most of it, because kernels and grammar libraries work without. Another thread opens
backends, which takes seconds, and loads constraints ahead of their requests.

A constraint has `STEP_SECONDS` of a processor for all its rows in a step. One that needs more ends with its requests,
and its thread is left behind: the step goes on with the others. So each constraint is a piece of work of its own. While
several threads that were left behind still work, constraints that are not loaded yet wait for one of them to end.

Tokens that a constraint forces are sampled like any other, though 39 % of the bytes of JSON with 20 short fields are
forced (`python -m tools.benchmarks.guided --forced`). To append them without sampling is not built, for two reasons.
The state is known here alone, after a token was sampled: by then the next step, with one token of that row, has been
planned. And libraries force bytes: a run must be cut into the tokens that the tokenizer would write, without the last
one, which may go on into free text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.log import Log
from ferrule.runner.draws import guesses_of
from ferrule.runner.follower import Follower
from ferrule.runner.outcome import Outcome
from ferrule.runner.thoughts import ThoughtCounter
from ferrule.types import Admit, Chunk, CompiledGrammar, ThoughtLimit

_KEPT_BYTES = 64 << 20  # of compiled constraints whose first states are kept
_KEPT_STATES = 256  # a state may be much larger than its compiled constraint
_FAILED = "The constraint on the output could not be followed."
_NOT_FOLLOWED = "a constraint could not be followed"  # in the log
STEP_SECONDS = 0.15  # of a processor, that following one constraint may take in a step
_ROW_SECONDS = 0.005  # more for each of its rows
_LOOK_SECONDS = 0.02  # between two looks at work that is waited for
_SLOW = "The constraint on the output takes too long to follow: simplify its repetitions."
_log = Log("grammar")


@dataclass
class SlotGrammar:
    """One request's constraint. `sampled` is the step whose tokens for this slot are not followed yet, and its row."""

    grammar: Grammar | None = None
    thoughts: ThoughtCounter | None = None
    backend: GrammarBackend | None = None
    error: str | None = None
    invalid: bool = False  # the constraint is to blame for the error, not the server
    sampled: tuple[Outcome, int] | None = None  # and the row in its plan
    ahead: list[ThoughtCounter | None] = field(default_factory=list)  # guesses followed: `thoughts` before each of them
    digest: bytes = b""  # of the constraint; empty for a limit on thoughts alone


SlotRows = Sequence[tuple[int, SlotGrammar]]


@dataclass(frozen=True)
class Masks:
    """The bitmasks of a step's constrained rows, or the errors in their place, by slot.

    The masks of a row are for its token and for those behind its guesses, up to the first guess that is not allowed; an
    empty one allows every token.
    """

    bits: dict[int, list[bytes]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    invalid: frozenset[int] = frozenset()  # slots whose constraint is to blame for the error

    def of(self, slot: int, ahead: int) -> bytes | None:
        """Return the mask of a row behind so many guesses; past the last mask, which does not matter, any."""
        bits = self.bits.get(slot)
        return (bits[min(ahead, len(bits) - 1)] or None) if bits else None


class PendingMasks:
    """The masks of a step while they are being made. `fault` ends the constraints that take too long, by digest."""

    def __init__(self, follower: Follower, limit: float, fault: Callable[[bytes], None]) -> None:
        self.made: Future[Masks] = Future()
        self._follower = follower
        self._limit = limit
        self._fault = fault

    def result(self) -> Masks:
        while True:
            try:
                return self.made.result(_LOOK_SECONDS)
            except FutureTimeoutError:
                if key := self._follower.overdue(self._limit):
                    self._fault(key)
                    self._follower.leave(key)


class Grammars:
    """The constraints of the requests in slots.

    `open_backend` makes the backend of a name, in a thread, when the first constraint for it comes. `tokenizer` is
    called for limits on thoughts, which need no backend.
    """

    def __init__(
        self, open_backend: Callable[[str], GrammarBackend], tokenizer: Callable[[], Tokenizer | None] = lambda: None
    ) -> None:
        self._open_backend = open_backend
        self._tokenizer = tokenizer
        self._backends: dict[str, GrammarBackend] = {}  # written by the loader's thread only
        self._first: OrderedDict[bytes, tuple[Grammar, int]] = OrderedDict()  # by digest: first state, bytes of data
        self._lock = threading.Lock()  # of `_first`; never held while a backend works
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="ferrule-grammar-load")
        self._follower = Follower()
        self._slow: OrderedDict[bytes, None] = OrderedDict()  # digests of constraints that took too long
        self._slots: dict[int, SlotGrammar] = {}
        self._bulk_faults: set[int] = set()  # ids of backends

    def expect(self, backend: str) -> None:
        """Open a backend before its first constraint, whose `prepare` raises what failed.

        Any thread may call this; it does not block.
        """
        self._loader.submit(self._open, backend)

    def prepare(self, compiled: CompiledGrammar) -> Future[None]:
        """Load a constraint ahead of its request. Any thread may call this; it does not block."""
        if self._known(compiled) is None:
            return self._loader.submit(self._prepare, compiled)
        ready: Future[None] = Future()
        ready.set_result(None)
        return ready

    def apply(self, releases: Sequence[int], admits: Sequence[Admit]) -> None:
        """Follow a plan: slots that were given back, and requests that took one."""
        for slot in releases:
            self._slots.pop(slot, None)
        for admit in admits:
            self._slots.pop(admit.slot, None)
            if admit.grammar is not None:
                constraint = self._slots[admit.slot] = SlotGrammar(digest=admit.grammar.digest)
                if admit.grammar.digest in self._slow:
                    constraint.error, constraint.invalid = _SLOW, True
                begin = partial(self._begin, constraint, admit.grammar, admit.known_ids[admit.num_prompt :])
                self._follower.submit(admit.grammar.digest, begin)
            if admit.work.thoughts is not None:
                constraint = self._slots.setdefault(admit.slot, SlotGrammar())
                generated = admit.known_ids[admit.num_prompt :]
                self._follower.submit(b"", partial(self._begin_thoughts, constraint, admit.work.thoughts, generated))

    def masks(self, chunks: Sequence[Chunk], words: int) -> PendingMasks | None:
        """Begin to make the masks [words] int32 of the rows that sample; None if none of them is constrained."""
        wanted = [(chunk.slot, self._slots[chunk.slot]) for chunk in chunks if chunk.slot in self._slots]
        if not wanted:
            return None
        guesses = {chunk.slot: guesses_of(chunk) for chunk in chunks if chunk.drafts}
        count = len(wanted) + sum(len(guesses.get(slot, ())) for slot, _ in wanted)
        pending = PendingMasks(self._follower, STEP_SECONDS + _ROW_SECONDS * count, self._end_slow)
        groups: dict[bytes, list[tuple[int, SlotGrammar]]] = {}
        for slot, constraint in wanted:
            groups.setdefault(constraint.digest, []).append((slot, constraint))
        found = Masks()
        for key, rows in groups.items():
            self._follower.submit(key, partial(self._fill, rows, guesses, words, found))
        self._follower.submit(b"", partial(self._hand_over, wanted, found, pending.made))
        return pending

    def sampled(self, chunks: Sequence[tuple[int, Chunk]], outcome: Outcome) -> None:
        """Note that a step samples these rows; its tokens are followed once they are known."""
        for row, chunk in chunks:
            constraint = self._slots.get(chunk.slot)
            if constraint is not None:
                constraint.sampled = outcome, row

    def forget(self) -> None:
        """Forget all requests: no slot has one any more."""
        self._slots.clear()

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._follower.close()

    # ------------------------------------------------------------------------------------ first states

    def _known(self, compiled: CompiledGrammar) -> Grammar | None:
        with self._lock:
            if compiled.digest not in self._first:
                return None
            self._first.move_to_end(compiled.digest)
            return self._first[compiled.digest][0]

    def _load(self, backend: GrammarBackend, compiled: CompiledGrammar) -> Grammar:
        """Have the backend make the first state. Runs on the thread of the loader or of the follower."""
        first = backend.load(compiled.data)
        with self._lock:
            self._first[compiled.digest] = first, len(compiled.data)
            size = sum(size for _, size in self._first.values())
            while len(self._first) > 1 and (size > _KEPT_BYTES or len(self._first) > _KEPT_STATES):
                size -= self._first.popitem(last=False)[1][1]
        return first

    # ------------------------------------------------------------------------------------ on the loader's thread

    def _prepare(self, compiled: CompiledGrammar) -> None:
        backend = self._open(compiled.backend)
        self._follower.wait_room()
        if self._known(compiled) is None:
            self._load(backend, compiled)

    def _open(self, name: str) -> GrammarBackend:
        if name not in self._backends:
            self._backends[name] = self._open_backend(name)
        return self._backends[name]

    # ------------------------------------------------------------------------------------ on the follower's thread

    def _begin(self, constraint: SlotGrammar, compiled: CompiledGrammar, ids: Sequence[int]) -> None:
        """Set the state after `ids`, which a preempted request has generated before."""
        if constraint.error is not None:
            return
        try:
            backend = self._backends.get(compiled.backend)
            if backend is None:  # the request was not prepared
                backend = self._loader.submit(self._open, compiled.backend).result()
            first = self._known(compiled)
            if first is None:  # evicted since it was prepared
                first = self._load(backend, compiled)
            constraint.backend, constraint.grammar = backend, first.fork()
            self._accept(constraint, ids)
        except Exception:  # a plugin's code, and libraries': only this request fails
            constraint.error = _FAILED
            _log.exception("a constraint could not be loaded", backend=compiled.backend)

    def _begin_thoughts(self, constraint: SlotGrammar, limit: ThoughtLimit, ids: Sequence[int]) -> None:
        """Start counting thoughts, after `ids`. Runs after `_begin`, where these ids do not count."""
        try:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                raise RuntimeError("a limit on thoughts needs a tokenizer, and this engine has none")
            thoughts = ThoughtCounter(limit, partial(_piece, tokenizer))
            thoughts.accept(ids)
            constraint.thoughts = thoughts
        except Exception:  # a tokenizer's code: only this request fails
            constraint.error = _FAILED
            _log.exception("a limit on thoughts could not be followed")

    def _accept(self, constraint: SlotGrammar, ids: Sequence[int]) -> None:
        if constraint.thoughts is not None:
            constraint.thoughts.accept(ids)
        if ids and constraint.grammar is not None and not constraint.grammar.accept(ids):
            constraint.error = "The output does not fit its constraint any more."

    def _fill(self, wanted: SlotRows, guesses: Mapping[int, Sequence[int]], words: int, found: Masks) -> None:
        """Add to `found` the masks of rows under one constraint, then those after one guess after the other."""
        for _, constraint in wanted:
            _attempt(constraint, _NOT_FOLLOWED, self._follow, constraint)
        while wanted:
            alive = _unforced([each for each in wanted if each[1].error is None], words, found)
            for backend in {id(constraint.backend): constraint.backend for _, constraint in alive}.values():
                rows = [(slot, constraint) for slot, constraint in alive if constraint.backend is backend]
                self._fill_by(backend, rows, words, found)
            wanted = [each for each in wanted if self._guess(*each, guesses, found)]

    def _guess(self, slot: int, constraint: SlotGrammar, guesses: Mapping[int, Sequence[int]], found: Masks) -> bool:
        """Follow a row's next guess. Returns False where there is none, or the row's last mask does not allow it."""
        place, ids = len(constraint.ahead), guesses.get(slot, ())
        if place == len(ids) or constraint.error is not None:
            return False
        mask, (word, bit) = found.bits[slot][-1], divmod(ids[place], 32)
        if mask and not np.frombuffer(mask, np.uint32)[word] >> bit & 1:
            return False
        constraint.ahead.append(copy(constraint.thoughts))
        _attempt(constraint, _NOT_FOLLOWED, self._accept, constraint, ids[place : place + 1])
        return constraint.error is None

    def _hand_over(self, wanted: SlotRows, found: Masks, made: Future[Masks]) -> None:
        """Hand over the masks once those of all rows of a step are made.

        A row without its mask gets an error instead.
        """
        for slot, constraint in wanted:
            if constraint.digest and constraint.error is None and slot not in found.bits:
                constraint.error = _FAILED
        failed = [(slot, constraint) for slot, constraint in wanted if constraint.error is not None]
        errors = {slot: constraint.error for slot, constraint in failed if constraint.error is not None}
        made.set_result(Masks(dict(found.bits), errors, frozenset(slot for slot, one in failed if one.invalid)))

    def _end_slow(self, digest: bytes) -> None:
        """End all requests under a constraint whose thread was left behind. Runs on the worker's thread."""
        _log.error("a constraint takes too long to follow: its requests end")
        self._slow[digest] = None
        while len(self._slow) > _KEPT_STATES:
            self._slow.popitem(last=False)
        for constraint in self._slots.values():
            if constraint.digest == digest:
                constraint.error, constraint.invalid = _SLOW, True

    def _follow(self, constraint: SlotGrammar) -> None:
        """Go back by the guesses that were wrong, and follow the token that came instead."""
        (sampled, constraint.sampled), (ahead, constraint.ahead) = (constraint.sampled, None), (constraint.ahead, [])
        if constraint.error is not None:
            return
        ids = () if sampled is None else sampled[0].token_ids(sampled[1])
        right = min(len(ahead), max(0, len(ids) - 1))
        if right < len(ahead):
            constraint.thoughts = ahead[right]
            if constraint.grammar is not None:
                constraint.grammar.rollback(len(ahead) - right)
        self._accept(constraint, ids[right:])

    def _fill_by(self, backend: GrammarBackend | None, rows: SlotRows, words: int, found: Masks) -> None:
        """Make the masks of one backend's rows: in bulk, and if that fails one by one, to find the row at fault."""
        masks = np.zeros((len(rows), words), np.int32)
        grammars = [constraint.grammar for _, constraint in rows if constraint.grammar is not None]
        if backend is None or len(grammars) != len(rows):
            raise RuntimeError("a slot has a constraint without a state")
        try:
            backend.fill(grammars, masks)
        except Exception:
            for mask, grammar, (_, constraint) in zip(masks, grammars, rows, strict=True):
                mask.fill(0)
                _attempt(constraint, "the mask of a constraint could not be made", grammar.fill, mask)
            self._note_bulk_fault(backend, rows)
        for mask, (slot, constraint) in zip(masks, rows, strict=True):
            if constraint.error is None:  # nor left behind meanwhile
                found.bits.setdefault(slot, []).append(mask.tobytes())

    def _note_bulk_fault(self, backend: GrammarBackend, rows: SlotRows) -> None:
        """Log the exception being handled, once for each backend, where no row is to blame for it."""
        if id(backend) not in self._bulk_faults and all(constraint.error is None for _, constraint in rows):
            self._bulk_faults.add(id(backend))
            _log.exception("masks were made one by one because making them together failed; this is logged once")


def _unforced(rows: SlotRows, words: int, found: Masks) -> SlotRows:
    """Return the rows that have a grammar; masks of the others, whose next token is forced or free, go to `found`."""
    others = []
    for slot, constraint in rows:
        forced = None if constraint.thoughts is None else constraint.thoughts.forced
        if forced is not None:
            mask = np.zeros(words, np.uint32)
            mask[forced // 32] = 1 << forced % 32
            found.bits.setdefault(slot, []).append(mask.tobytes())
        elif constraint.grammar is not None:
            others.append((slot, constraint))
        else:
            found.bits.setdefault(slot, []).append(b"")
    return others


def _piece(tokenizer: Tokenizer, id: int) -> bytes:
    piece = tokenizer.piece(id, False)
    return tokenizer.decode([id], skip_special_tokens=False).encode() if piece is None else piece


def _attempt(constraint: SlotGrammar, failure: str, function: Callable[..., object], *args: Any) -> None:
    """Call a plugin's code for one constraint. What it raises is logged as `failure`, and ends the request.

    The text of a ValueError is for the client, whose constraint is to blame.
    """
    try:
        function(*args)
    except Exception as error:
        constraint.invalid = isinstance(error, ValueError)
        constraint.error = f"{_FAILED[:-1]}: {error}" if constraint.invalid else _FAILED
        _log.exception(failure)
