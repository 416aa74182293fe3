"""Views of the configuration: each has what its readers need, and no secret."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ferrule.config import Resolved, RouterSettings, WorkerSettings
from ferrule.config.parse import config_schema, parse
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.plugin import discover


def secretive(*argv: str) -> Resolved:
    """Return a configuration in which every secret begins with "hush"."""
    secrets = [spec.flag for spec in config_schema().specs if spec.option.secret]
    assert {"--api-key", "--admin-key", "--hf-token"} <= set(secrets)
    told = [part for number, flag in enumerate(secrets) for part in (flag, f"hush-{number}")]
    environment = Environment(api_key="hush-env", admin_key="hush-env")
    resolved = resolve(parse(["org/name", *told, *argv], env=environment).config)
    assert b"hush" in msgspec.json.encode(resolved)
    return resolved


def test_a_worker_gets_its_sections_and_no_secret() -> None:
    resolved = secretive("--reasoning-parser", "deepseek_r1", "--tool-call-parser", "hermes")
    settings = WorkerSettings.of(resolved)
    sent = msgspec.json.encode(settings)
    assert b"hush" not in sent
    assert msgspec.json.decode(sent, type=WorkerSettings) == settings
    assert (settings.scheduler, settings.cache) == (resolved.scheduler, resolved.cache)
    assert settings.parsers == (("reasoning_parser", "deepseek_r1"), ("tool_parser", "hermes"))


def test_a_router_is_told_all_options_and_no_secret() -> None:
    resolved = secretive("--api-key-file", "hush.yaml", "--ssl-keyfile", "hush.pem", "--response-role", "bot")
    settings = RouterSettings.of(resolved, discover())
    assert b"hush" not in msgspec.json.encode([settings.frontend, settings.scheduler, settings.chosen])
    assert settings.frontend.response_role == "bot"
    assert settings.options["api_key"] == settings.options["hf_token"] == "(hidden)"
    assert settings.options["api_key_file"] == "hush.yaml"
    assert settings.options["max_num_seqs"] == resolved.scheduler.max_num_seqs
    assert settings.options.keys() == settings.origins.keys() <= settings.defaults.keys()
    told = {name: settings.origins[name] for name in ("response_role", "max_num_seqs", "seed", "api_key")}
    assert told == {
        "response_role": "command line",
        "max_num_seqs": "resolved",
        "seed": "default",
        "api_key": "command line",
    }
    assert settings.defaults["response_role"] == "assistant"


def chosen(*argv: str) -> Sequence[tuple[str, str]]:
    return RouterSettings.of(resolve(parse(argv, env=Environment()).config), discover()).chosen


def test_a_router_is_told_which_plugins_are_chosen() -> None:
    assert {("executor", "uni"), ("router", "openai"), ("policy", "fcfs")} <= set(chosen())
    told = chosen("--distributed-executor-backend", "simulated", "--routers", "health")
    assert [name for kind, name in told if kind in ("executor", "router")] == ["simulated", "health"]
