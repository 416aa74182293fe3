"""The kit of logits processors."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrule.interfaces.sampler import LogitsProcessor, SampleBatch, SampleRow
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.kits.sampler import OnePlugin, sampling


class LogitsProcessorKit(Kit):
    """A processor changes its own row's logits as its arguments say, and refuses arguments that are wrong.

    Settings: `arguments`, sets that are accepted; `wrong`, sets that are refused; `ignores_prompt`, True for one that
    looks at generated tokens only.
    """

    kind = "logits_processor"
    arguments: Sequence[Mapping[str, Any]] = ({},)
    wrong: Sequence[Mapping[str, Any]] = ({"no_such_argument_xyz": 1},)
    vocab_size: int = 64
    ignores_prompt: bool = False

    def make(self, given: Mapping[str, Any]) -> LogitsProcessor:
        processor: LogitsProcessor = self.new(**copy.deepcopy(dict(given)))
        return processor

    # ------------------------------------------------------------------------------------ promises

    def test_wrong_arguments_are_a_value_error(self) -> None:
        """Raise ValueError with a message for the client, and nothing else, for arguments that cannot be used."""
        for given in self.wrong:
            try:
                self.make(given)
            except ValueError as error:
                promise(bool(str(error)), f"{given} is refused without a word")
            else:
                promise(False, f"{given} is accepted")

    def test_the_row_keeps_its_form(self) -> None:
        """Return a row [vocab] of the same type on the same device, without NaN, in which some token is possible."""
        for given, known, num_prompt in self._cases():
            logits = self._logits()
            out = self.make(given).apply(known, num_prompt, logits.clone())
            same = out.shape == logits.shape and out.dtype == logits.dtype and out.device == logits.device
            promise(same, f"{given}: a row {tuple(out.shape)} of {out.dtype} comes back")
            promise(not bool(out.isnan().any()), f"{given}: NaN comes back")
            promise(bool(out.max() > -math.inf), f"{given} after {known}: no token is left")

    def test_the_history_is_left_alone(self) -> None:
        """Read the known ids and do not change them."""
        for given, known, num_prompt in self._cases():
            ids = list(known)
            self.make(given).apply(ids, num_prompt, self._logits())
            promise(ids == known, f"{given} changed the request's ids")

    def test_requests_share_nothing(self) -> None:
        """Work for two requests in turns as for each alone."""
        for given in self.arguments:
            alone = [self._story(given, seed) for seed in (1, 2)]
            first, second = self.make(given), self.make(given)
            mixed: list[list[torch.Tensor]] = [[], []]
            for a, b in zip(_history(1), _history(2), strict=True):
                mixed[0].append(first.apply(a, 2, self._logits()))
                mixed[1].append(second.apply(b, 2, self._logits()))
            for wanted, got in zip(alone, mixed, strict=True):
                equal = all(torch.equal(x, y) for x, y in zip(wanted, got, strict=True))
                promise(equal, f"{given}: a request's logits change beside another request")

    def test_nothing_is_kept_for_later_requests(self) -> None:
        """Treat a request the same before and after others, whatever tokens these had."""
        for number, given in enumerate(self.arguments):
            first, other = ([41 + 10 * number + start + step for step in range(5)] for start in (0, 5))
            story = [[token % self.vocab_size for token in first[: length + 1]] for length in range(5)]
            before = [self.make(given).apply(list(known), 1, self._logits()) for known in story]
            for length in range(1, 6):
                self.make(given).apply([token % self.vocab_size for token in other[:length]], 1, self._logits())
            after = [self.make(given).apply(list(known), 1, self._logits()) for known in story]
            equal = all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
            promise(equal, f"{given}: the same request changes other logits after another request than before it")

    def test_the_prompt_does_not_count(self) -> None:
        """Change the logits alike after any prompt for the same generated tokens, with `ignores_prompt`."""
        if not self.ignores_prompt:
            does_not_apply("`ignores_prompt` is not set")
        for given in self.arguments:
            for generated in ([], [3], [5, 3, 5]):
                results = []
                for prompt in ([1], [5, 3, 3, 9], [3] * 12):
                    results.append(self.make(given).apply([*prompt, *generated], len(prompt), self._logits()))
                equal = all(torch.equal(results[0], result) for result in results)
                promise(equal, f"{given}: the logits after {generated} change with the prompt")

    def test_it_works_in_a_batch(self) -> None:
        """Work under the built-in sampler: a row with the processor draws as it does alone, and its neighbours are not
        affected.
        """
        from ferrule_testkit.simulate import load

        def sample(order: Sequence[int]) -> list[int]:
            rows = [sampling(seed=n, processors=(("it", dict(self.arguments[0])),) if n % 2 else ()) for n in range(4)]
            ids = torch.tensor([[1, 2, 3, 0]] * 4, dtype=torch.int32)
            batch = [SampleRow(n, rows[n], 2, 3) for n in order]
            logits = torch.stack([self._logits(n) for n in order])
            sampled = load("sampler", "default")(OnePlugin(self.plugin)).sample(logits, SampleBatch(batch, ids))
            promise(not sampled.errors, f"a row failed: {shown(sampled.errors)}")
            return [int(token) for token in sampled.tokens]

        together = sample([0, 1, 2, 3])
        promise(sample([3, 2, 1, 0]) == together[::-1], "tokens change with the order of the rows")
        promise([sample([n])[0] for n in range(4)] == together, "a row's token changes with its neighbours")

    # ------------------------------------------------------------------------------------ parts

    def _cases(self) -> Iterator[tuple[Mapping[str, Any], list[int], int]]:
        if not self.arguments:
            does_not_apply("no `arguments` are given")
        for given in self.arguments:
            for known, num_prompt in (([1], 1), ([5, 5, 5], 1), (list(range(40)), 40), ([self.vocab_size - 1] * 9, 3)):
                yield given, known, num_prompt

    def _story(self, given: Mapping[str, Any], seed: int) -> list[torch.Tensor]:
        processor = self.make(given)
        return [processor.apply(known, 2, self._logits()) for known in _history(seed)]

    def _logits(self, seed: int = 0) -> torch.Tensor:
        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed))


def _history(seed: int) -> Iterator[list[int]]:
    known = [seed, 7 * seed]
    for step in range(6):
        known.append((step * seed) % 11)
        yield list(known)
