"""Quantization of the library's linear layers, when their weights are there.

A layer is replaced by one of `ferrule_nn` that a quantization method has a scheme for. Left as they are: a head that
shares its weight with the embedding, layers whose weight their model reads itself (some state models multiply by it in
code of their own), classes that compute something else than a product, and experts that are one tensor of three
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule.log import Log
from ferrule_nn import Linear

_log = Log("worker")


class _AnyShape(Linear):
    """Takes [..., in], as the library's layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = super().forward(x.reshape(-1, self.in_features).contiguous())
        return flat.to(x.dtype).view(*x.shape[:-1], self.out_features)


def any_scheme(inner: Any, method: QuantizationMethod) -> bool:
    """Whether the method has a scheme for any layer."""
    return any(method.scheme(_layer(inner, path, linear)) is not None for path, linear in _candidates(inner))


def replace(inner: Any, method: QuantizationMethod, device: torch.device, run: Callable[[], None]) -> None:
    """Quantize what can be; each layer's float weight is freed before the next is read. `run` runs the model."""
    read = _read_by_others(inner, run)
    left, done = 0, 0
    for path, linear in list(_candidates(inner)):
        scheme = None if path in read or not _is_product(linear) else method.scheme(_layer(inner, path, linear))
        if scheme is None:
            left += 1
            continue
        parent, _, last = path.rpartition(".")
        setattr(inner.get_submodule(parent), last, _quantized(linear, scheme, _is_head(inner, linear), device))
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


def _quantized(linear: nn.Linear, scheme: LinearScheme, head: bool, device: torch.device) -> Linear:
    weight, bias = linear.weight.detach(), linear.bias
    with torch.device("meta"):
        layer = _AnyShape(linear.in_features, linear.out_features, bias is not None)
    layer.device = device
    layer.head = head
    layer.scheme, layer.quantized = scheme, True
    scheme.allocate(layer)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    layer.pack()
    return layer


def _is_product(linear: nn.Linear) -> bool:
    """Whether a class computes what `nn.Linear` does; classes derived from it may do more."""
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
    """Paths of the layers whose weight or bias is read elsewhere than in their own forward pass, as a run shows."""
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
    """A class that notes when its parameters are read while it does not run."""

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
