"""The options of `ferrule run-batch`: its own, those of the engine, and those of the server that shape an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from ferrule.config import Config
from ferrule.config.option import Option, opt, option_of
from ferrule.config.parse import config_sections
from ferrule.config.unsupported import engine_sections
from ferrule.errors import ConfigError

# Options of `serve` that mean the same here. The others (keys, TLS, CORS …) belong to a server that listens.
_SERVED = {
    "frontend": (
        "response_role",
        "max_log_len",
        "disable_log_requests",
        "enable_prompt_tokens_details",
        "return_tokens_as_token_ids",
        "strict_requests",
        "enable_auto_tool_choice",
        "exclude_tools_when_tool_choice_none",
        "tool_call_parser",
        "routers",
        "shutdown_timeout",
    ),
    "observability": ("show_hidden_metrics_for_version",),
    "plugins": ("tool_parser_plugin", "plugin_adapter"),
    "limits": ("max_body_bytes", "max_json_depth"),
    "lora": ("lora_resolvers", "lora_resolver_cache_dir", "lora_resolver_hf_repo_list"),
    "prompt_adapter": ("prompt_adapters",),
}
# Options of adapters that decide an answer.
_ADAPTERS = {"lora": ("lora_modules", "lora_dtype", *_SERVED["lora"]), "prompt_adapter": _SERVED["prompt_adapter"]}


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Input, output, and number of concurrent requests of a batch."""

    input_file: str = opt("", "JSONL file of requests: a path, or an http(s) URL.", aliases=("-i",), common=True)
    output_file: str = opt(
        "", "JSONL file of results: a path, or an http(s) URL to upload to with PUT.", aliases=("-o",), common=True
    )
    output_tmp_dir: str | None = opt(
        None, "Folder for the journal, and for results before an upload. Default: beside the output, or the system's."
    )
    max_inflight: int | None = opt(
        None, "Highest number of requests in flight. Default: twice --max-num-seqs.", ge=1, le=2048, common=True
    )
    max_input_bytes: int = opt(4 << 30, "Largest input, in bytes, that is downloaded from a URL.", ge=1, human=True)
    enable_metrics: bool = opt(False, "Serve GET /metrics and /health while the batch runs.", common=True)
    host: str | None = opt(None, "Address on which metrics are served. Default: 127.0.0.1.")
    port: int = opt(8000, "Port on which metrics are served; 0 chooses a free one.", ge=0, le=65535)
    url: str | None = opt(
        None, "Older name of --host: the address on which metrics are served, not that of an API.", replaced="--host"
    )


def sections() -> Mapping[str, type]:
    """Return all sections of options of the command."""
    return {**engine_sections(), "served": _served(), "batch": BatchConfig}


def _served() -> type:
    """Return one section of the fields in `_SERVED`, which the parser would leave out of a command without a server."""
    rows = []
    for key, names in _SERVED.items():
        cls = config_sections()[key]
        hints = get_type_hints(cls)
        for field in (field for field in dataclasses.fields(cls) if field.name in names):
            option = option_of(field)
            meta = {part.name: getattr(option, part.name) for part in dataclasses.fields(Option)} | {"server": False}
            rows.append((field.name, hints[field.name], opt(field.default, **meta)))
    made = dataclasses.make_dataclass("AnswerConfig", rows, frozen=True, kw_only=True)
    made.__doc__ = "Options of ferrule serve that also affect the results of a batch."
    return made


def applied(config: Config, served: Any) -> Config:
    """Return `config` with the values of the served section in their places, and without API keys."""
    parts: dict[str, Any] = {}
    for key, names in _SERVED.items():
        values = {name: getattr(served, name) for name in names}
        parts[key] = dataclasses.replace(getattr(config, key), **values)
    parts["frontend"] = dataclasses.replace(
        parts["frontend"],
        api_key=(),
        allowed_origins=(),  # CORS is for browsers
        enable_request_id_headers=True,  # each row names its request
        disable_uvicorn_access_log=True,
    )
    return dataclasses.replace(config, **parts, env=msgspec.structs.replace(config.env, api_key=None))


def check(options: BatchConfig) -> None:
    """Raise ConfigError for what is missing."""
    missing = [f for f, value in (("-i", options.input_file), ("-o", options.output_file)) if not value]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing.",
            "Usage: ferrule run-batch -i requests.jsonl -o results.jsonl [MODEL] [options]",
        )


def notices(options: BatchConfig, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Return notices about options that were given and have no effect."""
    if options.enable_metrics:
        return ()
    given = [f"--{name}" for name in ("host", "port") if origins.get(name, "").startswith("command")]
    return tuple(f"{flag} has no effect without --enable-metrics." for flag in given)


def identity(config: Config) -> dict[str, Any]:
    """Return the values that decide an answer, beside the request: a batch goes on only under the same ones.

    Secrets are left out.
    """
    default = Config()
    picked = {"model": None, "frontend": _SERVED["frontend"], **_ADAPTERS}
    quiet = {"max_log_len", "disable_log_requests", "shutdown_timeout", "hf_token"}
    found: dict[str, Any] = {}
    for key, names in picked.items():
        section, usual = getattr(config, key), getattr(default, key)
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            counts = names is None or field.name in names or field.name.startswith("chat_template")
            if counts and field.name not in quiet and value != getattr(usual, field.name):
                found[field.name] = value
    return found
