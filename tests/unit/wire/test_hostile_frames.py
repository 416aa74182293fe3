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

from ferrule.types import EngineStats, RequestDelta
from ferrule.wire.engine_socket import ClientSocket, EngineSocket
from ferrule.wire.messages import Cancel, Deltas, Fatal, Unread


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def frames(canary: Path) -> list[bytes]:
    source, encode = random.Random(0), msgspec.msgpack.encode
    evil = pickle.dumps(Canary(canary))
    good = encode(Cancel(("a",)))
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
        last = msgspec.msgpack.encode(Cancel(("last",)))
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


class Short:
    """A decoder for which whatever is longer than `most` bytes is too much."""

    def __init__(self, inner: Any, most: int) -> None:
        self.inner, self.most = inner, most

    def decode(self, data: Any) -> Any:
        if len(bytes(data)) > self.most:
            raise MemoryError
        return self.inner.decode(data)


def test_a_message_too_large_for_memory_is_lost_for_its_own_request_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    engine = EngineSocket(path)
    client = ClientSocket(path, b"one")
    client._decoder, client._delta = Short(client._decoder, 200), Short(client._delta, 200)  # type: ignore[assignment]
    small, last = RequestDelta(id="small", token_ids=(1,)), RequestDelta(id="small", token_ids=(2,))
    try:
        client.send(Cancel(()))
        while not engine.receive(0.1):
            pass
        engine.send(b"one", Deltas((RequestDelta(id="large", token_ids=(7,) * 1000), small), EngineStats(running=2)))
        engine.send(b"one", Deltas((last,)))
        found: list[Any] = []
        while Deltas((last,)) not in found:
            found += client.receive()
        assert found == [Deltas((small,), EngineStats(running=2)), Unread(("large",)), Deltas((last,))]
    finally:
        client.close()
        engine.close()


def test_a_message_that_cannot_be_read_is_the_end_of_the_engine_for_its_client(tmp_path: Path) -> None:
    engine = EngineSocket(tmp_path / "engine.sock")
    client = ClientSocket(tmp_path / "engine.sock", b"one")
    try:
        client.send(Cancel(()))
        while not engine.receive(0.1):
            pass
        engine._socket.send_multipart([b"one", b"\x80nonsense"])
        found: list[Any] = []
        while not found:
            found += client.receive()
        assert found == [Fatal("A message of the engine cannot be read.")]
    finally:
        client.close()
        engine.close()
