"""Rotary position embeddings (Su et al. 2021) with every kind of frequency scaling in use.

Angles are computed once per step, in float32, and shared by all layers. Two kinds depend on how long the text is
(`dynamic`, `longrope`); they take the length of a token's own request, max(prompt length, position + 1), so that a
token's key does not depend on chunking, batching or preemption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ferrule.checkpoint import changed
from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import AdapterBank
from ferrule.types import PromptBorder

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [tokens, 1, rotary_dim / 2]


class Places(Protocol):
    """The positions of a step's tokens, and the lengths of their requests."""

    @property
    def positions(self) -> torch.Tensor: ...  # [tokens] int64

    @property
    def lengths(self) -> torch.Tensor: ...  # [tokens] int64, max(prompt length, position + 1) of the token's request


@dataclass(frozen=True)
class RopeConfig:
    """The settings of a rotation: `rope_parameters` of config.json, or its older `rope_theta` and `rope_scaling`."""

    kind: str
    theta: float
    head_dim: int
    max_positions: int
    partial: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any], head_dim: int, layer_type: str | None = None) -> RopeConfig:
        """Read a checkpoint's configuration; `layer_type` picks one of several. Raises CheckpointError."""
        options = _of_layers(config.get("rope_parameters") or config.get("rope_scaling") or {}, layer_type)
        kind = options.get("rope_type") or options.get("type") or "default"
        kind = "longrope" if kind == "su" else kind  # its first name
        theta = options.get("rope_theta") or config.get("rope_theta") or 10000.0
        partial = options.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if not 0 < float(partial) <= 1:
            raise CheckpointError(f"config.json: 'partial_rotary_factor' is a share of a head, not {partial!r:.40}.")
        limit = config.get("max_position_embeddings") or 2048
        original = config.get("original_max_position_embeddings")
        if original and kind in ("llama3", "yarn", "longrope"):
            options["original_max_position_embeddings"] = original
        options.setdefault("original_max_position_embeddings", limit)
        if kind == "dynamic" and options.get("alpha"):  # Hunyuan: a larger base at every length
            kind, theta = "default", theta * options["alpha"] ** (head_dim / (head_dim - 2))
        return cls(kind, float(theta), head_dim, int(limit), float(partial), options)

    @classmethod
    def local(cls, config: Mapping[str, Any], head_dim: int, theta: float) -> RopeConfig:
        """Return the rotation of `sliding_attention` layers where they have one of their own.

        It is not scaled unless the file says so for these layers; `theta` applies where the file has none for them.
        """
        own = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
        return cls.of(changed(config, {"rope_parameters": {"rope_theta": theta, **own}}), head_dim)

    @property
    def dim(self) -> int:
        return int(self.head_dim * self.partial)

    @property
    def original(self) -> int:
        return int(self.options["original_max_position_embeddings"])

    def need(self, name: str) -> Any:
        if self.options.get(name) is None:
            raise CheckpointError(f"config.json: rope type {self.kind!r} needs {name!r}.")
        return self.options[name]


