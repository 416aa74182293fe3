"""The kit of speculators: a small model runs with the plugin and without, and says the same."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator
from ferrule.plugin import Plugins
from ferrule.types import Chunk
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Engine, Harness, Output
from ferrule_testkit.installed import installed_plugins
from ferrule_testkit.kits.base import Kit, promise, shown

_NAME = "it"
_PROMPTS = ((5, 6, 7, 5, 6, 7, 5, 6), tuple(range(20, 45)), (31,), (41, 42) * 9, (51, 52, 53))
_FEW = tuple(range(60, 66))  # tokens that may be drawn, where frequencies are counted
_MOST = 4  # guesses
_PASSES = 4  # of its own layers for each guess, at most; and as many for each step


class SpeculatorKit(Kit):
    """A speculator makes guesses that change no output, within bounds, and tells no scope of another.

    Settings: `recipe`, a checkpoint of `ferrule_testkit.checkpoints`; `keys`, those of --speculative-config; `draft`
    writes the speculator's own model to a folder, given the folder of the checkpoint; `target` writes the checkpoint
    itself to a folder, where no recipe will do; `guesses`, whether it can be
    expected to guess anything of texts that repeat themselves.
    """

    kind = "speculator"
    recipe: str = "llama"
    keys: Mapping[str, Any] = MappingProxyType({})
    draft: Callable[[Path, Path], Any] | None = None
    target: Callable[[Path], Any] | None = None
    guesses: bool = True

    # ------------------------------------------------------------------------------------ promises

    def test_greedy_outputs_are_those_without(self) -> None:
        """Change no greedy output: with prompts in parts, several steps in flight, and requests that are preempted."""
        with self._running() as (plain, watched):
            for limits in ({}, {"max_num_batched_tokens": 12, "depth": 2}, {"num_blocks": 26, "depth": 2}):
                self._compare(plain, watched, limits)

    def test_sampled_outputs_are_those_without(self) -> None:
        """Change no sampled output: the same seeds give the same text, with penalties and filters too."""
        with self._running() as (plain, watched):
            for wishes in ({}, {"top_k": 20, "repetition_penalty": 1.2}, {"min_p": 0.1, "logprobs": 2}):
                self._compare(plain, watched, {}, temperature=1.0, seed=11, **wishes)

    def test_frequencies_are_those_without(self) -> None:
        """Draw tokens as often as without: counts over many other seeds agree, by a test of chi square."""
        wishes = {"temperature": 1.0, "allowed_token_ids": _FEW, "max_tokens": 6}
        with self._running() as (plain, watched):
            mine, others = self._counts(watched, 0, wishes), self._counts(plain, 10_000, wishes)
        for place, (found, wanted) in enumerate(zip(mine, others, strict=True)):
            score = sum((found[id] - wanted[id]) ** 2 / max(1, found[id] + wanted[id]) for id in _FEW)
            promise(score < 35, f"token {place} is drawn {shown(dict(found))} times, and {shown(dict(wanted))} without")

    def test_guesses_have_their_form(self) -> None:
        """Return int64 ids [rows, any number], each of the vocabulary or -1, for exactly the rows that are asked for;
        and guess something.
        """
        with self._running() as (_, watched):
            watched.run({})
            width = watched.harness.info.vocab_size
            for rows, found in watched.proposals:
                form = found.dtype == torch.int64 and found.dim() == 2 and len(found) == len(rows)
                promise(form, f"guesses {tuple(found.shape)} {found.dtype} for {len(rows)} rows")
                promise(bool(((found >= -1) & (found < width)).all()), f"guesses beyond the vocabulary: {shown(found)}")
            made = sum(bool((found >= 0).any()) for _, found in watched.proposals)
            promise(made > 0 or not self.guesses, "nothing was guessed of texts that repeat themselves")

    def test_what_is_accepted_is_counted(self) -> None:
        """Take part in the counts: no more guesses are right than were made, nor made than asked for."""
        with self._running() as (_, watched):
            stats = watched.run({}).stats
            promise(stats.drafts > 0 or not self.guesses, "no step had guesses")
            promise(stats.accepted_tokens <= stats.draft_tokens <= _MOST * stats.drafts, f"counts: {shown(stats)}")

    def test_the_pool_is_left_as_it_was(self) -> None:
        """Leave no block taken, and no prefix cached that others would read wrongly, after guesses that were wrong."""
        with self._running() as (plain, watched):
            text = [[*prompt, *out.token_ids] for prompt, out in zip(_PROMPTS, plain.run({}).outputs, strict=True)]
            first = watched.run({})
            again = first.engine.run(text, max_tokens=8)
            fresh = plain.harness.engine(prefix_caching=False).run(text, max_tokens=8)
            same = [out.token_ids for out in again] == [out.token_ids for out in fresh]
            promise(same, "a second turn on cached prefixes says other than without them")
            watched.harness.executor.call("check", ())
            promise(first.engine.scheduler.reset_cache(), "prefixes are held though no request runs")
            stats = first.engine.stats
            promise(not stats.blocks_used and not stats.blocks_cached, f"blocks are left: {shown(stats)}")

    def test_its_work_is_bounded(self) -> None:
        """Make few passes of its own layers for a step, however long texts are."""
        with self._running() as (_, watched):
            watched.run({})
            most = max(watched.passes, default=0)
            promise(most <= _PASSES * (1 + _MOST), f"{most} passes were made in one step, for {_MOST} guesses")

    def test_scopes_are_kept_apart(self) -> None:
        """Guess for a request what it would guess if no request of another scope had been there."""
        prompt, salted = [_PROMPTS[0]], {"salts": ["mine"]}
        with self._running() as (_, watched):
            watched.run({}, prompts=prompt, **salted)
            alone = watched.guessed()
        with self._running() as (_, watched):
            others = [[*prompt[0], *out.token_ids] for out in watched.run({}, prompts=prompt, salts=["a"]).outputs]
            watched.run({}, prompts=[*others, *_PROMPTS], salts=["a"] * 6)
            watched.proposals.clear()
            watched.run({}, prompts=prompt, **salted)
            promise(watched.guessed() == alone, "other guesses are made after requests of another scope")

    def test_wrong_settings_are_refused(self) -> None:
        """Raise ConfigError, which names the key, for a setting of a wrong type."""
        own: Sequence[str] = self.plugin.own_settings
        for key in (key for key in own if key != "model"):
            try:
                with self._running(**{key: {"a": [1]}}):
                    pass
            except ConfigError as error:
                promise(key in error.message, f"the error does not name {key}: {error.message}")
            else:
                promise(False, f"{key} may be anything")

    # ------------------------------------------------------------------------------------ running

    @contextmanager
    def _running(self, **more: Any) -> Iterator[tuple[Watched, Watched]]:
        """Run a model with the plugin, and without it once that is asked for."""
        of = type(self)
        folder, own = _written(of.recipe, of.target, of.draft)
        given: dict[str, Any] = {**self.keys, **more}
        if of.draft is not None:
            given["model"] = own.name
        given |= {"method": _NAME, "num_speculative_tokens": _MOST, "adaptive": False}
        seen = Watched(None)
        with ExitStack() as running:
            plugins = _OnePlugin(seen.watch(self.plugin))
            made = Harness(folder.name, dtype="float32", speculative=given, plugins=plugins)
            seen.harness = running.enter_context(made)
            yield Watched(lambda: running.enter_context(Harness(folder.name, dtype="float32"))), seen

    def _compare(self, plain: Watched, watched: Watched, limits: Mapping[str, Any], **wishes: Any) -> None:
        wanted, found = plain.run(limits, **wishes).outputs, watched.run(limits, **wishes).outputs
        for output, alone in zip(found, wanted, strict=True):
            same = (output.token_ids, output.finish, output.error) == (alone.token_ids, alone.finish, alone.error)
            promise(same, f"with guesses: {shown(output.token_ids)}; without: {shown(alone.token_ids)}")

    def _counts(self, watched: Watched, seed: int, wishes: Mapping[str, Any]) -> list[Counter[int]]:
        seeds = list(range(seed, seed + 300))
        prompts = [_PROMPTS[0]] * len(seeds)
        outputs = watched.run({"max_num_seqs": 8}, prompts=prompts, seeds=seeds, **wishes).outputs
        return [Counter(ids) for ids in zip(*(output.token_ids for output in outputs), strict=True)]


@cache
def _written(
    recipe: str, target: Callable[[Path], Any] | None, draft: Callable[[Path, Path], Any] | None
) -> tuple[tempfile.TemporaryDirectory[str], tempfile.TemporaryDirectory[str]]:
    """Write a checkpoint and the speculator's own model, once in a process. The folders go with the returned
    objects.
    """
    folder, own = (tempfile.TemporaryDirectory(prefix="ferrule-kit-") for _ in range(2))
    if target is None:
        tiny_checkpoint(recipe, folder.name)
    else:
        target(Path(folder.name))
    if draft is not None:
        draft(Path(own.name), Path(folder.name))
    return folder, own


class Run:
    """The outputs of a run, and its engine."""

    def __init__(self, engine: Engine, outputs: list[Output]) -> None:
        self.engine, self.outputs, self.stats = engine, outputs, engine.stats


class Watched:
    """A harness, and what its speculator was asked: `proposals` are the known ids of rows, and the guesses.

    `make` makes the harness when it is needed. `passes` counts the passes of its own layers, step by step.
    """

    def __init__(self, make: Callable[[], Harness] | None) -> None:
        self._make = make
        self._harness: Harness | None = None
        self.proposals: list[tuple[list[list[int]], torch.Tensor]] = []
        self.passes: list[int] = []

    @property
    def harness(self) -> Harness:
        if self._harness is None:
            if self._make is None:
                raise RuntimeError("nothing runs")
            self._harness = self._make()
        return self._harness

    @harness.setter
    def harness(self, made: Harness) -> None:
        self._harness = made

    def run(self, limits: Mapping[str, Any], prompts: Sequence[Sequence[int]] = _PROMPTS, **wishes: Any) -> Run:
        engine = self.harness.engine(**{"max_num_seqs": 5, **limits})
        return Run(engine, engine.run(prompts, **{"max_tokens": 24, **wishes}))

    def guessed(self) -> list[tuple[list[list[int]], list[list[int]]]]:
        return [(rows, found.tolist()) for rows, found in self.proposals]

    def watch(self, plugin: type[Speculator]) -> type[Speculator]:
        """Return a class that does what the plugin does, and notes it here."""
        seen = self

        class Noted(plugin):  # type: ignore[misc, valid-type]
            def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor, steps: DraftSteps) -> None:
                seen.passes.append(0)
                super().observe(chunks, hidden, _Counting(steps, seen.passes))

            def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
                found: torch.Tensor = super().propose(rows, _Counting(steps, seen.passes))
                texts = [rows.history[slot, :end].tolist() for slot, end in zip(rows.slots, rows.lengths, strict=True)]
                seen.proposals.append((texts, found.cpu().clone()))
                return found

        Noted.__name__, Noted.__module__ = plugin.__name__, plugin.__module__
        return Noted


class _Counting:
    """Passes that are counted."""

    def __init__(self, steps: DraftSteps, passes: list[int]) -> None:
        self._steps, self._passes = steps, passes

    def __getattr__(self, name: str) -> Any:
        if name in ("context", "forward"):
            self._passes[-1] += 1
        return getattr(self._steps, name)

    def chain(self, *given: Any) -> Any:
        forward = self._steps.chain(*given)

        def counted(ids: torch.Tensor) -> torch.Tensor:
            self._passes[-1] += 1
            return forward(ids)

        return counted


class _OnePlugin(Plugins):
    """The installed plugins, with one speculator, and no other."""

    def __init__(self, speculator: type[Speculator]) -> None:
        super().__init__(refs=installed_plugins().refs)
        self._speculator = speculator

    def names(self, kind: str) -> tuple[str, ...]:
        return (_NAME,) if kind == "speculator" else super().names(kind)

    def load(self, kind: str, name: str) -> Any:
        return self._speculator if (kind, name) == ("speculator", _NAME) else super().load(kind, name)

    def origin(self, kind: str, name: str) -> str:
        return "the kit" if kind == "speculator" else super().origin(kind, name)

    def stated(self, kind: str, name: str, attribute: str) -> Any:
        if kind == "speculator":
            return getattr(self._speculator, attribute, None)
        return super().stated(kind, name, attribute)
