"""`Shares`: what was computed for each API key, for policies that divide the engine among keys.

A key's figure grows by one for each of its tokens that is computed for the first time. A key that comes back begins
where the least served of the active keys stands, so that nobody saves up; a key that leaves keeps its figure for as
long as it is above that (virtual token counters: Sheng et al., Fairness in Serving Large Language Models, 2024).
"""

from __future__ import annotations

from collections import Counter

from ferrule.engine.request import Request


class Shares:
    """Bounded by the keys that have requests here, and those that were served more than one of these."""

    def __init__(self, counts: bool = True) -> None:
        self.counts = counts  # False: nobody asks, and nothing is counted
        self._served: dict[str, float] = {}
        self._open: Counter[str] = Counter()  # requests of each key that are here

    def enter(self, key: str) -> None:
        """Count a request of this key that is added."""
        if not self.counts:
            return
        if not self._open[key]:
            least = min((self._served[other] for other, count in self._open.items() if count), default=0.0)
            self._served[key] = max(self._served.get(key, 0.0), least)
        self._open[key] += 1

    def leave(self, key: str) -> None:
        """Count a request of this key that has ended."""
        if not self.counts:
            return
        self._open[key] -= 1
        if self._open[key]:
            return
        del self._open[key]
        least = min((self._served[other] for other in self._open), default=float("inf"))
        self._served = {name: used for name, used in self._served.items() if name in self._open or used > least}

    def spend(self, key: str, tokens: int) -> None:
        self._served[key] += tokens

    def charge(self, request: Request) -> None:
        """Count what was computed of a request, but neither what was in the cache nor what is computed again."""
        fresh = request.confirmed - max(request.charged, request.cached) if self.counts else 0
        if fresh > 0:
            self.spend(request.spec.key_name, fresh)
            request.charged = request.confirmed

    def served(self, key: str) -> float:
        return self._served.get(key, 0.0)
