"""The only reader of the environment. ``FERRULE_X`` falls back to ``VLLM_X``; a bad value stops start-up.

``FERRULE_<OPTION>`` is the value of an option; what an option is, `ferrule.config` knows. ``VLLM_PORT`` and
``VLLM_HOST_IP`` are not read: they are not the API's address there, and container platforms set them by accident.
Unknown ``VLLM_*`` names belong to the other program, and ``FERRULE_PLUGIN_*`` names to plugins, which read them
themselves; other unknown ``FERRULE_*`` names are reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from ferrule.env_vllm import FOREIGN
from ferrule.errors import ConfigError, nearest

__all__ = [
    "Environment",
    "ObjectStore",
    "caches",
    "object_store",
    "report",
    "told_library",
    "trace_protocol",
    "variable",
]

PLUGIN_PREFIX = "FERRULE_PLUGIN_"  # of variables that plugins read themselves
_LEVELS = ("debug", "info", "warning", "error")
_SPEAK_EMPTY = ("plugins", "api_key", "admin_key")  # an empty list is a list; an empty key is refused at start
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
    admin_key: str | None = None
    plugins: tuple[str, ...] | None = None
    allow_long_max_model_len: bool = False
    server_dev_mode: bool = False
    keep_alive_on_engine_death: bool = False
    rpc_base_path: str | None = None
    logging_level: str | None = None
    attention_backend: str | None = None
    torch_profiler_dir: str | None = None
    configure_logging: bool = True
    logging_config_path: str | None = None
    logging_prefix: str = ""
    no_deprecation_warning: bool = False
    enable_v1_multiprocessing: bool = False
    allow_runtime_lora_updating: bool = False
    # While the configuration is read; a resolved one has none of these, since values may be secrets.
    options: dict[str, tuple[str, str]] = {}  # option, max_num_seqs → (name of the variable, its text)
    notices: tuple[str, ...] = ()  # about documented variables without effect
    missing: tuple[str, ...] = ()  # about those that switch something on that is not here

    def unknown(self, options: Collection[str]) -> tuple[str, ...]:
        """Return one sentence for each ``FERRULE_*`` variable that is neither one of Ferrule's variables nor one of the
        options.
        """
        known = {variable(name) for name in (*options, *(entry.field for entry in VARIABLES))}
        return tuple(
            f"Environment variable {name} is not known.{nearest(name, known)}"
            for name in sorted(name for name, _ in self.options.values())
            if name.startswith("FERRULE_") and not name.startswith(PLUGIN_PREFIX) and name not in known
        )


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
    Variable("admin_key", "The same as --admin-key."),
    Variable("plugins", "Only these plugins may be used.", "names separated by commas", _names),
    Variable("allow_long_max_model_len", "Allow --max-model-len beyond the model's own limit.", "0 or 1", _flag),
    Variable("server_dev_mode", "Serve the routes that are for development only.", "0 or 1", _flag),
    Variable("keep_alive_on_engine_death", "Keep answering, with 503, after the engine died.", "0 or 1", _flag),
    Variable("rpc_base_path", "Folder for the sockets between processes.", "a folder"),
    Variable("logging_level", "The same as --log-level.", "one of: " + ", ".join(_LEVELS), _level),
    Variable("attention_backend", "The same as --attention-backend.", "the name of a plugin", str.lower),
    Variable("torch_profiler_dir", "Folder for the traces of /start_profile; without it there is no profiling."),
    Variable("configure_logging", "Set up the log; 0 leaves it to the program around.", "0 or 1", _flag),
    Variable("logging_config_path", "The same as --log-config-file."),
    Variable("logging_prefix", "Text before each line of the log."),
    Variable("no_deprecation_warning", "No notices about options that were replaced.", "0 or 1", _flag),
    Variable(
        "enable_v1_multiprocessing",
        "Of LLM and AsyncLLM: run the engine in a process of its own. Default: in the process of the caller.",
        "0 or 1",
        _flag,
    ),
    Variable(
        "allow_runtime_lora_updating",
        "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, with --enable-lora.",
        "0 or 1",
        _flag,
    ),
)


def variable(field: str) -> str:
    """Return the name of a field's variable."""
    return f"FERRULE_{field.upper()}"


