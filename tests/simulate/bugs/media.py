"""Planted bugs about media: what blocks are told apart by, what is encoded, and what is kept."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ferrule.engine.cache import KVCacheManager
from ferrule.engine.encodings import Encodings
from ferrule.engine.hashing import HashChain
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.types import EngineRequest
from tests.simulate.bugs.cache import Patched


class OtherEncodings(DefaultScheduler):
    """A scheduler that keeps outputs of encoders by a subclass with a mistake."""

    encodings_cls: type[Encodings] = Encodings

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.encodings = self._prefills._encodings = self.encodings_cls(self.limits)


def _of(media: Any) -> type[KVCacheManager]:
    class Other(KVCacheManager):
        def chain(self, request: EngineRequest) -> HashChain | None:
            chain = super().chain(request)
            if chain is not None:
                chain._media = tuple(media(request.media))
            return chain

    return Other


class BlocksOmitMedia(Patched):
    cache_cls = _of(lambda media: ())


class OnlyTheFirstBlockOfAnItemIsTold(Patched):
    """The others follow from it, unless the item begins in front of what is computed."""

    cache_cls = _of(lambda media: (replace(item, count=1, start=item.start + item.count - 1) for item in media))


class SaltsShareEncodings(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        self._requests[request.id].media = request.media


class HeldEncodingForgotten(OtherEncodings):
    class encodings_cls(Encodings):
        def _make_room(self, count: int) -> None:
            holders, self._holders = self._holders, type(self._holders)()
            super()._make_room(count)
            self._holders = holders


class EncodesOverTheBudget(OtherEncodings):
    class encodings_cls(Encodings):
        def begin(self) -> None:
            super().begin()
            self._left = 100


class KeepsEveryEncoding(OtherEncodings):
    class encodings_cls(Encodings):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.room = 1 << 30


class EncodesAgainWhatIsKept(OtherEncodings):
    class encodings_cls(Encodings):
        def send(self, request: Request, start: int, end: int) -> None:
            super().send(request, start, end)
            self._encodes |= {item.digest: item for item in request.media if start <= item.start < end}


class PreemptedRequestHoldsOn(OtherEncodings):
    class encodings_cls(Encodings):
        def release(self, id: str) -> None:
            held = self._held.get(id)
            super().release(id)
            if held is not None:
                self._held[id] = held


class ForgetsInTheStepThatUsesIt(OtherEncodings):
    class encodings_cls(Encodings):
        def send(self, request: Request, start: int, end: int) -> None:
            super().send(request, start, end)
            for id, digest in self._done:
                self._let_go(id, digest)


MEDIA_BUGS = (
    BlocksOmitMedia,
    OnlyTheFirstBlockOfAnItemIsTold,
    SaltsShareEncodings,
    HeldEncodingForgotten,
    EncodesOverTheBudget,
    KeepsEveryEncoding,
    EncodesAgainWhatIsKept,
    PreemptedRequestHoldsOn,
    ForgetsInTheStepThatUsesIt,
)
