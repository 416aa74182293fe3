"""API keys: from options and a file, their limits in several processes, reading the file again."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ferrule.api_keys import CALLER, Caller, Callers, read_file
from ferrule.config import Config, FrontendConfig, LimitsConfig
from ferrule.errors import ConfigError, OverloadedError
from ferrule.shared_memory.board import Board


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def config(file: Path | None = None, keys: tuple[str, ...] = (), **limits: Any) -> Config:
    return Config(
        frontend=FrontendConfig(api_key=keys, api_key_file=None if file is None else str(file)),
        limits=LimitsConfig(**limits),
    )


def written(folder: Path, text: str) -> Path:
    file = folder / "keys.yaml"
    file.write_text(text)
    return file


def found(callers: Callers, key: str) -> Caller:
    caller = callers.find(key.encode())
    assert caller is not None
    return caller


def test_keys_of_options_and_of_the_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"third").hexdigest()
    file = written(
        tmp_path,
        f"alice: first\nbob: {{key: second, max_requests: 2}}\n"
        f"carol: {{sha256: {digest}, tokens_per_minute: 9, admin: true}}\n",
    )
    callers = Callers(config(file, ("given",), max_key_requests=7))
    assert found(callers, "given").name == "key-1"
    assert (found(callers, "first").name, found(callers, "first").max_requests) == ("alice", 7)
    assert found(callers, "second").max_requests == 2
    carol = found(callers, "third")
    assert (carol.name, carol.tokens_per_minute, carol.admin) == ("carol", 9, True)
    assert callers.any_admin
    assert callers.find(b"fourth") is None
    assert not Callers(config())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- secret", "an entry for each key"),
        ("a: 12345678", "Quote a key"),
        ("a: {key: x, sha256: " + "a" * 64 + "}", "either key or sha256"),
        ("a: {max_requests: 3}", "either key or sha256"),
        ("a: {key: secret, max_requests: 0}", "max_requests"),
        ("a: {key: secret, quota: 3}", "quota"),
        ("a: {sha256: secret}", "sha256"),
        ("'a b': secret", "a name has"),
        ("a: secret\nb: secret", "the same key: a, b"),
        ("key-1: secret", "the same name: key-1"),
        ("secret: 1\nsecret: 2", ", line 2: a key is given twice, first in line 1."),
        ("a: !secret x", ", line 1: a tag that is not in YAML 1.2's core schema."),
        ("a: [secret", ", line 1: not YAML."),
        ("a: secret\x00", ": not YAML."),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Callers(config(written(tmp_path, text), ("other",)))
    assert says in str(error.value)
    assert "secret" not in str(error.value)


def test_a_file_that_is_not_there_or_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "keys.yaml")
    with pytest.raises(ConfigError, match="not a file"):
        read_file(tmp_path)


def test_requests_in_progress_are_limited_over_all_processes(tmp_path: Path) -> None:
    file = written(tmp_path, "alice: {key: a, max_requests: 2}\nbob: b")
    Board.create(tmp_path / "board", 2)
    one, other = (Callers(config(file), Board(tmp_path / "board", row)) for row in (1, 2))
    alice = found(one, "a")
    with one.visit(alice), other.visit(alice):
        visit = CALLER.get()
        assert visit is not None
        assert visit.name == "alice"
        for callers in (one, other):
            with pytest.raises(OverloadedError), callers.visit(alice):
                pass
        with other.visit(found(other, "b")):
            pass
    assert CALLER.get() is None
    with one.visit(alice):
        pass


def test_tokens_of_a_minute_are_limited_over_all_processes(tmp_path: Path) -> None:
    file, clock = written(tmp_path, "alice: a"), Clock()
    Board.create(tmp_path / "board", 2)
    limited = config(file, key_tokens_per_minute=100)
    one, other = (Callers(limited, Board(tmp_path / "board", row), clock) for row in (1, 2))
    alice = found(one, "a")
    clock.now = 130.0
    one.spend("alice", 60)
    with other.visit(alice):
        other.spend("alice", 41)  # what has begun goes on
    with pytest.raises(OverloadedError) as refused, one.visit(alice):
        pass
    assert refused.value.retry_after == 50
    clock.now = 180.0
    with one.visit(alice):
        one.spend("alice", 1)


def test_reading_again_keeps_what_is_in_progress(tmp_path: Path) -> None:
    """Keep it also when the keys have other places in the file, or are gone."""
    file = written(tmp_path, "alice: {key: a, max_requests: 1}\nbob: {key: b, max_requests: 1}")
    callers = Callers(config(file))
    bob = found(callers, "b")
    with callers.visit(found(callers, "a")), callers.visit(bob):
        written(tmp_path, "carol: c\nbob: {key: b2, max_requests: 1}")
        assert callers.read(config(file)) == ("carol", "bob")
        assert callers.find(b"a") is None
        assert callers.find(b"b") is None
        with pytest.raises(OverloadedError), callers.visit(found(callers, "b2")):
            pass
        with callers.visit(found(callers, "c")):
            pass
        written(tmp_path, "bob: [")
        with pytest.raises(ConfigError):
            callers.read(config(file))
        assert found(callers, "c").name == "carol"
    with callers.visit(found(callers, "b2")):
        pass


@pytest.mark.advisory("CVE-2025-59425")
def test_every_key_is_compared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare digests of one length, in constant time, and leave none out after a match, so that time tells nothing."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    callers = Callers(config(written(tmp_path, "a: first\nb: second\n"), ("third",)))
    monkeypatch.setattr("ferrule.api_keys.hmac", SimpleNamespace(compare_digest=compare))
    for key in (b"", b"t", b"third", b"first", b"firsu", b"x" * 100_000):
        compared.clear()
        callers.find(key)
        assert compared == [(32, 32)] * 3, key