def _of_layers(stated: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """Return the settings for layers of one type, or for all where `layer_type` is None. Raises CheckpointError."""
    entries = {kind: dict(entry) for kind, entry in stated.items() if isinstance(entry, Mapping)}
    if not entries:
        return dict(stated)
    if layer_type in entries:
        return entries[layer_type]
    first, *others = entries.values()
    if layer_type is not None or any(entry != first for entry in others):
        wanted = "the same for all layers" if layer_type is None else f"for {layer_type!r}"
        raise CheckpointError(
            f"config.json: 'rope_parameters' differ by type of layer ({', '.join(entries)}); this model needs settings "
            f"{wanted}."
        )
    return first


class Rope(torch.nn.Module):
    """A rotation of the first `dim` of the `head_dim` features of queries and keys.

    `interleaved` pairs neighbours (2i, 2i + 1) instead of halves (i, i + dim / 2).
    """

    def __init__(self, config: RopeConfig, interleaved: bool = False) -> None:
        super().__init__()
        self.config = config
        self.interleaved = interleaved
        with torch.device("cpu"):
            short, self.factor = _frequencies(config)
            long = _longrope(config, "long_factor") if config.kind == "longrope" else None
        self.dim = 2 * short.numel()
        self.inv_freq = torch.nn.Buffer(short.to(torch.get_default_device()), persistent=False)
        self.long = None if long is None else torch.nn.Buffer(long.to(torch.get_default_device()), persistent=False)
        self._bank: AdapterBank | None = None  # whose adapters have positions of their own

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Scale the positions of tokens whose adapter was trained with longer texts, if the bank has such adapters."""
        if bank.position_scales is None:
            return False
        self._bank, bank.scales_positions = bank, True
        return True

    @property
    def border(self) -> PromptBorder | None:
        """Prompt length beyond which the frequencies change; each length has its own with `dynamic`."""
        match self.config.kind:
            case "longrope":
                return PromptBorder(self.config.original)
            case "dynamic":
                return PromptBorder(self.config.max_positions, exact=True)
        return None

    def at(self, places: Places, dtype: torch.dtype) -> Rotation:
        """Return cosine and sine for each token, in the type of queries and keys."""
        angles = self._positions(places).unsqueeze(-1) * self._inv_freq(places)
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)

    def _positions(self, places: Places) -> torch.Tensor:
        """Return the positions [tokens] float32, each multiplied as its token's adapter wants it. A speculator's tokens
        have no adapter.
        """
        positions, bank = places.positions.float(), self._bank
        if bank is None or bank.position_scales is None or not len(bank.token_slots):
            return positions
        return positions * bank.position_scales.index_select(0, bank.token_slots)

    def _inv_freq(self, places: Places) -> torch.Tensor:
        """Return the frequencies [dim / 2], or [tokens, dim / 2] where they depend on the length."""
        config = self.config
        if config.kind == "longrope" and self.long is not None:
            return torch.where((places.lengths > config.original).unsqueeze(-1), self.long, self.inv_freq)
        if config.kind == "dynamic":
            stretch = float(config.need("factor"))
            lengths = places.lengths.clamp(min=config.max_positions).unsqueeze(-1)
            growth = stretch * lengths / config.max_positions - (stretch - 1)
            base = config.theta * growth ** (config.dim / (config.dim - 2))
            return 1.0 / base ** _exponents(config.dim, places.positions.device)
        return self.inv_freq

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate x [tokens, heads, head_dim]."""
        cos, sin = rotation
        turned = x[..., : self.dim]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return out if self.dim == x.shape[-1] else torch.cat((out, x[..., self.dim :]), dim=-1)


def _exponents(dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies [dim / 2] float32 for a text of ordinary length, and the factor on cos and sin."""
    plain = 1.0 / config.theta ** _exponents(config.dim)
    match config.kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / float(config.need("factor")), 1.0
        case "llama3":
            return _llama3(config, plain), 1.0
        case "yarn":
            return _yarn(config)
        case "longrope":
            return _longrope(config, "short_factor"), _longrope_factor(config)
        case "proportional":
            return _proportional(config), 1.0
    raise CheckpointError(
        f"config.json asks for the rope type {config.kind!r}; known are default, linear, dynamic, yarn, longrope, "
        "llama3 and proportional."
    )


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, and interpolate between them."""
    factor, low, high = (float(config.need(n)) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = config.original / (2 * math.pi / plain)  # over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Compute the frequencies and the factor of YaRN (Peng et al. 2023), with DeepSeek's `mscale`."""
    options, dim = config.options, config.dim
    factor = float(options.get("factor") or config.max_positions / config.original)

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def border(turns: float) -> float:  # the dimension that makes so many turns over the original context
        return dim * math.log(config.original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = border(options.get("beta_fast") or 32), border(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    keep = 1 - ramp  # of the frequency as it was
    wave = config.theta ** _exponents(dim)
    attention = options.get("attention_factor")
    if attention is None:
        both = options.get("mscale") and options.get("mscale_all_dim")
        attention = mscale(options["mscale"]) / mscale(options["mscale_all_dim"]) if both else mscale()
    return 1.0 / (factor * wave) * (1 - keep) + 1.0 / wave * keep, float(attention)


def _longrope(config: RopeConfig, which: str) -> torch.Tensor:
    """Compute the frequencies of LongRoPE (Ding et al. 2024): one divisor per dimension, from one of two sets."""
    divisors = torch.tensor(config.need(which), dtype=torch.float32)
    if divisors.numel() != (config.dim + 1) // 2:
        raise CheckpointError(f"config.json: {which!r} needs {config.dim // 2} numbers, not {divisors.numel()}.")
    return 1.0 / (divisors * config.theta ** _exponents(config.dim))


def _longrope_factor(config: RopeConfig) -> float:
    given = config.options.get("attention_factor")
    factor = float(config.options.get("factor") or config.max_positions / config.original)
    if given is not None:
        return float(given)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(config.original))


def _proportional(config: RopeConfig) -> torch.Tensor:
    """Compute the frequencies where only a share of the head rotates, at those of the whole head."""
    turning = int(config.partial * config.head_dim // 2)
    plain = 1.0 / config.theta ** (torch.arange(0, 2 * turning, 2, dtype=torch.float32) / config.head_dim)
    still = torch.zeros(config.head_dim // 2 - turning)
    return torch.cat((plain, still)) / float(config.options.get("factor") or 1.0)
