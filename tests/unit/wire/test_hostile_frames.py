"""What is not a message of ours is dropped, and nothing that comes on the engine's socket is ever run."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ferrule.types import EngineStats, FinishReason, RequestDelta
from ferrule.wire.engine_socket import ClientSocket, EngineSocket
from ferrule.wire.messages import Cancel, Deltas, FromEngine


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def frames(canary: Path) -> list[bytes]:
    source, encode = random.Random(0), msgspec.msgpack.encode
    evil = pickle.dumps(Canary(canary))
    good = encode((1, Cancel(("a",))))
    found = [pickle.dumps(Canary(canary), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for code in range(-128, 128):
        found.append(encode(msgspec.msgpack.Ext(code, evil)))
        found.append(encode((1, msgspec.msgpack.Ext(code, evil))))
    for kind in ("Cancel", "Submit", "Call", "Exec", "pickle", "cloudpickle", "torch.Tensor", "builtins.getattr"):
        found += [encode((1, {"type": kind, "data": evil})), encode({"type": kind}), encode([1, [kind, evil]])]
    found += [good[:at] for at in range(len(good))]
    found += [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x92\x01\xdf\xff\xff\xff\xff", b"\x91" * 100_000]
    return found + [source.randbytes(source.randrange(1, 200)) for _ in range(500)]


@pytest.mark.advisory("CVE-2024-9052", "CVE-2026-3059", "CVE-2025-66455", "CVE-2026-118375")
def test_a_thousand_foreign_frames(tmp_path: Path) -> None:
    path, canary = tmp_path / "engine.sock", tmp_path / "canary"
    engine, context = EngineSocket(path), zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(f"ipc://{path}")
    try:
        assert path.stat().st_mode & 0o077 == 0
        sent = frames(canary)
        assert len(sent) > 1000
        last = msgspec.msgpack.encode((1, Cancel(("last",))))
        messages: list[Any] = []
        for at in range(0, len(sent), 100):
            for frame in sent[at : at + 100]:
                peer.send(frame)
            messages += [message for _, message in engine.receive(0.01)]
        peer.send(last)
        for _ in range(1200):
            messages += [message for _, message in engine.receive(0.1)]
            if Cancel(("last",)) in messages:
                break
        assert messages == [Cancel(("last",))]
        assert not canary.exists()
    finally:
        peer.close(0)
        context.term()
        engine.close()


def test_a_delta_without_memory_ends_its_own_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the same message, and messages that follow, are read."""

    class Short:
        def decode(self, frame: bytes) -> Any:
            found = msgspec.msgpack.decode(frame, type=tuple[int, FromEngine])
            if isinstance(found[1], Deltas) and len(found[1].deltas) == 3:
                raise MemoryError
            return found

    def decode(raw: Any, *, type: Any, real: Any = msgspec.msgpack.decode) -> Any:
        found = real(raw, type=type)
        if isinstance(found, RequestDelta) and found.id == "large":
            raise MemoryError
        return found

    engine, client = EngineSocket(tmp_path / "engine.sock"), ClientSocket(tmp_path / "engine.sock", b"api-0")
    try:
        client.send(Cancel(("first",)))
        assert engine.receive(120.0)
        monkeypatch.setattr(client, "_decoder", Short())
        monkeypatch.setattr(msgspec.msgpack, "decode", decode)
        deltas = tuple(RequestDelta(id, token_ids=(1,)) for id in ("before", "large", "after"))
        engine.send(b"api-0", Deltas(deltas, EngineStats(running=3)))
        engine.send(b"api-0", Deltas(deltas[:1]))
        found: list[Any] = []
        while len(found) < 2:
            found += client.receive()
        error = "The server is short of memory for this output."
        ended = RequestDelta("large", finish=FinishReason.ERROR, error=error)
        assert found == [Deltas((deltas[0], ended, deltas[2]), EngineStats(running=3)), Deltas(deltas[:1])]
        assert engine.receive(120.0) == [(b"api-0", Cancel(("large",), FinishReason.ABORT))]
    finally:
        client.close()
        engine.close()
