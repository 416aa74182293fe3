"""The only reader of the environment. ``FERRULE_X`` falls back to ``VLLM_X``; a bad value stops start-up."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from ferrule.errors import ConfigError


class Environment(Struct, frozen=True, kw_only=True):
    """Typed values of the variables that Ferrule knows, taken once at start."""

    cpu_kvcache_space: float = 4.0  # GiB
    cpu_omp_threads_bind: str = "auto"
    api_key: str | None = None
    plugins: tuple[str, ...] | None = None  # allow-list; None: all
    cache_root: str = ""
    allow_long_max_model_len: bool = False
    server_dev_mode: bool = False
    keep_alive_on_engine_death: bool = False
    rpc_base_path: str | None = None
    logging_level: str = "INFO"
    attention_backend: str | None = None
    hf_home: str | None = None


def read(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment. Raises ConfigError that names the variable and what it may be."""
    source = os.environ if variables is None else variables

    def get(name: str) -> str | None:
        return source.get(f"FERRULE_{name}", source.get(f"VLLM_{name}"))

    def number(name: str, default: float) -> float:
        text = get(name)
        try:
            value = default if text is None or not text.strip() else float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9:
            raise ConfigError(f"Environment variable FERRULE_{name} (or VLLM_{name}) must be a number >= 0: {text!r}.")
        return value

    def flag(name: str) -> bool:
        text = (get(name) or "0").strip().lower()
        if text not in {"0", "1", "true", "false", ""}:
            raise ConfigError(f"Environment variable FERRULE_{name} (or VLLM_{name}) must be 0 or 1, not {text!r}.")
        return text in {"1", "true"}

    plugins = get("PLUGINS")
    return Environment(
        cpu_kvcache_space=number("CPU_KVCACHE_SPACE", 4.0) or 4.0,
        cpu_omp_threads_bind=get("CPU_OMP_THREADS_BIND") or "auto",
        api_key=get("API_KEY"),
        plugins=None if plugins is None else tuple(p.strip() for p in plugins.split(",") if p.strip()),
        cache_root=get("CACHE_ROOT") or os.path.join(source.get("XDG_CACHE_HOME") or "~/.cache", "ferrule"),
        allow_long_max_model_len=flag("ALLOW_LONG_MAX_MODEL_LEN"),
        server_dev_mode=flag("SERVER_DEV_MODE"),
        keep_alive_on_engine_death=flag("KEEP_ALIVE_ON_ENGINE_DEATH"),
        rpc_base_path=get("RPC_BASE_PATH"),
        logging_level=(get("LOGGING_LEVEL") or "INFO").upper(),
        attention_backend=get("ATTENTION_BACKEND"),
        hf_home=source.get("HF_HOME"),
    )
