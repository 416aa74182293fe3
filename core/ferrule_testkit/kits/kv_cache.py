"""The kit of the KV-cache manager, which is not a plugin but which every scheduler that shares prefixes relies on.

A dictionary records the tokens that each block contains; whatever the manager returns is compared with it.
"""

from __future__ import annotations

import random
from typing import Any

from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest, TokenSampling
from ferrule_testkit.kits.base import Kit, promise

_SIZE = 3
_FULL = CacheGroup("full", _SIZE)
_SLIDING = CacheGroup("sliding", _SIZE, 5)


class KVCacheKit(Kit):
    """The manager never gives a block to two requests, and a prefix that it finds holds exactly that prefix.

    `plugin` is a class with the methods of `ferrule.engine.cache.KVCacheManager`.
    """

    kind = "kv_cache"
    rounds: int = 400

    def test_one_group(self) -> None:
        """Keep every promise for random requests on one group of full attention, in a pool that is too small for all of
        them.
        """
        self._run((_FULL,))

    def test_a_window(self) -> None:
        """Keep every promise for a sliding window, whose dead blocks go to other requests."""
        self._run((_SLIDING,))

    def test_two_groups_in_one_pool(self) -> None:
        """Keep every promise for full and sliding layers that draw from one pool."""
        self._run((_FULL, _SLIDING))

    def test_scopes_never_meet(self) -> None:
        """Keep equal prompts apart by their adapters, media and salts."""
        hits = self._run((_FULL,), scopes=True)
        promise(hits > 0, "no prefix was ever found again")

    def _run(self, groups: tuple[CacheGroup, ...], scopes: bool = False) -> int:
        hits = 0
        for seed in range(4):
            hits += _Model(self.plugin, groups, random.Random(seed), scopes).run(self.rounds)
        return hits


class _Model:
    """A model of the cache: `contents[group, block]` are the (scope, prefix) that each of the block's cells was
    computed from.
    """

    def __init__(self, manager: Any, groups: tuple[CacheGroup, ...], rng: random.Random, scopes: bool) -> None:
        self.groups, self.rng, self.scopes = groups, rng, scopes
        limits = SchedulerLimits(
            groups=groups, num_blocks=24, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=40, cache_root=b"r"
        )
        self.manager = manager(limits)
        self.contents: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.live: dict[str, dict[str, Any]] = {}
        self.hits = 0

    def run(self, rounds: int) -> int:
        for number in range(rounds):
            choice = self.rng.random()
            if choice < 0.4 and len(self.live) < 6:
                self.begin(f"r{number}")
            elif choice < 0.85 and self.live:
                self.grow(self.rng.choice(list(self.live)))
            elif self.live:
                self.end(self.rng.choice(list(self.live)))
            if choice > 0.995:
                self.manager.reset()
            self.manager.check(frozenset(self.live))
        for id in list(self.live):
            self.end(id)
        promise(self.manager.reset(), "prefixes are kept from a reset although no request runs")
        promise(not self.manager.pool.num_used, "blocks are in use although no request runs")
        return self.hits

    def begin(self, id: str) -> None:
        scope = self.rng.choice((None, "a", "")) if self.scopes else None
        ids = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 30))]
        sampling = TokenSampling(seed=0, max_tokens=1)
        request = EngineRequest(id=id, prompt_ids=tuple(ids), work=sampling, cache_salt=scope)
        chain = self.manager.chain(request)
        hit = self.manager.match(chain, ids)
        promise(
            hit.tokens < len(ids) and hit.tokens % _SIZE == 0, f"{hit.tokens} of {len(ids)} tokens are said to be here"
        )
        upto = min(len(ids), hit.tokens + self.rng.randint(1, 8))
        blocks = self.manager.reserve(id, upto, hit, chain)
        if blocks is None:
            return
        tables = [list(part) for part in blocks]
        self.live[id] = {"scope": scope, "ids": ids, "tables": tables, "computed": upto}
        self.hits += hit.tokens
        for group, table in enumerate(tables):
            dead = self.groups[group].dead_before(hit.tokens)
            for position in range(dead - dead % _SIZE, hit.tokens):
                promise(
                    bool(table[position // _SIZE]), f"{id} has no block for position {position}, which it will read"
                )
                self.expect(id, group, position)
        self.write(id, hit.tokens, upto)
        self.manager.confirm(id, ids, upto)

    def grow(self, id: str) -> None:
        request = self.live[id]
        if self.rng.random() < 0.5:
            request["ids"].append(self.rng.randrange(2))
        start, upto = request["computed"], min(len(request["ids"]), request["computed"] + self.rng.randint(1, 6))
        if upto == start or upto > 40:
            return
        fresh = self.manager.reserve(id, upto)
        if fresh is None:
            self.end(id)
            return
        for table, new in zip(request["tables"], fresh or [()] * len(self.groups), strict=True):
            table += new
        for group in range(len(self.groups)):
            for position in range(self.groups[group].dead_before(start), start):
                self.expect(id, group, position)
        self.write(id, start, upto)
        request["computed"] = upto
        self.manager.confirm(id, request["ids"], upto)

    def end(self, id: str) -> None:
        del self.live[id]
        self.manager.release(id)

    def write(self, id: str, start: int, stop: int) -> None:
        """Write cells as the device does: a cell depends on everything before it."""
        request = self.live[id]
        for group, table in enumerate(request["tables"]):
            for position in range(start, stop):
                block = table[position // _SIZE]
                promise(0 < block < 24, f"{id} is to write position {position} to block {block}")
                place = position % _SIZE
                before = self.contents.get((group, block), ())[:place] if place else ()
                cell = (request["scope"], tuple(request["ids"][: position + 1]))
                for other in range(len(self.groups)):  # one block is one page of one group
                    self.contents.pop((other, block), None)
                self.contents[group, block] = (*before, cell)

    def expect(self, id: str, group: int, position: int) -> None:
        request = self.live[id]
        block = request["tables"][group][position // _SIZE]
        cells = self.contents.get((group, block), ())
        wanted = (request["scope"], tuple(request["ids"][: position + 1]))
        found = cells[position % _SIZE] if position % _SIZE < len(cells) else None
        promise(found == wanted, f"{id} reads position {position} from block {block}, which holds {found}")
