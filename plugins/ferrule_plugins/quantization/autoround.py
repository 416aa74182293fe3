"""AutoRound (https://arxiv.org/abs/2309.05516), whose files are in the layouts of GPTQ or AWQ: `auto-round` and `inc`.

``packing_format`` (``backend`` in older files) says which: with "awq" AWQ's, with "gptq" GPTQ's, and else that of
``gptq_v2``, whose zero points are as they are. Numbers of any bits follow each other, across words too.
``extra_config`` has settings of single layers, by name or by an expression; 16 bits are a layer of floats.
https://github.com/intel/auto-round, auto_round/export/export_to_autoround and auto_round/utils/bit_packing.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearScheme
from ferrule_plugins.quantization.groupwise import AwqScheme, GptqScheme, Groupwise
from ferrule_quant.groupwise import Settings
from ferrule_quant.names import matches, spellings

_FLOATS = 16  # bits
_LAYOUTS = frozenset(  # parts of names; some are of kernels, which have no layout of their own
    ("auto_round", "auto_gptq", "gptq", "gptqmodel", "auto_awq", "awq", "exllamav2", "triton", "tritonv2", "marlin")
)
_SPECIAL = frozenset("*+?^$()[]{}|\\")  # what an expression has, and a name does not


class AutoRound(Groupwise):
    conformance = "ferrule_testkit.samples.integers:AUTO_ROUND"
    formats = ("auto-round", "auto_round", "intel/auto-round", "inc")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._extra = _extra(config)
        self._blocks = _blocks(config)
        self._layout = _packing(config)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        layout = _packing(config)
        if "llm_compressor" in layout or "llm-compressor" in layout:
            raise ValueError("reads the layouts of GPTQ and AWQ: `compressed-tensors` reads those of llm-compressor")
        if not set(layout.split(":")) <= _LAYOUTS:
            raise ValueError(f"does not read the packing_format {layout!r}")
        activations = config.get("act_bits")
        if activations is not None and (type(activations) is not int or activations < _FLOATS):
            raise ValueError(f"does not quantize activations to {activations!r} bits")
        _blocks(config)
        for changes in ({}, *_extra(config).values()):
            _settings(config, changes)

    def settings(self, name: str, head: bool) -> Settings | None:
        named = spellings(name)
        for each in named:
            if each in self._extra:
                return _settings(self.config, self._extra[each])
        for pattern, changes in self._extra.items():
            if _SPECIAL & set(pattern) and any(matches(f".*(?:{pattern})", each) for each in named):
                return _settings(self.config, changes)
        within = any(f"{each}.".startswith(f"{block}.") for block in self._blocks for each in named)
        if head or self._blocks and not within:
            return None
        return _settings(self.config, {})

    def made(self, settings: Settings, dtype: torch.dtype | None) -> LinearScheme:
        if "awq" in self._layout:
            return AwqScheme(self.shared, dtype, settings)
        less = "gptq" in self._layout and "gptqmodel" not in self._layout
        return GptqScheme(self.shared, dtype, settings, less=less)


def _packing(config: Mapping[str, Any]) -> str:
    return str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")


def _extra(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(each, Mapping) for each in extra.values()):
        raise ValueError("reads 'extra_config' as an object of objects")
    return extra


def _blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or []
    names = blocks.split(",") if isinstance(blocks, str) else blocks
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"reads 'block_name_to_quantize' as names, and it is {blocks!r:.80}")
    return tuple(name.strip() for name in names)


def _settings(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings | None:
    """Read a layer's settings; None is for floats. Raises ValueError for what is not supported."""
    stated = {**config, **{key: value for key, value in changes.items() if value is not None}}
    bits, kind = stated.get("bits"), str(stated.get("data_type") or "int")
    if type(bits) is int and bits >= _FLOATS:
        return None
    if not kind.startswith("int"):
        raise ValueError(f"reads integers, and the data_type is {kind!r}")
    return Settings.of({**stated, "desc_act": False}, (4, 5, 6, 7) if "awq" in _packing(config) else tuple(range(2, 9)))
