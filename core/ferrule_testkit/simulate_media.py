"""What the simulator draws of texts that go on, of media and of guesses, and what must hold of media in plans."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from zlib import crc32

from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import Admit, EngineRequest, HostTensor, MediaItem, StepPlan

Text = tuple[tuple[int, ...], tuple[MediaItem, ...]]


def encoded(item: MediaItem) -> int:
    """Return a number that stands for the embeddings of an item."""
    return crc32(repr((item.kind, item.grid, sorted(item.data.items()))).encode())


def item_at(media: Sequence[MediaItem], position: int) -> MediaItem | None:
    return next((item for item in media if item.start <= position < item.start + item.count), None)


class Chance:
    """A source of prompts and guesses with a generator of its own, so that other draws do not change. In a storm
    prompts stay short, without media.
    """

    def __init__(self, seed: str, storm: bool, vocab_size: int) -> None:
        self._luck = luck = random.Random(seed)
        self._vocab_size = vocab_size
        self._storm = storm
        self._texts: deque[Text] = deque(maxlen=4)  # prompts and outputs
        self._showing = 0.0 if storm else luck.choice((0.0, 0.3, 0.6))  # of a prompt to have media
        chances = (0.0, 0.0, 0.0, 0.5) if storm else (0.0, 0.0, 0.5, 0.9)
        self._lucky = luck.choice(chances)  # of a guess to be right; 0: nobody guesses

    def keep(self, request: EngineRequest, output: Sequence[int]) -> None:
        """Remember a text that others may begin with."""
        self._texts.append(((*request.prompt_ids, *output), request.media))

    def prompt(self, ids: list[int]) -> Text:
        """Draw a prompt, maybe with media: `ids`, or sometimes one that begins with another request's text, as in a
        chat.
        """
        luck, media = self._luck, tuple[MediaItem, ...]()
        if self._texts and not self._storm and luck.random() < 0.4:
            text, before = luck.choice(self._texts)
            ids = [*text[: luck.randint(1, len(text))], luck.randrange(self._vocab_size)]
            media = tuple(item for item in before if item.start + item.count < len(ids))
        if self._showing and luck.random() < self._showing:
            media += self._draw_media(media[-1].start + media[-1].count if media else 0, len(ids))
        for item in media:
            ids[item.start : item.start + item.count] = [0] * item.count
        return tuple(ids), media

    def guesses(self, right: Sequence[int]) -> tuple[int, ...]:
        """Return guesses of a speculator that knows how a text continues, and often errs."""
        if not self._lucky:
            return ()
        luck, vocab = self._luck, self._vocab_size
        known = right[: luck.choice((0, 1, 2, 3, 5))]
        return tuple(token if luck.random() < self._lucky else luck.randrange(vocab) for token in known)

    def _draw_media(self, start: int, end: int) -> tuple[MediaItem, ...]:
        """Draw items of few kinds and contents at positions from `start` on."""
        found: list[MediaItem] = []
        luck = self._luck
        while start < end and len(found) < 3:
            start += luck.randint(0, 3)
            count = min(luck.randint(1, 5), end - start)
            if count > 0:
                content = bytes([luck.randrange(3), count])
                data = {"pixels": HostTensor(shape=(2,), dtype="uint8", data=content)}
                found.append(MediaItem(kind="image", digest=content, start=start, count=count, data=data))
            start += count
        return tuple(found)


class MediaLedger:
    """A record for I23: which media are encoded, and for whom."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.encoded = 0
        self._whole = not limits.chunked_prefill  # a prompt that goes whole needs all of its items
        self._budget = limits.encode_budget or limits.max_num_batched_tokens
        self._owners: dict[bytes, tuple[bytes, str | None, str | None]] = {}  # by digest, in plans

    def wrong_plan(self, plan: StepPlan) -> str | None:
        """Return how a step breaks I23, or None: a step encodes no more tokens than its budget, or one item."""
        count = sum(item.count for item in plan.encodes)
        self.encoded += len(plan.encodes)
        if self._whole or len(plan.encodes) < 2 or count <= self._budget:
            return None
        return f"I23: a step encodes {len(plan.encodes)} items of {count} tokens"

    def wrong_admission(self, admit: Admit, request: EngineRequest) -> str | None:
        """Return how an admission breaks I23, or None: a request sees media that were encoded for its adapter and salt,
        at its positions.
        """
        for item, given in zip(admit.media, request.media, strict=True):
            owner = (given.digest, request.adapter.name if request.adapter else None, request.cache_salt)
            other = self._owners.setdefault(item.digest, owner)
            if other != owner:
                return f"I23: {admit.id} sees what was encoded for {other}"
            if (item.start, item.count, item.data) != (given.start, given.count, {}):
                return f"I23: {admit.id} has media at other positions, or with data"
        return None
