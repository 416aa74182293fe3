"""The kit of quantization methods: products are compared with those of the float weights, over shapes and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.kits.base import Kit, promise, shown
from ferrule_testkit.simulate import load

Encode = Callable[[LinearLayer, torch.Tensor, Mapping[str, Any]], Mapping[str, torch.Tensor]]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TYPES = (*_FLOATS, torch.float64, torch.int8)
_BATCHES = (1, 2, 3, 7, 33)
_EMBEDDING = LinearLayer("embed_tokens", 64, 300)


class Layer(nn.Module):
    """A linear layer of a float checkpoint, as a scheme gets it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, given: LinearLayer, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.in_features = given.in_features
        self.out_features = given.out_features
        self.head = given.head
        self.projections = _projections(given)
        self.ignored_tensors: tuple[str, ...] = ()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class QuantizationKit(Kit):
    """A method's layers compute nearly what the float weights would, each row by itself, in less memory.

    Settings: `config`, a ``quantization_config`` that it reads; `encode`, for a method that reads quantized weights: a
    function that is given a layer, its float weight and `config`, and gives the tensors of a checkpoint by the names of
    the scheme's parameters; `error`, how far products may be from the float ones, as a share of their size (root mean
    squares); `scale_error`, how far all of them together may be too large or too small; `sizes` of layers, (in, out);
    `lone_rows`, the float types in which a row's result does not depend on the batch.
    """

    kind = "quantization"
    platform: str = "cpu"
    features: Sequence[str] = ()
    config: Mapping[str, Any] = {}
    encode: Encode | None = None
    error: float = 0.15
    scale_error: float = 0.015
    sizes: Sequence[tuple[int, int]] = ((64, 48), (200, 100), (129, 17), (512, 256))
    lone_rows: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32)

    # ------------------------------------------------------------------------------------ promises

    def test_refusal_is_an_answer(self) -> None:
        """Return None or a reason in one line from `refuses`, whatever the device and type, the same each time."""
        for platform in (self.platform, "abacus"):
            for dtype in _TYPES:
                answers = {self.plugin.refuses(self.config, self._caps(platform), dtype) for _ in range(2)}
                reason = next(iter(answers))
                told = reason is None or (isinstance(reason, str) and bool(reason.strip()) and "\n" not in reason)
                promise(len(answers) == 1 and told, f"on {platform}, {dtype}, refuses gives {shown(answers)}")

    def test_a_float_type_is_taken(self) -> None:
        """Accept activations of at least one float type on its platform."""
        reasons = {str(dtype): self.plugin.refuses(self.config, self._caps(self.platform), dtype) for dtype in _FLOATS}
        promise(any(reason is None for reason in reasons.values()), f"it refuses all: {shown(reasons)}")

    def test_formats_are_names(self) -> None:
        """Have names of `quant_method` in `formats`, one of which is that of `config`; an empty `config` if there are
        none.
        """
        formats = self.plugin.formats
        named = isinstance(formats, tuple) and all(isinstance(name, str) and name for name in formats)
        promise(named, f"formats is {shown(formats)}")
        known = self.config.get("quant_method") in formats if formats else not self.config
        promise(known, f"the kit's config is {shown(self.config)}, formats {shown(formats)}")

    def test_each_layer_has_its_own_scheme(self) -> None:
        """Return a new scheme for every layer from `scheme`, or None; at least one layer has a scheme."""
        method = self._method()
        made = [method.scheme(layer) for layer in self._layers()] + [method.scheme(layer) for layer in self._layers()]
        schemes = [scheme for scheme in made if scheme is not None]
        promise(bool(schemes), "no layer has a scheme")
        promise(all(isinstance(scheme, LinearScheme) for scheme in schemes), f"schemes are {shown(schemes)}")
        promise(len({id(scheme) for scheme in schemes}) == len(schemes), "two layers share a scheme")

    def test_products_are_near(self) -> None:
        """Compute products of the shape and type of a linear layer's, nearly its values, and on the whole their
        size.
        """
        for given, layer, scheme, weight in self._packed():
            for rows in _BATCHES:
                x = self._activations(rows, given, weight)
                y = scheme.matmul(layer, x)
                promise(tuple(y.shape) == (rows, given.out_features), f"{_at(given, x)}: shape {tuple(y.shape)}")
                allowed = {x.dtype, torch.float32} if given.head else {x.dtype}
                promise(y.dtype in allowed, f"{_at(given, x)}: the result is {y.dtype}")
                expected = nn.functional.linear(x.double(), weight.double(), _double(layer.bias))
                off = ((y.double() - expected).square().mean() / expected.square().mean()).sqrt().item()
                promise(off <= self.error, f"{_at(given, x)}: {off:.3g} off, {self.error} is allowed")
            factor = _factor(y, expected, _double(layer.bias))
            said = f"products are {factor:.4f} times the float ones, {self.scale_error} off 1 is allowed"
            promise(abs(factor - 1) <= self.scale_error, f"{_at(given, x)}: {said}")

    def test_a_row_is_as_it_is_alone(self) -> None:
        """Give a row's result the same bits alone and in any batch, also beside a row of NaN or of large numbers."""
        for given, layer, scheme, weight in self._packed():
            x = self._activations(33, given, weight)
            x[1] *= 100
            x[5] = torch.nan
            whole = scheme.matmul(layer, x).clone()
            for rows in (1, 2, 4, 6, 17) if x.dtype in self.lone_rows else ():
                for first in (0, 6, 33 - rows):
                    part = scheme.matmul(layer, x[first : first + rows])
                    same = torch.equal(part.nan_to_num(7.0), whole[first : first + rows].nan_to_num(7.0))
                    promise(same, f"{_at(given, x)}: rows {first} to {first + rows} differ from those of all")
            promise(bool(whole[5].isnan().all()), f"{_at(given, x)}: a row of NaN gives numbers")
            finite = bool(torch.cat((whole[:5], whole[6:])).isfinite().all())
            promise(finite, f"{_at(given, x)}: a row of NaN spoils its neighbours")

    def test_answers_stay(self) -> None:
        """Leave earlier results and the input unchanged by a call."""
        for given, layer, scheme, weight in self._packed():
            x, other = self._activations(7, given, weight), self._activations(9, given, weight)
            before = x.clone()
            first = scheme.matmul(layer, x)
            kept = first.clone()
            scheme.matmul(layer, other)
            promise(torch.equal(first, kept), f"{_at(given, x)}: a later call changed an earlier result")
            promise(torch.equal(x, before), f"{_at(given, x)}: the activations were changed")
            promise(torch.equal(scheme.matmul(layer, x), kept), f"{_at(given, x)}: the second time is another")

    def test_zeros_are_zeros(self) -> None:
        """Give the bias for activations of zero, and for channels whose weights are zero."""
        for given, layer, scheme, weight in self._packed(empty=3):
            y = scheme.matmul(layer, torch.zeros(2, given.in_features, dtype=weight.dtype)).float()
            bias = torch.zeros(given.out_features) if layer.bias is None else layer.bias.float()
            promise(torch.allclose(y, bias.expand(2, -1), atol=1e-6), f"{given.name}: zeros give {shown(y)}")
            y = scheme.matmul(layer, self._activations(4, given, weight)).float()
            promise(
                torch.allclose(y[:, 3], bias[3], atol=1e-6), f"{given.name}: a channel of zeros gives {shown(y[:, 3])}"
            )

    def test_rows_are_those_of_the_weight(self) -> None:
        """Read rows of the weight's type and nearly its values, always with an embedding's scheme."""
        for given, layer, scheme, weight in (*self._packed(), *self._packed(embedding=True)):
            rows, ids = scheme.rows(layer), torch.arange(given.out_features).flip(0)
            if rows is None:
                promise(given.name != _EMBEDDING.name, "the scheme of an embedding reads no rows")
                continue
            read, expected = rows(ids), weight[ids]
            same = read.shape == expected.shape and read.dtype == expected.dtype
            promise(same, f"{given.name}: rows are {shown(read)}")
            off = ((read.double() - expected).square().mean() / expected.double().square().mean()).sqrt().item()
            promise(off <= self.error, f"{given.name}: rows are {off:.3g} off, {self.error} is allowed")

    def test_memory_is_saved(self) -> None:
        """Make a packed layer, its parameters, buffers and `packed_tensors` together, smaller than the float
        weights.
        """
        for given, layer, scheme, weight in self._packed():
            if weight.numel() < 1 << 16:
                continue
            tensors = (*scheme.packed_tensors(), *layer.parameters(), *layer.buffers())
            size = sum(tensor.nbytes for tensor in tensors)
            promise(0 < size < 0.9 * weight.nbytes, f"{given.name}: {size} bytes instead of {weight.nbytes}")

    def test_shared_weights_are_left_alone(self) -> None:
        """Pack without changing the given tensor: an embedding may share it."""
        if self.encode is not None:
            return
        for given, layer, _, weight in self._packed(shared=True):
            promise(
                torch.equal(layer.get_buffer("shared"), weight), f"{given.name}: packing changed the weights in place"
            )

    # ------------------------------------------------------------------------------------ helpers

    def _caps(self, platform: str) -> DeviceCaps:
        return fake_caps(platform, self.features)

    def _dtypes(self) -> list[torch.dtype]:
        """Return the float types that the method accepts; the widest if it accepts none."""
        caps = self._caps(self.platform)
        return [dtype for dtype in _FLOATS if self.plugin.refuses(self.config, caps, dtype) is None] or [_FLOATS[-1]]

    def _method(self) -> QuantizationMethod:
        method: QuantizationMethod = self.new(self.config)
        return method

    def _layers(self) -> list[LinearLayer]:
        inner = [LinearLayer(f"layers.{n}.mlp.up_proj", *size) for n, size in enumerate(self.sizes)]
        merged = LinearLayer("layers.0.self_attn.qkv_proj", 64, 96, ("q_proj", "k_proj", "v_proj"))
        expert = LinearLayer("layers.0.mlp.experts.1.down_proj", 192, 256)
        return [*inner, merged, expert, LinearLayer("lm_head", 64, 300, head=True)]

    def _packed(
        self, empty: int | None = None, shared: bool = False, embedding: bool = False
    ) -> Iterator[tuple[LinearLayer, Layer, LinearScheme, torch.Tensor]]:
        """Yield each layer that has a scheme, or the embedding, loaded and packed, and its float weight: in each float
        type that is accepted, without and with a bias.
        """
        method, draw = self._method(), torch.Generator().manual_seed(0)
        kernels = load("platform", self.platform)().execution().kernels()
        make, layers = (method.embedding, [_EMBEDDING]) if embedding else (method.scheme, self._layers())
        for given, dtype, biased in product(layers, self._dtypes(), (False, True)):
            scheme = make(given)
            if scheme is None:
                continue
            weight = (torch.randn(given.out_features, given.in_features, generator=draw) * 0.05).to(dtype)
            if empty is not None:
                weight[empty] = 0
            bias = torch.randn(given.out_features, generator=draw).to(dtype) if biased else None
            layer = Layer(given, weight.clone(), bias, kernels)
            if shared:
                layer.register_buffer("shared", layer.weight.data)
            scheme.allocate(layer)
            encode = vars(self).get("encode") or type(self).encode  # a function, not a method
            if encode is not None:
                for name, tensor in encode(given, weight, self.config).items():
                    layer.get_parameter(name).data.copy_(tensor)
            scheme.pack(layer)
            yield given, layer, scheme, weight

    def _activations(self, rows: int, given: LinearLayer, weight: torch.Tensor) -> torch.Tensor:
        """Return random activations [rows, in_features] of the weight's type."""
        draw = torch.Generator().manual_seed(rows)
        return torch.randn(rows, given.in_features, generator=draw).to(weight.dtype)


def _projections(given: LinearLayer) -> dict[str, int]:
    """Equal shares of the outputs, the rest in the last one."""
    if not given.projections:
        return {}
    share, rest = divmod(given.out_features, len(given.projections))
    rows = dict.fromkeys(given.projections, share)
    rows[given.projections[-1]] += rest
    return rows


def _factor(y: torch.Tensor, expected: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Return the factor by which the expected products, without the bias, come nearest to `y`."""
    plain = expected if bias is None else expected - bias
    return ((y.double() - (expected - plain)) * plain).sum().div(plain.square().sum()).item()


def _double(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.double()


def _at(given: LinearLayer, x: torch.Tensor) -> str:
    return f"{given.name} [{given.out_features}, {given.in_features}], {x.shape[0]} rows of {x.dtype}"
