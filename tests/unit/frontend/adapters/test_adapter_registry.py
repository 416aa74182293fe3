"""The table of adapters of several processes, names that are looked for, and loads that end in every way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ferrule.config import Resolved
from ferrule.config.parse import parse
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import EngineDead, ForbiddenError, NotFoundError, OverloadedError, RequestError, UnavailableError
from ferrule.frontend.adapters import registry, resolving
from ferrule.frontend.adapters.registry import Adapters
from ferrule.frontend.adapters.resolving import Resolvers
from ferrule.interfaces.lora_resolver import LoRAResolver, ResolverContext
from ferrule.shared_memory.board import Board
from tests.fakes.engine import FakeEngine
from tests.fakes.frontend import FakePlugins, until


class Engine(FakeEngine):
    """An engine that reads adapters: `fault` is raised for each, and `gate` must be open."""

    def __init__(self, board: Board | None = None) -> None:
        super().__init__()
        self.board = board or Board()
        self.read: list[tuple[str, str]] = []  # served names and folders
        self.fault: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.slow = self.gate

    async def call(self, name: str, *args: Any) -> Any:
        if name == "describe_adapter":
            return {}
        assert name == "read_adapter"
        _, path, served = args
        self.read.append((served, path))
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return None


def config(*argv: str) -> Resolved:
    return resolve(parse(["m", "--enable-lora", *argv], env=Environment()).config)


def folder(root: Path, name: str) -> str:
    place = root / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "adapter_config.json").write_text("{}")
    return str(place)


class Known(LoRAResolver):
    """A resolver of names in a table of folders; others are unknown, or what is raised."""

    folders: dict[str, str | Exception]
    asked: list[str]

    async def resolve(self, lora_name: str) -> Path | None:
        self.asked.append(lora_name)
        await asyncio.sleep(0)
        found = self.folders.get(lora_name)
        if isinstance(found, Exception):
            raise found
        return None if found is None else Path(found)


def resolving_with(folders: dict[str, str | Exception]) -> tuple[FakePlugins, list[str]]:
    asked: list[str] = []
    made = type("Made", (Known,), {"folders": folders, "asked": asked})
    return FakePlugins(lora_resolver={"known": made}), asked


# ------------------------------------------------------------------------------------------------ the table


async def test_processes_have_one_table(tmp_path: Path) -> None:
    """Change it from both sides, also at once: each sees what the other did, without a message."""
    boards = [Board.create(tmp_path / "board", 2), Board(tmp_path / "board", 1), Board(tmp_path / "board", 2)]
    given = config("--allowed-lora-path", str(tmp_path), "--lora-modules", "first=/x")
    one, two = (Adapters(given, FakePlugins(), Engine(board)) for board in boards[1:])
    assert [entry.name for entry in two.all()] == ["first"]
    await one.load("a", folder(tmp_path, "a"))
    before = two.known("a")
    assert before == one.known("a")
    await asyncio.gather(
        *(side.load(f"n{n}", folder(tmp_path, f"n{n}")) for n in range(20) for side in [(one, two)[n % 2]])
    )
    assert [entry.name for entry in one.all()] == [entry.name for entry in two.all()]
    assert len(one.all()) == 22
    await two.load("a", folder(tmp_path, "b"), in_place=True)
    after = one.known("a")
    assert before is not None
    assert after is not None
    assert before.adapter.name != after.adapter.name
    await two.unload("first")
    with pytest.raises(NotFoundError):
        one.known("first")
    taken = await asyncio.gather(
        *(side.load("same", folder(tmp_path, "a")) for side in (one, two)), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in taken) == ["NoneType", "RequestError"]


async def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    engine = Engine()
    adapters = Adapters(config("--allowed-lora-path", str(tmp_path)), FakePlugins(), engine)
    await adapters.load("a", folder(tmp_path, "a"))
    before = adapters.known("a")
    for fault, raised in ((RequestError("of rank 99"), RequestError), (EngineDead("gone"), UnavailableError)):
        engine.fault = fault
        for name, in_place in (("b", False), ("a", True)):
            with pytest.raises(raised) as caught:
                await adapters.load(name, folder(tmp_path, "b"), in_place)
            assert getattr(caught.value, "param", "lora_path") == "lora_path"
    assert (adapters.known("a"), len(adapters.all())) == (before, 1)


@pytest.mark.parametrize(
    ("name", "path", "error"),
    [
        ("m", "a", RequestError),
        ("", "a", RequestError),
        ("x\n", "a", RequestError),
        ("x,y", "a", RequestError),
        ("x", "../outside", ForbiddenError),
        ("x", "link", ForbiddenError),
        ("x", "linked", ForbiddenError),
        ("x", "none", RequestError),
    ],
)
async def test_what_is_refused_before_the_engine_is_asked(
    name: str, path: str, error: type[RequestError], tmp_path: Path
) -> None:
    root, engine = tmp_path / "root", Engine()
    folder(root, "a")
    folder(tmp_path, "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (Path(folder(root, "linked")) / "adapter_model.bin").symlink_to(tmp_path / "outside" / "adapter_config.json")
    adapters = Adapters(config("--allowed-lora-path", str(root)), FakePlugins(), engine)
    with pytest.raises(error):
        await adapters.load(name, f"{root}/{path}")
    assert engine.read == []


async def test_loads_and_the_table_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MAX_LOADS", 3)
    monkeypatch.setattr(registry, "_MAX_ADAPTERS", 2)
    engine = Engine()
    adapters = Adapters(config("--allowed-lora-path", str(tmp_path)), FakePlugins(), engine)
    engine.gate.clear()
    places = [folder(tmp_path, f"n{n}") for n in range(5)]
    tasks = [asyncio.ensure_future(adapters.load(f"n{n}", place)) for n, place in enumerate(places)]
    await until(lambda: engine.read and sum(task.done() for task in tasks) == 2)
    engine.gate.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = [type(each).__name__ for each in found]
    assert sorted(kinds) == ["NoneType", "NoneType", "OverloadedError", "OverloadedError", "RequestError"]


async def test_a_folder_that_hangs_holds_up_no_other_and_takes_one_place(tmp_path: Path) -> None:
    engine = Engine()
    adapters = Adapters(config("--allowed-lora-path", str(tmp_path)), FakePlugins(), engine)
    engine.gate.clear()
    share, disk = folder(tmp_path, "share"), folder(tmp_path, "disk")
    waits = [asyncio.ensure_future(adapters.load(name, share)) for name in ("a", "b", "a")]
    await until(lambda: engine.read)
    engine.slow, engine.gate = engine.gate, asyncio.Event()
    engine.gate.set()
    await adapters.load("c", disk)
    assert [name for name, path in engine.read if path == share] == [engine.read[0][0]]
    engine.slow.set()
    found = await asyncio.gather(*waits, return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["NoneType", "NoneType", "RequestError"]
    assert sorted(entry.name for entry in adapters.all()) == ["a", "b", "c"]


async def test_without_adapters_none_is_looked_for() -> None:
    plain = resolve(parse(["m"], env=Environment()).config)
    adapters = Adapters(plain, FakePlugins(), Engine())
    assert await adapters.find("m") is None
    with pytest.raises(NotFoundError, match="Valid names: m"):
        await adapters.find("a")
    for work in (adapters.load("a", "/a"), adapters.unload("a"), adapters.ensure("a", "/a")):
        with pytest.raises(RequestError, match="--enable-lora"):
            await work


# ------------------------------------------------------------------------------------------------ resolvers


async def test_a_name_is_resolved_once_and_stays(tmp_path: Path) -> None:
    plugins, asked = resolving_with({"a": folder(tmp_path, "a")})
    engine = Engine()
    adapters = Adapters(config("--lora-resolvers", "known"), plugins, engine)
    found = await asyncio.gather(*(adapters.find("a") for _ in range(50)))
    assert {one.name for one in found if one is not None} == {"a"}
    assert (asked, len(engine.read)) == (["a"], 1)
    await adapters.unload("a")
    assert await adapters.find("a") is not None
    await adapters.close()


async def test_what_is_unknown_or_broken_is_not_asked_for_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    plugins, asked = resolving_with({"raises": OSError("planted"), "bad": folder(tmp_path, "bad")})
    engine = Engine()
    adapters = Adapters(config("--lora-resolvers", "known"), plugins, engine)
    monkeypatch.setattr(adapters._resolvers, "_clock", lambda: now[0])
    engine.fault = RequestError("The adapter has NaN.")
    for _ in range(3):
        for name, error, said in (
            ("nobody", NotFoundError, "does not exist"),
            ("raises", NotFoundError, "does not exist"),
            ("bad", RequestError, "has NaN"),
        ):
            with pytest.raises(error, match=said) as caught:
                await adapters.find(name)
            assert caught.value.param == "model"
    assert asked == ["nobody", "raises", "bad"]
    now[0] += 11
    engine.fault = None
    assert await adapters.find("bad") is not None
    for odd in ("", "x" * 300, "a\n", " a"):
        if odd:
            with pytest.raises(NotFoundError):
                await adapters.find(odd)
    assert asked == ["nobody", "raises", "bad", "bad"]


class Slow(LoRAResolver):
    """A resolver whose answers the test gives."""

    gate: asyncio.Event

    async def resolve(self, lora_name: str) -> Path | None:
        await self.gate.wait()
        return None


async def test_questions_are_bounded_and_outlive_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ResolverContext(base_models=(), cache_dir=None, repositories=(), fetch=lambda name, choose: Path())
    resolver = Slow(context)
    resolver.gate = asyncio.Event()

    async def load(name: str, place: Path) -> None:
        raise AssertionError

    resolvers = Resolvers([("slow", resolver)], load)
    tasks = [asyncio.ensure_future(resolvers.find(f"n{n}")) for n in range(resolving._MAX_AT_ONCE)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await resolvers.find("one more")
    again = asyncio.ensure_future(resolvers.find("n0"))
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    resolver.gate.set()
    await again
    await resolvers.close()
    monkeypatch.setattr(resolving, "_MAX_UNKNOWN", 2)
    for n in range(5):
        await resolvers.find(f"m{n}")
    assert len(resolvers._unknown) == 2
