"""The real frontend on a fake engine, in a test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ferrule.config import CacheConfig, Config, FrontendConfig, LimitsConfig, ModelConfig, ObservabilityConfig
from ferrule.config.resolve import resolve
from ferrule.frontend.service import FrontendService, build_service
from ferrule.interfaces.service import Generate, Output, add_up
from ferrule.plugin import Plugins
from ferrule_testkit.tokenizers import ByteTokenizers
from tests.fakes.engine import FakeEngine


def fold(outputs: Iterable[Output]) -> list[Output]:
    """Return the answers that the outputs of one request add up to, in the order of their index."""
    grouped: dict[int, list[Output]] = {}
    for output in outputs:
        grouped.setdefault(output.index, []).append(output)
    return [add_up(grouped[index]) for index in sorted(grouped)]


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FakePlugins(Plugins):
    """A set of plugins that answers `load` from a table: kind → name → the class that it loads, or the error that it
    raises.
    """

    def __init__(self, **kinds: dict[str, Any]) -> None:
        super().__init__()
        self.kinds: dict[str, dict[str, Any]] = {"tokenizer": {"auto": ByteTokenizers}, **kinds}

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(self.kinds.get(kind, {}))

    def load(self, kind: str, name: str) -> Any:
        found = self.kinds[kind][name]
        if isinstance(found, Exception):
            raise found
        return found

    def origin(self, kind: str, name: str) -> str:
        return "fake 1.0"


def model_folder(folder: Path) -> Path:
    """Write the two files of a model's folder that the frontend reads."""
    config = {"architectures": ["FakeForCausalLM"], "eos_token_id": 1}
    generation = {"eos_token_id": [2, 3], "temperature": 0.5, "top_k": 40, "max_new_tokens": 250, "do_sample": True}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@asynccontextmanager
async def serving(
    folder: Path, engine: FakeEngine, plugins: FakePlugins | None = None, **sections: dict[str, Any]
) -> AsyncIterator[FrontendService]:
    """Run a service on `engine`; `sections` are options of the configuration's sections. Templates may take long."""
    config = resolve(
        Config(
            model=ModelConfig(
                **{"model": str(folder), "served_model_name": ("m", "alias"), **sections.get("model", {})}
            ),
            frontend=FrontendConfig(**{"chat_template": CHATML, **sections.get("frontend", {})}),
            limits=LimitsConfig(**{"template_timeout": 120.0, **sections.get("limits", {})}),
            cache=CacheConfig(**sections.get("cache", {})),
            observability=ObservabilityConfig(**sections.get("observability", {})),
        )
    )
    service = build_service(config, plugins or FakePlugins(), engine)
    try:
        yield service
    finally:
        await service.close()


async def outputs(service: FrontendService, request: Generate) -> list[Output]:
    """Generate, and read to the end."""
    return [output async for output in (await service.admit(request)).outputs()]


async def until(holds: Callable[[], object]) -> None:
    """Let the event loop turn until a condition holds. The limit is for what never will."""
    async with asyncio.timeout(120.0):
        while not holds():
            await asyncio.sleep(0.001)


async def drained(service: FrontendService) -> None:
    """Wait until nothing is open."""
    await until(lambda: not service.ledger.open)


async def answers(service: FrontendService, request: Generate) -> list[Output]:
    """Return whole answers."""
    return fold(await outputs(service, request))
