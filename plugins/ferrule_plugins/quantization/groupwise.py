"""AWQ and GPTQ: weights of 4 bits in groups of inputs, with scales and zero points.

Both keep words of 32 bits with eight numbers each. GPTQ (https://arxiv.org/abs/2210.17323) packs inputs, lowest bits
first, and zero points less one (but for ``gptq_v2``). AWQ (https://arxiv.org/abs/2306.00978), in its layout "gemm",
packs outputs, in the order 0 2 4 6 1 3 5 7. A weight is (number - zero) * scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization.names import chosen, listed
from ferrule_plugins.quantization.products import Integers, Quantized, Shared, cannot_run

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))
_MIDDLE = 8


def unpacked(words: torch.Tensor, bits: int = 4, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """int32 [rows, words] to uint8 [rows, numbers]; `order` says which number each place of a word holds."""
    per = 32 // bits
    numbers = torch.empty((*words.shape, per), dtype=torch.uint8, device=words.device)
    for place in range(per):
        numbers[..., order[place]] = (words >> (bits * place)) & ((1 << bits) - 1)
    return numbers.flatten(1)


def group_problem(group: Any) -> str | None:
    """Why groups of so many inputs are not served, or None. -1 and None are all inputs."""
    if group in (None, -1):
        return None
    whole = isinstance(group, int) and not isinstance(group, bool) and group > 0 and group % 32 == 0
    return None if whole else f"takes groups of a multiple of 32 inputs, and the group size is {group!r}"


def outputs(layer: Any) -> tuple[int, ...]:
    """Of each of the projections that the layer merges."""
    return tuple(layer.projections.values()) or (layer.out_features,)


def check_words(counts: Iterable[int], per: int = 8) -> None:
    """Raises CheckpointError for numbers that do not fill their words, of `per` each."""
    for count in counts:
        if count % per:
            raise CheckpointError(f"A layer has {count} inputs or outputs, which do not fill words of {per} numbers.")


class Groupwise(QuantizationMethod):
    """What AWQ and GPTQ share. The head stays as it is unless the checkpoint says otherwise."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._shared = Shared()
        self._left = listed(config, "modules_to_not_convert")

    @classmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        if not config:
            return "the weights are not quantized"
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            return f"reads 4 bits, and the checkpoint has {bits!r}"
        return cls.problem(config) or group_problem(config.get("group_size")) or cannot_run(caps.platform, dtype)

    @classmethod
    @abstractmethod
    def problem(cls, config: Mapping[str, Any]) -> str | None:
        """Why the variant of the format is not read, or None."""

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if layer.head and not self.config.get("lm_head") or chosen(layer, self._left):
            return None
        return self.made(self._group(), torch.float32 if layer.head else None)

    @abstractmethod
    def made(self, group: int, dtype: torch.dtype | None) -> LinearScheme:
        """The format's scheme, with groups of `group` inputs, 0 for all."""

    def _group(self) -> int:
        return max(int(self.config.get("group_size") or 0), 0)


class Gptq(Groupwise):
    formats = ("gptq",)

    @classmethod
    def problem(cls, config: Mapping[str, Any]) -> str | None:
        if config.get("desc_act"):
            return "does not read desc_act=true: inputs out of order; a checkpoint made with desc_act=false is read"
        if config.get("dynamic"):
            return "does not read 'dynamic': settings that differ between layers"
        stated = config.get("checkpoint_format", "gptq")
        return None if stated in ("gptq", "gptq_v2") else f"does not read the checkpoint_format {stated!r}"

    def made(self, group: int, dtype: torch.dtype | None) -> LinearScheme:
        return GptqScheme(self._shared, dtype, group, less=self.config.get("checkpoint_format") != "gptq_v2")


class Awq(Groupwise):
    formats = ("awq",)

    @classmethod
    def problem(cls, config: Mapping[str, Any]) -> str | None:
        version = str(config.get("version", "gemm")).lower()
        return None if version == "gemm" else f"reads AWQ's layout 'gemm', and version is {version!r}"

    def made(self, group: int, dtype: torch.dtype | None) -> LinearScheme:
        return AwqScheme(self._shared, dtype, group)


class Grouped(Quantized):
    """Parameters `qweight`, `qzeros`, `scales`; activations keep their precision."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None, group: int) -> None:
        super().__init__(shared, dtype, wide=True)
        self.group = group

    def groups(self, layer: Any) -> int:
        """How many there are along the inputs."""
        return -(-layer.in_features // self.group) if self.group else 1

    def allocate(self, layer: Any) -> None:
        check_words((layer.in_features, *outputs(layer)))
        self.given, groups = layer.weight.dtype, self.groups(layer)
        made = {
            "qweight": self.words(layer),
            "qzeros": checkpoint_parameter(layer, (groups, -1), torch.int32, count=lambda rows: rows // 8),
            "scales": checkpoint_parameter(layer, (groups, -1), torch.float32),
        }
        extra = ("g_idx",) if layer.bias is not None else ("g_idx", "bias")  # old files have biases of zero
        layer.ignored_tensors = (*layer.ignored_tensors, *extra)
        layer.weight = None
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    @abstractmethod
    def words(self, layer: Any) -> torch.nn.Parameter:
        """The parameter of the packed weights."""

    def integers(self, layer: Any, numbers: torch.Tensor, zeros: torch.Tensor) -> Integers:
        """From numbers [n, k] and zero points [groups, n]. Zero points that are all 8 are left out."""
        points = None if bool((zeros == _MIDDLE).all()) else zeros.t().contiguous()
        return Integers(numbers, layer.scales.detach().t().contiguous(), points, 4, self.group)


class GptqScheme(Grouped):
    def __init__(self, shared: Shared, dtype: torch.dtype | None, group: int, less: bool) -> None:
        super().__init__(shared, dtype, group)
        self._less = less  # zero points are written less one

    def words(self, layer: Any) -> torch.nn.Parameter:
        return checkpoint_parameter(layer, (layer.in_features // 8, -1), torch.int32)

    def weights(self, layer: Any) -> Integers:
        numbers = unpacked(layer.qweight.detach().t())
        zeros = unpacked(layer.qzeros.detach())
        return self.integers(layer, numbers, zeros + 1 if self._less else zeros)


class AwqScheme(Grouped):
    def words(self, layer: Any) -> torch.nn.Parameter:
        return checkpoint_parameter(layer, (layer.in_features, -1), torch.int32, count=lambda rows: rows // 8)

    def weights(self, layer: Any) -> Integers:
        numbers = unpacked(layer.qweight.detach(), order=AWQ_ORDER).t().contiguous()
        return self.integers(layer, numbers, unpacked(layer.qzeros.detach(), order=AWQ_ORDER))
