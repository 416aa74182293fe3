"""What an adapter's ``adapter_config.json`` says. The format is PEFT's:
https://huggingface.co/docs/peft/main/en/package_reference/lora
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ferrule.errors import CheckpointError
from ferrule.small_files import read_json
from ferrule_quant.names import matches

T = TypeVar("T")

CONFIG = "adapter_config.json"
_MAX_BYTES = 1 << 18  # of the file: no step runs while it is parsed
_SECONDS = 0.05  # for an expression and a name
_LITERAL = re.compile(r"\w+")
_MOST = 10_000  # entries of `alpha_pattern`
_LARGEST = 1e6  # of a scale
_LONGEST = 1 << 27  # tokens: far beyond any model
# Settings that change what an adapter computes, and are not served.
_UNKNOWN = (
    *("alora_invocation_tokens", "arrow_config", "layer_replication", "trainable_token_indices"),
    *("use_bdlora", "use_qalora"),
)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The settings of an adapter that its tensors do not show.

    `rank` is that of modules, unless `mixed`: then tensors have their own.
    """

    rank: int
    alpha: float
    mixed: bool
    alphas: Mapping[str, float]
    root_scaled: bool
    decomposed: bool  # DoRA
    context_length: int = 0  # of the texts that it was trained with, in tokens; 0: as the model's

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's product (rsLoRA: Kalajdzievski 2023). Raises CheckpointError."""
        alpha = next((alpha for name, alpha in self.alphas.items() if _means(name, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.root_scaled else rank)


def read_settings(folder: Path) -> LoraSettings:
    """Read a folder's ``adapter_config.json``. Raises CheckpointError for what is not an adapter that can be served."""
    config = read_json(folder / CONFIG, _MAX_BYTES)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{CONFIG} has the peft_type {kind!r:.80}, and this server has LoRA adapters (LORA).")
    for key in _UNKNOWN:
        if config.get(key):
            raise CheckpointError(f"{CONFIG} sets {key!r}, which cannot be served.")
    saved = config.get("modules_to_save")
    if saved:
        raise CheckpointError(
            f"{CONFIG} has modules_to_save ({saved!r:.200}): whole weights of its own cannot be served beside those of "
            "other adapters."
        )
    rank = _value(config, "r", int, None)
    if rank < 1:
        raise CheckpointError(f"{CONFIG} has the rank r = {rank}.")
    alphas = _value(config, "alpha_pattern", dict, {})
    if len(alphas) > _MOST:
        raise CheckpointError(f"{CONFIG} has {len(alphas)} entries in alpha_pattern; {_MOST} are read at most.")
    return LoraSettings(
        rank=rank,
        alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        mixed=bool(_value(config, "rank_pattern", dict, {})),
        alphas={str(name): _number(f"alpha_pattern[{name!r:.80}]", alpha) for name, alpha in alphas.items()},
        root_scaled=_value(config, "use_rslora", bool, False),
        decomposed=_value(config, "use_dora", bool, False),
        context_length=_length(_value(config, "context_length", int, 0)),
    )


def _value(config: Mapping[str, Any], key: str, kind: type[T], default: T | None) -> T:
    """Return the value of a key that has one type; None and no value stand for the default."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not kind:
        raise CheckpointError(f"{CONFIG}: {key} must be of the type {kind.__name__}, and is {value!r:.80}.")
    return value


def _number(what: str, value: Any) -> float:
    if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:
        raise CheckpointError(f"{CONFIG}: {what} must be a number within ±{_LARGEST:g}, and is {value!r:.80}.")
    return float(value)


def _length(value: int) -> int:
    if not 0 <= value <= _LONGEST:
        raise CheckpointError(f"{CONFIG}: context_length must be from 0 to {_LONGEST} tokens, and is {value:.8g}.")
    return value


def _means(name: str, module: str) -> bool:
    """Return whether a key of a pattern means a module: it is the end of its name, or an expression for that."""
    if f".{module}".endswith(f".{name}"):
        return True
    return _LITERAL.fullmatch(name) is None and matches(
        rf"(.*\.)?({name})$", module, f"{CONFIG}: alpha_pattern", _SECONDS
    )
