"""`dummy`: random weights, no files needed. For measurements and tests; only used when it is asked for by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule.errors import ConfigError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model
from ferrule_files.shards import known_options, progress

if TYPE_CHECKING:
    import torch

_SPREAD = 0.05


class Dummy(WeightSource):
    """Random weights. The same seed (option `seed`, default 0) gives the same ones on one kind of device, as they are
    drawn there.
    """

    forms = ()

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "random weights are never chosen automatically"

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        seed = known_options(options, "seed").get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"--model-loader-extra-config: 'seed' must be an integer, not {seed!r}.")
        self.place = "random weights"
        parameters = dict(cast("torch.nn.Module", model).named_parameters())
        devices = [parameter.device for parameter in parameters.values() if not parameter.is_meta]
        draw = torch.Generator(devices[0] if devices else "cpu").manual_seed(seed)
        with progress(options, sum(parameter.nbytes for parameter in parameters.values())) as bar:
            for name, parameter in parameters.items():
                yield name, _random(name, parameter, draw)
                bar.update(parameter.nbytes)


def _random(name: str, parameter: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return random weights: matrices are uniform and small, norms one, biases zero, so that activations stay finite at
    any depth.
    """
    import torch

    if parameter.dim() < 2 or not parameter.is_floating_point():
        value = 1 if name.endswith("weight") and parameter.is_floating_point() else 0
        return torch.full(parameter.shape, value, dtype=parameter.dtype, device=draw.device)
    made = torch.empty(parameter.shape, device=draw.device)
    return made.uniform_(-_SPREAD, _SPREAD, generator=draw).to(parameter.dtype)
