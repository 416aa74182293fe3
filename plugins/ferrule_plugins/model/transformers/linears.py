"""Quantization of the library's linear layers, when their weights are there.

A layer is replaced by one of `ferrule_nn` that a quantization method has a scheme for. Left as they are: a head that
shares its weight with the embedding, layers whose weight their model reads itself (some state models multiply by it in
code of their own), classes that compute something else than a product, and experts that are one tensor of three
dimensions.

Of a quantized checkpoint, layers are made before the library's model is: it is given the floats that they stand for, is
tried with these, and then has the layers in their place. So loading needs the memory of the floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule.log import Log
from ferrule_nn import Linear, load_into
from ferrule_quant.products import products_of

_log = Log("worker")
_INPUTS = 1024  # of a layer that are multiplied at a time


class _AnyShape(Linear):
    """A linear layer for inputs [..., in], as the library's layers are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = super().forward(x.reshape(-1, self.in_features).contiguous())
        return flat.to(x.dtype).view(*x.shape[:-1], self.out_features)


def any_scheme(inner: Any, method: QuantizationMethod) -> bool:
    """Return whether the method has a scheme for any layer."""
    return any(method.scheme(_layer(inner, path, linear)) is not None for path, linear in _candidates(inner))


def stored(
    inner: Any,
    method: QuantizationMethod,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, Linear], dict[str, torch.Tensor]]:
    """Return the packed layers of a checkpoint that is quantized, by their paths, and its tensors with floats in their
    place.

    Raises CheckpointError for tensors that do not fit.
    """
    given, made = dict(tensors), dict[str, Linear]()
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, _, last = name.rpartition(".")
        parts.setdefault(before, {})[last] = tensor
    for path, linear in _candidates(inner):
        own = parts.get(path, {})
        scheme = method.scheme(_layer(inner, path, linear))
        if scheme is None or from_floats(scheme) or own.keys() <= {"weight", "bias"}:
            continue
        with torch.device(device):
            layer = _AnyShape(linear.in_features, linear.out_features, linear.bias is not None).to(dtype)
        layer.head = _is_head(inner, linear)
        layer.scheme, layer.quantized = scheme, True
        scheme.allocate(layer)
        holder = nn.Module()
        holder.layer = layer
        load_into(holder, [(f"layer.{name}", each) for name, each in own.items()])
        if not layer.packed:
            raise CheckpointError(f"The checkpoint lacks tensors of {path}: it has {', '.join(sorted(own)) or 'none'}.")
        for name in own.keys() - {"bias"}:
            del given[f"{path}.{name}"]
        given[f"{path}.weight"] = _floats(layer, dtype)
        made[path] = layer
    return made, given


def from_floats(scheme: LinearScheme) -> bool:
    """Return whether a scheme quantizes float weights, and so leaves a layer's parameters as they are."""
    return type(scheme).allocate is LinearScheme.allocate


def _floats(layer: Linear, dtype: torch.dtype) -> torch.Tensor:
    """Return the float matrix that a packed layer multiplies by, [out, in]: its products with each input alone."""
    device = layer.device
    kind = torch.float32 if products_of(layer).any_type else dtype
    nothing = layer(torch.zeros((1, layer.in_features), dtype=kind, device=device))
    rows = []
    for first in range(0, layer.in_features, _INPUTS):
        count = min(_INPUTS, layer.in_features - first)
        x = torch.zeros((count, layer.in_features), dtype=kind, device=device)
        x[:, first : first + count].fill_diagonal_(1.0)
        rows.append((layer(x) - nothing).to(dtype))
    return torch.cat(rows).t().contiguous()


def replace(
    inner: Any,
    method: QuantizationMethod,
    device: torch.device,
    run: Callable[[], None],
    made: Mapping[str, Linear] | None = None,
) -> None:
    """Quantize the layers that can be; each layer's float weight is freed before the next is read.

    `run` runs the model. `made` are the layers of a checkpoint that is quantized.
    """
    read = _read_by_others(inner, run)
    left, done = 0, 0
    for path, linear in list(_candidates(inner)):
        if path in read or not _is_product(linear):
            left += 1
            continue
        layer = (made or {}).get(path) or _quantized(inner, path, linear, method, device)
        if layer is None:
            left += 1
            continue
        parent, _, last = path.rpartition(".")
        setattr(inner.get_submodule(parent), last, layer)
        done += 1
    _log.info("linear layers quantized", quantized=done, left_as_they_are=left)


def _candidates(inner: Any) -> Iterator[tuple[str, nn.Linear]]:
    table = inner.get_input_embeddings()
    shared = getattr(table, "weight", None)
    for path, module in inner.named_modules():
        if isinstance(module, nn.Linear) and module.weight is not shared:
            yield path, module


def _layer(inner: Any, path: str, linear: nn.Linear) -> LinearLayer:
    return LinearLayer(path, linear.in_features, linear.out_features, head=_is_head(inner, linear))


def _is_head(inner: Any, linear: nn.Linear) -> bool:
    return linear is inner.get_output_embeddings()


def _quantized(
    inner: Any, path: str, linear: nn.Linear, method: QuantizationMethod, device: torch.device
) -> Linear | None:
    """Return the layer with its float weight quantized; None where the method leaves it as it is."""
    scheme = method.scheme(_layer(inner, path, linear))
    if scheme is None or not from_floats(scheme):
        return None
    weight, bias = linear.weight.detach(), linear.bias
    with torch.device("meta"):
        layer = _AnyShape(linear.in_features, linear.out_features, bias is not None)
    layer.device = device
    layer.head = _is_head(inner, linear)
    layer.scheme, layer.quantized = scheme, True
    scheme.allocate(layer)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    layer.pack()
    return layer


def _is_product(linear: nn.Linear) -> bool:
    """Return whether a layer computes what `nn.Linear` does; classes derived from it may do more."""
    if type(linear) is nn.Linear:
        return True
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((2, linear.in_features), generator=draw).to(linear.weight)
    try:
        with torch.inference_mode():
            given, plain = linear(x), nn.functional.linear(x, linear.weight, linear.bias)
    except Exception:  # a class that takes something else
        return False
    return isinstance(given, torch.Tensor) and torch.allclose(given, plain, rtol=1e-2, atol=1e-2)


def _read_by_others(inner: Any, run: Callable[[], None]) -> set[str]:
    """Return the paths of the layers whose weight or bias is read elsewhere than in their own forward pass, as a run
    shows.
    """
    watched = dict(_candidates(inner))
    classes = {path: type(linear) for path, linear in watched.items()}
    try:
        for linear in watched.values():
            linear.__class__ = _watching(type(linear))
        run()
    finally:
        for path, linear in watched.items():
            linear.__class__ = classes[path]
            linear.__dict__.pop("ferrule_runs", None)
    return {path for path, linear in watched.items() if linear.__dict__.pop("ferrule_read", False)}


def _watching(cls: type[nn.Linear]) -> type[nn.Linear]:
    """Return a class that notes when its parameters are read while it does not run."""

    class Watching(cls):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            if name in ("weight", "bias") and not self.__dict__.get("ferrule_runs", False):
                self.__dict__["ferrule_read"] = True
            return super().__getattr__(name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.__dict__["ferrule_runs"] = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.__dict__["ferrule_runs"] = False

    return Watching
