"""What an episode of the simulator runs with, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ferrule.engine.cache import footprint
from ferrule.interfaces.scheduler import GuessLimits, SchedulerLimits
from ferrule.types import CacheGroup, Targets

POLICIES = ("fcfs", "priority", "chaos", "bully")


@dataclass(frozen=True)
class Setup:
    """The settings of one episode."""

    limits: SchedulerLimits
    policy: str
    vocab_size: int
    bases: tuple[tuple[int, ...], ...]  # beginnings that prompts share
    load: float  # chance of a new request in a step
    storm: bool  # short prompts with long answers: everyone grows, and the cache runs out again and again
    pooling: float = field(default=0.0, repr=False)  # chance that a request is pooled; not what others are drawn from


def draw_groups(rng: random.Random) -> tuple[CacheGroup, ...]:
    size = rng.randint(1, 4)
    full = CacheGroup("full", size)
    sliding = CacheGroup("sliding", size, rng.randint(1, 12))
    other = CacheGroup("sliding", size, rng.randint(1, 6))
    return rng.choice([(full,), (full,), (sliding,), (full, sliding), (full, sliding, other), (sliding, other)])


def maybe_recurrent(groups: tuple[CacheGroup, ...], rng: random.Random) -> tuple[CacheGroup, ...]:
    """Add a group without blocks beside the others, or use it alone, half of the time."""
    if rng.random() < 0.5:
        return groups
    return rng.choice([groups, groups, groups, ()]) + (CacheGroup("recurrent", groups[0].block_size),)


def draw_setup(rng: random.Random, policy: str | None, depth: int | None) -> Setup:
    """Draw the settings of an episode, small on purpose, so that more corner cases occur per second."""
    groups = draw_groups(rng)
    storm = rng.random() < 0.25
    chunked = rng.random() < 0.8
    budget = rng.randint(1, 16)
    num_blocks = 1 + rng.randint(max(3, 2 * len(groups)), 40)
    limits = SchedulerLimits(
        groups=groups,
        num_blocks=num_blocks,
        max_num_seqs=rng.randint(4, 8) if storm else rng.randint(1, 8),
        max_num_batched_tokens=budget,
        max_model_len=0,
        depth=depth or rng.randint(1, 3),
        chunked_prefill=chunked,
        prefix_caching=rng.random() < 0.75,
        hash_algo=rng.choice(("sha256", "builtin")),
        long_prefill_token_threshold=rng.choice((0, 0, rng.randint(1, 6))),
        cache_root=rng.randbytes(8),
    )
    longest = 2
    while longest < (120 if storm else 60) and footprint(limits, longest) <= num_blocks - 1:
        longest += 1
    longest = max(2, longest - rng.randint(0, 3)) if rng.random() < 0.8 else longest + 4
    if not chunked:
        limits = replace(limits, max_num_batched_tokens=max(budget, longest))
    vocab = rng.randint(3, 24)
    bases = tuple(tuple(rng.randrange(vocab) for _ in range(longest)) for _ in range(rng.randint(1, 3)))
    groups = maybe_recurrent(groups, random.Random(repr(bases)))  # takes no room, so that nothing above changes
    prompts = random.Random(repr((bases, groups)))  # another generator, so that nothing above changes
    num_snapshots = prompts.choice((0, 1, 2, 3, 5, 8, 20)) if not groups[-1].paged else 0
    num_partial = 8 if storm else prompts.choice((1, 1, 2, 3))  # in a storm nothing keeps prompts apart
    limits = replace(
        limits,
        max_model_len=longest,
        groups=groups,
        num_snapshots=num_snapshots,
        max_num_partial_prefills=num_partial,
        max_long_partial_prefills=prompts.randint(1, num_partial),
        prompt_share=prompts.choice((0, 2)),
        encode_budget=prompts.choice((0, 1, 4)),
        encoded_tokens=prompts.choice((0, 5, 5, 8)),
        targets=Targets(prompts.choice((0.0, 0.0, 0.5, 20.0)), prompts.choice((0.0, 0.0, 0.01, 1.0))),
    )
    guesses = random.Random(repr((bases, groups, "wanted")))
    limits = replace(
        limits,
        guesses=GuessLimits(
            most=guesses.choice((0, 2, 5, 5, 5, 5)),
            max_len=guesses.choice((0,) * 7 + (longest // 2,)),
            max_requests=guesses.choice((0,) * 7 + (3,)),
            adaptive=guesses.random() < 0.2,
            lookahead=guesses.choice((0, 2, 5)),
        ),
    )
    policy = policy or rng.choice(("bully", "bully", *POLICIES) if storm else POLICIES)
    setup = Setup(limits, policy, vocab, bases, rng.choice((0.05, 0.3, 0.9)), storm)
    return setup if storm else maybe_pooling(setup, prompts)


def maybe_pooling(setup: Setup, rng: random.Random) -> Setup:
    """Let some requests be pooled, sometimes; or all, of a model that keeps nothing and whose prompts go whole."""
    if rng.random() > 0.08:
        return replace(setup, pooling=rng.choice((0.0, 0.0, 0.3)))
    most = max(setup.limits.max_num_batched_tokens, setup.limits.max_model_len)
    limits = replace(setup.limits, groups=(), num_snapshots=0, chunked_prefill=False, max_num_batched_tokens=most)
    return replace(setup, limits=limits, pooling=1.0)
