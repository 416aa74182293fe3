"""The kit of samplers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferrule.interfaces.sampler import LogprobsMode, SampleBatch, Sampled, Sampler, SampleRow
from ferrule.plugin import Plugins
from ferrule.runner.logprobs import rank
from ferrule.types import TokenSampling
from ferrule_testkit.installed import installed_plugins
from ferrule_testkit.kits.base import Kit, promise, shown
from ferrule_testkit.simulate import load

_VOCAB = 16
_STEPS = torch.linspace(0, 3, _VOCAB)  # the last token is the most likely
_DRAWS = 3000

# Parameters that a row may have beside any other row.
MANNERS: Sequence[Mapping[str, Any]] = (
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": ((3, 4.0),), "allowed_token_ids": (1, 3, 5, 7), "top_p": 0.99},
    {"min_tokens": 50, "stop_token_ids": (0, 1), "bad_words": ((2, 3), (4,))},
)


class OnePlugin(Plugins):
    """The installed plugins, with one logits processor more, under the name "it", and no other."""

    def __init__(self, processor: type | None = None) -> None:
        super().__init__(refs=installed_plugins().refs)
        self._processor = processor

    def names(self, kind: str) -> tuple[str, ...]:
        if kind != "logits_processor":
            return super().names(kind)
        return ("it",) if self._processor else ()

    def load(self, kind: str, name: str) -> Any:
        if kind != "logits_processor":
            return super().load(kind, name)
        if name not in self.names(kind):
            raise LookupError(f"there is no {kind} named {name!r}")
        return self._processor

    def origin(self, kind: str, name: str) -> str:
        return super().origin(kind, name) if kind != "logits_processor" else "the kit"


def _batch(rows: Sequence[SampleRow], history: torch.Tensor, **more: Any) -> SampleBatch:
    """Make a batch with the CPU's kernels."""
    return SampleBatch(rows, history, kernels=load("platform", "cpu")().execution().kernels(), **more)


def _ids(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 8, dtype=torch.int32)


def sampling(**changes: Any) -> TokenSampling:
    return TokenSampling(**{"seed": 0, "max_tokens": 100, **changes})


