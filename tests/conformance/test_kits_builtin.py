"""Every built-in plugin keeps the promises of its kind: the same kits as a stranger's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ferrule.config import PluginConfig
from ferrule.engine.cache import KVCacheManager
from ferrule.env import Environment
from ferrule.plugin import KINDS, discover
from ferrule_testkit.kits import KVCacheKit, kit_of
from ferrule_testkit.kits.base import Kit, promises

PLUGINS = discover(PluginConfig(), Environment())

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("router", "openai"): {
        "calls": (
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/fake", None),
            ("POST", "/v1/completions", {"prompt": "hello"}),
            ("POST", "/v1/completions", {"prompt": ["hello", "you"], "n": 2, "stream": True}),
            ("POST", "/v1/chat/completions", CHAT),
            ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        )
    },
    ("router", "tokenize"): {
        "calls": (("POST", "/tokenize", {"prompt": "hello"}), ("POST", "/detokenize", {"tokens": [72, 105]}))
    },
    ("router", "health"): {
        "calls": (
            ("GET", "/health", None),
            ("POST", "/ping", None),
            ("GET", "/version", None),
            ("GET", "/metrics", None),
        )
    },
    ("router", "docs"): {"calls": (("GET", "/openapi.json", None), ("GET", "/docs", None), ("GET", "/redoc", None))},
    ("router", "admin"): {"calls": (("POST", "/reset_prefix_cache", None),)},
}
BUILT_IN = [ref for ref in PLUGINS.refs if ref.builtin]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases() -> Iterator[Any]:
    for ref in BUILT_IN:
        for method, _ in promises(kit_of(ref.kind)):
            yield pytest.param(ref, method, id=f"{ref.kind}-{ref.name}-{method.removeprefix('test_')}")


@pytest.mark.parametrize(("ref", "method"), list(cases()))
def test_promise(ref: Any, method: str) -> None:
    """One instance for each promise, as pytest makes them of a subclass."""
    settings = SETTINGS.get((ref.kind, ref.name), {})
    plugin = PLUGINS.load(ref.kind, ref.name)
    kit: Kit = type("Test", (kit_of(ref.kind),), {"plugin": plugin, "name": ref.name, **settings})()
    kit.setup_method()
    try:
        getattr(kit, method)()
    finally:
        kit.teardown_method()


def test_every_kind_has_a_kit() -> None:
    for kind in KINDS:
        kit = kit_of(kind)
        assert kit.kind == kind
        assert len(list(promises(kit))) >= 5


class TestKVCacheManager(KVCacheKit):
    plugin = KVCacheManager
