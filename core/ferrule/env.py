"""The only reader of the environment. ``FERRULE_X`` falls back to ``VLLM_X``; a bad value stops start-up.

``VLLM_PORT`` and ``VLLM_HOST_IP`` are not read: they are not the API's address there, and container platforms set
them by accident. Unknown ``VLLM_*`` names belong to the other program; unknown ``FERRULE_*`` names are reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from ferrule.errors import ConfigError, nearest

_LEVELS = ("debug", "info", "warning", "error")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)
_REPORTED = re.compile(
    r"(FERRULE|VLLM|HF|HUGGINGFACE|TRANSFORMERS|SAFETENSORS|TORCH|PYTORCH|CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|KMP|TRITON|RAY)_"
    r"|(LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV|LANG|LC_ALL|XDG_CACHE_HOME)$"
)


class Environment(Struct, frozen=True, kw_only=True):
    """Typed values of the variables that Ferrule knows, taken once at start. `VARIABLES` says what they mean."""

    cpu_kvcache_space: float = 4.0
    cpu_omp_threads_bind: str = "auto"
    api_key: str | None = None
    plugins: tuple[str, ...] | None = None
    allow_long_max_model_len: bool = False
    server_dev_mode: bool = False
    keep_alive_on_engine_death: bool = False
    rpc_base_path: str | None = None
    logging_level: str | None = None
    attention_backend: str | None = None


def _gib(text: str) -> float:
    value = float(text)
    if not 0 <= value < 2**20:
        raise ValueError
    return value or 4.0


def _flag(text: str) -> bool:
    return {"0": False, "1": True, "false": False, "true": True, "": False}[text.strip().lower()]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _level(text: str) -> str:
    return _LEVELS[_LEVELS.index(text.strip().lower())]


@dataclass(frozen=True)
class Variable:
    """One variable. `read` raises ValueError or KeyError for a text that is not `expects`."""

    field: str
    doc: str
    expects: str = "text"
    read: Callable[[str], Any] = str


VARIABLES = (
    Variable("cpu_kvcache_space", "Memory for the KV cache on CPU; 0 means 4.", "GiB as a number >= 0", _gib),
    Variable("cpu_omp_threads_bind", "CPU cores for the engine's threads: auto, all, nobind, or a list such as 0-7."),
    Variable("api_key", "The same as --api-key, with one key."),
    Variable("plugins", "Only these plugins may be used.", "names separated by commas", _names),
    Variable("allow_long_max_model_len", "Allow --max-model-len beyond the model's own limit.", "0 or 1", _flag),
    Variable("server_dev_mode", "Serve the routes that are for development only.", "0 or 1", _flag),
    Variable("keep_alive_on_engine_death", "Keep answering, with 503, after the engine died.", "0 or 1", _flag),
    Variable("rpc_base_path", "Folder for the sockets between processes.", "a folder"),
    Variable("logging_level", "The same as --log-level.", "one of: " + ", ".join(_LEVELS), _level),
    Variable("attention_backend", "The same as --attention-backend.", "the name of a plugin", str.lower),
)


def variable(field: str) -> str:
    """The name of a field's variable."""
    return f"FERRULE_{field.upper()}"


def calm_threads() -> None:
    """Let torch's idle threads sleep; by default they spin, and starve the process that they wait for.

    The library that makes those threads reads the variable when it is loaded: call this before torch is imported.
    Measured on two shared cores: a decode step of 1.7 ms instead of 80 to 300.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def read(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment. Raises ConfigError that names the variable and what it may be."""
    source = os.environ if variables is None else variables
    values: dict[str, Any] = {}
    problems: list[str] = []
    for known in VARIABLES:
        name = next((n for n in (variable(known.field), f"VLLM_{known.field.upper()}") if n in source), None)
        if name is None or (not source[name].strip() and known.field != "plugins"):
            continue
        try:
            values[known.field] = known.read(source[name])
        except (ValueError, KeyError):
            shown = "its value" if _SECRET.search(name) else repr(source[name])
            problems.append(f"Environment variable {name}: {shown} is not valid; expected {known.expects}.")
    if problems:
        raise ConfigError("\n".join(problems))
    return Environment(**values)


def unknown(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """One sentence for each ``FERRULE_*`` variable that nothing reads."""
    source = os.environ if variables is None else variables
    known = {variable(entry.field) for entry in VARIABLES}
    strange = sorted(name for name in source if name.startswith("FERRULE_") and name not in known)
    return tuple(f"Environment variable {name} is not known.{nearest(name, known)}" for name in strange)


def report(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that matter to a bug report; values of those that look secret are left out."""
    source = os.environ if variables is None else variables
    shown = {name: source[name] for name in sorted(source) if _REPORTED.match(name)}
    return {name: "(set, not shown)" if _SECRET.search(name) else value for name, value in shown.items()}