class SamplerKit(Kit):
    """A sampler draws from the distribution that the parameters define, each row as if it were alone."""

    kind = "sampler"
    vocab_sizes: Sequence[int] = (100, 2003, 50_257)

    def make(self) -> Sampler:
        sampler: Sampler = self.new(OnePlugin())
        return sampler

    # ------------------------------------------------------------------------------------ promises

    def test_greedy_takes_the_most_likely(self) -> None:
        """Choose the likeliest token with temperature 0, tiny temperatures, top_k 1 and a tiny top_p; of equals the
        first.
        """
        for given in (
            {"temperature": 0.0},
            {"temperature": 1e-6},
            {"temperature": 0.01},
            {"top_k": 1},
            {"top_p": 1e-6},
        ):
            tokens = self.sample(_STEPS, [sampling(seed=seed, **given) for seed in range(20)]).tokens
            promise(tokens.tolist() == [_VOCAB - 1] * 20, f"{given} draws {shown(tokens.tolist())}")
        first = self.sample(torch.tensor([0.0, 5.0, 5.0, 1.0]), [sampling(temperature=0.0)]).tokens
        promise(first.tolist() == [1], f"of two equals greedy takes token {first.tolist()}")

    def test_frequencies_follow_the_distribution(self) -> None:
        """Draw tokens, over many seeds, as often as softmax(logits / temperature) says."""
        for temperature in (0.5, 1.0, 2.0):
            self._follows(_STEPS, torch.softmax(_STEPS / temperature, 0), temperature=temperature)

    def test_top_k_top_p_and_min_p(self) -> None:
        """Never draw tokens that top_k, top_p or min_p cut off, and draw the others as often as before, relative to the
        rest.
        """
        probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
        for given, kept in (
            ({"top_k": 3}, 3),
            ({"top_k": 5}, 5),
            ({"top_p": 0.39}, 1),
            ({"top_p": 0.7001}, 3),
            ({"top_p": 0.999}, 5),
            ({"min_p": 0.3}, 3),
            ({"top_k": 2, "top_p": 0.55}, 1),  # top_p counts what top_k left: 0.4 / 0.7 reaches it
        ):
            wanted = probs.where(torch.arange(5) < kept, 0.0)
            self._follows(probs.log(), wanted / wanted.sum(), **given)

    def test_penalties_equal_their_definition(self) -> None:
        """Apply penalties by their definition: repetition counts the prompt too, presence once, frequency each time,
        both only what was generated.
        """
        history, prompt = [1, 2, 2, 9, 9, 9, 4], 3
        logits = torch.linspace(-1, 1, _VOCAB)
        given = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2}
        changed = logits.clone()
        for token in set(history):
            changed[token] = changed[token] / 1.4 if changed[token] > 0 else changed[token] * 1.4
        for token in set(history[prompt:]):
            changed[token] -= 0.3 * history[prompt:].count(token) + 0.2
        self._follows(logits, changed.softmax(0), history, prompt, **given)

    def test_bias_allowed_and_banned_tokens(self) -> None:
        """Add biases to logits; draw only allowed tokens; never draw banned words and early stops."""
        for given, history, prompt, wanted in (
            ({"logit_bias": ((2, 10.0),)}, [5], 1, 2),
            ({"logit_bias": ((_VOCAB - 1, -10.0),)}, [5], 1, _VOCAB - 2),
            ({"allowed_token_ids": (3, 7, 1)}, [5], 1, 7),
            ({"min_tokens": 2, "stop_token_ids": (_VOCAB - 1,)}, [5, 5, 5], 2, _VOCAB - 2),
            ({"min_tokens": 2, "stop_token_ids": (_VOCAB - 1,)}, [5, 5, 5, 5], 2, _VOCAB - 1),
            ({"bad_words": ((4, _VOCAB - 1), (_VOCAB - 2,))}, [9, 4], 1, _VOCAB - 3),
            ({"bad_words": ((4, _VOCAB - 1), (_VOCAB - 2,))}, [9, 4], 2, _VOCAB - 1),
        ):
            token = self.sample(_STEPS, [sampling(temperature=0.0, **given)], history, prompt).tokens.tolist()
            promise(token == [wanted], f"{given} after {history} with a prompt of {prompt} gives {token}, not {wanted}")

    def test_a_mask_of_a_grammar(self) -> None:
        """Draw only tokens of a constrained row's mask, and ban ids that the mask does not reach."""
        for mask, wanted in ((0b00100100.to_bytes(2, "little"), 5), (b"\xff", 7)):
            token = self.sample(_STEPS, [sampling(temperature=0.0)], mask=mask).tokens.tolist()
            promise(token == [wanted], f"the mask {mask!r} gives {token}, not {wanted}")

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """Draw the same token for a row alone, among others, and in any order of the rows."""
        for vocab in self.vocab_sizes:
            draw = torch.Generator().manual_seed(0)
            rows = [sampling(seed=17 * n, **given) for n, given in enumerate((*MANNERS, *MANNERS))]
            logits = (torch.randn(len(rows), vocab, generator=draw) * 4).bfloat16().float()  # many ties
            history = torch.randint(0, 90, (20,), generator=draw).tolist()
            together = self.sample(logits, rows, history, 10).tokens
            order = torch.randperm(len(rows), generator=draw)
            shuffled = self.sample(logits[order], [rows[n] for n in order.tolist()], history, 10).tokens
            promise(torch.equal(shuffled, together[order]), "tokens change with the order of the rows")
            for n, row in enumerate(rows):
                alone = self.sample(logits[n : n + 1], [row], history, 10).tokens
                promise(bool(alone[0] == together[n]), f"a row with {shown(MANNERS[n % len(MANNERS)])} differs alone")

    def test_extreme_neighbours_change_nothing(self) -> None:
        """Draw for each of many rows the token that it gets alone, beside rows with huge logits, NaN and any
        parameters.
        """
        draw = torch.Generator().manual_seed(1)
        logits = torch.randn(48, _VOCAB, generator=draw) * 0.3
        rows = [sampling(seed=seed, temperature=0.9) for seed in range(40)]
        rows += [sampling(seed=seed, temperature=0.0) for seed in range(8)]
        logits[40:, 3] = logits[40:].amax(1)  # two likeliest tokens: the slightest change decides
        alone = torch.cat([self.sample(logits[n : n + 1], [row], [1, 2], 1).tokens for n, row in enumerate(rows)])
        for other in (1e4 * _STEPS, -1e4 * _STEPS.flip(0), _STEPS * math.nan):
            for manner in MANNERS:
                beside = [sampling(seed=5, **manner), sampling(temperature=8.0)]
                wide = torch.cat((other.expand(2, -1), logits))
                together = self.sample(wide, [*beside, *rows], [1, 2], 1).tokens[2:]
                changed = int((together != alone).sum())
                promise(changed == 0, f"{changed} of {len(rows)} rows differ beside one with {shown(manner)}")

    def test_seed_and_position_decide(self) -> None:
        """Draw the same token for the same seed and position, whatever the history; other tokens for others."""
        flat = torch.zeros(1000)
        same = {int(self.sample(flat, [sampling(seed=4)], [n] * 3).tokens[0]) for n in range(5)}
        promise(len(same) == 1, f"one seed and position give {len(same)} tokens")
        seeds, places = range(8), range(1, 6)
        many = {int(self.sample(flat, [sampling(seed=s)], [0] * n).tokens[0]) for s in seeds for n in places}
        promise(len(many) > 30, f"40 pairs of seed and position give only {len(many)} tokens of 1000")
        far = [sampling(seed=seed) for seed in (0, 1, 2**63 - 1, -(2**63), 2**64 - 1)]
        promise(len(set(self.sample(flat, far).tokens.tolist())) >= 3, "seeds of 64 bits collapse")

    def test_draws_at_one_position(self) -> None:
        """Use separate noise for each draw at a position."""
        flat, seeds = torch.zeros(1000), range(20)
        first, again, second = (
            self.make().sample(
                flat.expand(len(seeds), -1).clone(),
                _batch([SampleRow(n, sampling(seed=n), 1, 1, draw=draw) for n in seeds], _ids(len(seeds))),
            )
            for draw in (0, 0, 1)
        )
        promise(torch.equal(first.tokens, again.tokens), "the same draw gives another token")
        same = int((first.tokens == second.tokens).sum())
        promise(same < 3, f"another draw gives the same token for {same} of {len(seeds)} seeds")

    def test_guesses_are_verified(self) -> None:
        """Verify guesses without changing the tokens of greedy rows, or how often other rows draw a token, before or
        behind a guess.
        """
        best = _VOCAB - 1
        for guess in (best, 3):
            tokens = self._verify([sampling(temperature=0.0)], guess).tokens.tolist()
            promise(tokens == [best, best], f"greedy with the guess {guess} says {tokens}, not {[best, best]}")
            found = self._verify([sampling(seed=seed) for seed in range(_DRAWS)], guess).tokens.view(_DRAWS, 2)
            wanted = _STEPS.softmax(0)
            _distributed(found[:, 0], wanted, f"the guess {guess}")
            _distributed(found[found[:, 0] == guess, 1], wanted, f"behind the guess {guess}")

    def test_a_slot_keeps_nothing_of_its_former_request(self) -> None:
        """Treat a new request in a slot by its own parameters, and one that comes back as the first time."""
        sampler, history = self.make(), torch.zeros(1, 8, dtype=torch.int32)
        for given in (*MANNERS, *MANNERS):
            for seed in range(3):
                row = SampleRow(0, sampling(seed=seed, **given), 1, 1)
                used = sampler.sample(_wide(), _batch([row], history)).tokens
                fresh = self.make().sample(_wide(), _batch([row], history)).tokens
                promise(torch.equal(used, fresh), f"a slot that was used before draws otherwise with {given}")

    def test_rows_that_are_not_finite(self) -> None:
        """Report NaN and infinity for their row, whose token is still an id, without effect on its neighbours."""
        for value in (math.nan, math.inf, -math.inf):
            for given in ({"temperature": 0.0}, {"repetition_penalty": 1.1, "logprobs": 1}):
                rows = [sampling(seed=seed, **given) for seed in range(3)]
                logits = _STEPS.expand(3, -1).clone()
                logits[1] = value
                sampled = self.sample(logits, rows, [1])
                promise(sampled.finite.tolist() == [True, False, True], f"{value}: finite is {sampled.finite.tolist()}")
                promise(
                    0 <= int(sampled.tokens[1]) < _VOCAB, f"{value}: token {int(sampled.tokens[1])} is not a token id"
                )
                wanted = self.sample(_STEPS, rows, [1]).tokens
                promise(torch.equal(sampled.tokens[[0, 2]], wanted[[0, 2]]), f"{value}: a neighbour's token changed")

    def test_logprobs_are_those_of_the_model(self) -> None:
        """Return log-probabilities of the model's raw logits to rows that ask; none to others."""
        rows = [sampling(), sampling(logprobs=2, logit_bias=((0, 9.0),)), sampling(logprobs=0, temperature=0.1)]
        sampled, wanted = self.sample(_STEPS, rows), _STEPS.log_softmax(0)
        tokens, own, ranks, values, ids = _told(sampled, [1, 2], [2, 0])
        promise(torch.equal(tokens, sampled.tokens[1:]), "logprobs are of other tokens than those that were chosen")
        promise(len(own) == 2 and values.shape[1] >= 2, "two rows asked for logprobs, one for the two likeliest tokens")
        error = max(float((own - wanted[tokens]).abs().max()), float((values - wanted[ids]).abs().max()))
        promise(error < 1e-5, f"logprobs differ by {error:.1e} from those of the raw logits")
        promise(ranks.tolist() == (_VOCAB - tokens).tolist(), f"ranks are {ranks.tolist()}")
        promise(ids[0, :2].tolist() == [_VOCAB - 1, _VOCAB - 2], f"the two likeliest tokens are {ids[0, :2].tolist()}")
        plain = self.sample(_STEPS, [sampling()])
        promise(plain.logprobs is None and plain.ranked is None, "logprobs are computed although no row asks for them")

    def test_logprobs_of_each_mode(self) -> None:
        """Return to rows that ask the value of the drawn token in each mode that the sampler names."""
        shaped = {"logit_bias": ((0, 9.0),), "allowed_token_ids": (0, 11, 12, 13, 14), "presence_penalty": 0.5}
        rows = [
            sampling(logprobs=2, temperature=0.0, **shaped),
            sampling(logprobs=2, temperature=1.5, **shaped),
            sampling(),
            sampling(logprobs=2, temperature=1.5, top_k=3, **shaped),
            sampling(logprobs=2, top_p=0.5),
            sampling(logprobs=2, min_p=0.5),
        ]
        asking = [0, 1, 3, 4, 5]
        changed = torch.full((_VOCAB,), -math.inf)
        changed[[0, 11, 12, 13, 14]] = _STEPS[[0, 11, 12, 13, 14]]
        changed[0] += 9.0
        changed[13] -= 0.5  # of the history
        top, probs = changed / 1.5, _STEPS.softmax(0)
        nucleus = _STEPS.masked_fill(probs.flip(0).cumsum(0).flip(0) - probs >= 0.5, -math.inf)
        likely = _STEPS.masked_fill(probs < 0.5 * probs.max(), -math.inf)
        three = top.masked_fill(top < top.sort().values[-3], -math.inf)
        for mode in self.make().logprobs_modes:
            sampled = self.sample(_STEPS, rows, [5, 13], 1, mode=mode)
            tokens, own, _, values, ids = _told(sampled, asking, [2] * 5)
            promise(torch.equal(tokens, sampled.tokens[asking]), f"{mode.value}: of other tokens than those chosen")
            wanted = torch.stack([changed, top, three, nucleus, likely] if mode.processed else [_STEPS] * 5)
            wanted = wanted.log_softmax(-1) if mode.normalised else wanted
            for row in range(5):
                error = (
                    torch.cat((own[row : row + 1], values[row])) - wanted[row, [int(tokens[row]), *ids[row].tolist()]]
                )
                worst = float(error.abs().max())
                promise(worst < 1e-5, f"{mode.value} differs by {worst:.1e} with {shown(rows[asking[row]])}")

    # ------------------------------------------------------------------------------------ parts

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[TokenSampling],
        history: Sequence[int] = (),
        prompt: int | None = None,
        mask: bytes | None = None,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> Sampled:
        """Sample one row for each of the parameters with a new sampler; all rows have the same history."""
        ids = torch.zeros(len(rows), max(64, len(history) + 1), dtype=torch.int32)
        ids[:, : len(history)] = torch.tensor(history, dtype=torch.int32)
        num_prompt = len(history) if prompt is None else prompt
        batch = [SampleRow(n, row, num_prompt, len(history), mask) for n, row in enumerate(rows)]
        wide = logits.expand(len(rows), -1) if logits.dim() == 1 else logits
        return self.make().sample(wide.clone(), _batch(batch, ids, logprobs_mode=mode))

    def _follows(
        self, logits: torch.Tensor, probs: torch.Tensor, history: Sequence[int] = (), prompt: int = 0, **given: Any
    ) -> None:
        """Run a chi-square test; its seeds are fixed, so the result is always the same."""
        rows = [sampling(seed=seed, **given) for seed in range(_DRAWS)]
        _distributed(self.sample(logits, rows, history, prompt).tokens, probs, str(given))

    def _verify(self, rows: Sequence[TokenSampling], guess: int) -> Sampled:
        """Verify two draws for each of the parameters: for a guess, and behind it."""
        ids = _ids(len(rows))
        ids[:, 1] = guess
        batch = [SampleRow(n, row, 1, position) for n, row in enumerate(rows) for position in (1, 2)]
        logits, guesses = _STEPS.repeat(len(batch), 1), torch.tensor([guess, -1]).repeat(len(rows))
        return self.make().verify(logits, _batch(batch, ids), guesses)


def _told(sampled: Sampled, asking: Sequence[int], tops: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the log-probabilities of rows that asked, in whichever form the sampler gave them."""
    if sampled.ranked is not None:
        return sampled.ranked
    found = sampled.logprobs
    promise(found is not None and len(found) == len(asking), f"{len(asking)} rows asked for logprobs")
    return rank(found, sampled.tokens[list(asking)], tops) if found is not None else ()


def _distributed(tokens: torch.Tensor, probs: torch.Tensor, case: str) -> None:
    seen = torch.bincount(tokens, minlength=len(probs)).double()
    wanted = probs.double() * len(tokens)
    inside = wanted > 0
    promise(not bool(seen[~inside].any()), f"{case}: tokens come that were cut off: {shown(seen.tolist())}")
    distance = float(((seen - wanted)[inside] ** 2 / wanted[inside]).sum())
    free = int(inside.sum()) - 1
    bound = free + 4 * math.sqrt(2 * free) + 8  # beyond p = 0.0001
    promise(distance <= bound, f"{case}: frequencies {shown(seen.tolist())} do not follow the distribution")


def _wide() -> torch.Tensor:
    return _STEPS.unsqueeze(0).clone()