def caches() -> str:
    """Return the folder for files that can be made again."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ferrule")


def before_libraries() -> None:
    """Set what torch and tokenizers read when they are imported or first used, where the user has not.

    Idle threads spin for some microseconds, which spares most waking up between the products of a step, and then sleep;
    by default they spin for milliseconds, and starve the process that they wait for. Measured on two shared cores: a
    decode step of 1.7 ms instead of 80 to 300. And torch looks for no back ends among the installed distributions: one
    broken distribution would break the import. Platform plugins load what is theirs. A text is encoded on the thread
    that asks for it, not on a pool with a thread for each core: the cores are the model's. What torch compiles is kept
    with the user's caches; by default it would go to a folder that a restart may empty.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(caches(), "inductor"))
    if os.environ.setdefault("OMP_WAIT_POLICY", "passive") == "passive":
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def before_numpy() -> None:
    """Keep numpy from starting threads in the server's own processes.

    They multiply no matrices, and each thread of numpy's library spins for some 50 ms when numpy is imported, while
    another process starts on the same cores.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextmanager
def told_library(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a library that takes its settings from nowhere else, for as long as it needs
    them.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment. Raises ConfigError that names the variable and what it may be."""
    source = os.environ if variables is None else variables
    values: dict[str, Any] = {}
    problems: list[str] = []
    for known in VARIABLES:
        name = next((n for n in (variable(known.field), f"VLLM_{known.field.upper()}") if n in source), None)
        if name is None or (not source[name].strip() and known.field not in _SPEAK_EMPTY):
            continue
        try:
            values[known.field] = known.read(source[name])
        except (ValueError, KeyError):
            shown = "its value" if _SECRET.search(name) else repr(source[name])
            problems.append(f"Environment variable {name}: {shown} is not valid; expected {known.expects}.")
    if problems:
        raise ConfigError("\n".join(problems))
    own = {variable(known.field) for known in VARIABLES}
    options = {name[8:].lower(): (name, source[name]) for name in source if name.startswith("FERRULE_")}
    options = {key: found for key, found in options.items() if found[0] not in own and found[1].strip()}
    for foreign in FOREIGN:
        if foreign.option and source.get(foreign.name):
            options.setdefault(foreign.option, (foreign.name, source[foreign.name]))
    values |= {"options": options, "notices": tuple(_inert(source)), "missing": tuple(_missing(source))}
    return Environment(**values)


def _inert(source: Mapping[str, str]) -> Iterator[str]:
    for known in FOREIGN:
        if known.inert and known.differs(source.get(known.name, "")):
            yield f"Environment variable {known.name} has no effect: {known.inert}."


def _missing(source: Mapping[str, str]) -> Iterator[str]:
    for known in FOREIGN:
        if known.missing and known.differs(source.get(known.name, "")):
            yield f"Environment variable {known.name}: not in this build: {known.missing}."


class Terminal(Struct, frozen=True):
    """The settings of a client at a terminal, from variables that belong to no program. `state_folder` may not exist
    yet.
    """

    openai_api_key: str | None
    plain: bool  # no escape codes: NO_COLOR is set (https://no-color.org), or the terminal knows none
    dumb: bool
    state_folder: Path


def terminal(variables: Mapping[str, str] | None = None) -> Terminal:
    source = os.environ if variables is None else variables
    dumb = source.get("TERM", "dumb") == "dumb"
    state = Path(source.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "ferrule"
    return Terminal(source.get("OPENAI_API_KEY") or None, bool(source.get("NO_COLOR")) or dumb, dumb, state)


class ObjectStore(Struct, frozen=True):
    """The settings of an S3 store from variables of Run:ai's streamer, AWS and tensorizer, beside those that boto3
    reads itself.

    None: not set. `path_style` puts the bucket's name in the path of addresses and not in the host. The last three are
    tensorizer's, for its own files.
    """

    endpoint: str | None
    region: str | None
    path_style: bool
    unsigned: bool
    tensorizer_endpoint: str | None
    tensorizer_key_id: str | None
    tensorizer_secret: str | None


def object_store(variables: Mapping[str, str] | None = None) -> ObjectStore:
    source = os.environ if variables is None else variables

    def first(*names: str) -> str | None:
        return next((source[name] for name in names if source.get(name)), None)

    return ObjectStore(
        endpoint=first("RUNAI_STREAMER_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        region=first("AWS_REGION", "AWS_DEFAULT_REGION"),
        path_style=source.get("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "1").strip().lower() in ("0", "false"),
        unsigned=source.get("RUNAI_STREAMER_S3_UNSIGNED", "0").strip() == "1",
        tensorizer_endpoint=first("S3_ENDPOINT_URL"),
        tensorizer_key_id=first("S3_ACCESS_KEY_ID"),
        tensorizer_secret=first("S3_SECRET_ACCESS_KEY"),
    )


def trace_protocol(variables: Mapping[str, str] | None = None) -> str:
    """Return the protocol that OpenTelemetry's variables name for spans: by default, as in vLLM, grpc."""
    source = os.environ if variables is None else variables
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next((source[name].strip() for name in names if source.get(name, "").strip()), "grpc")


def report(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that matter to a bug report; values of those that look secret are left out."""
    source = os.environ if variables is None else variables
    shown = {name: source[name] for name in sorted(source) if _REPORTED.match(name)}
    return {name: "(set, not shown)" if _SECRET.search(name) else value for name, value in shown.items()}
