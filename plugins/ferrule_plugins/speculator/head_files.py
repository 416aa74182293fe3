"""The files of small heads that guess tokens: a folder of their own, or a part of the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferrule.checkpoint import Values, completed, positive
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import BuildContext, Packable
from ferrule.interfaces.quantization import QuantizationMethod
from ferrule.interfaces.speculator import SpeculatorContext
from ferrule.small_files import read_json
from ferrule_files.safetensors import read_tensors, shapes
from ferrule_nn import Naming, load_into, need
from ferrule_plugins.load_format.pt import PyTorchFiles, read_file
from ferrule_plugins.load_format.safetensors import Safetensors

Wanted = Callable[[str], bool]  # of the name that a head has for a tensor


class HeadFiles:
    """The weights in a folder, in safetensors files or PyTorch's. Only tensors that are wanted are read.

    `shapes` has the shape of each by the head's name for it, which `naming` makes of the file's.
    """

    def __init__(self, folder: Path, naming: Naming, wanted: Wanted = lambda name: True) -> None:
        """Read names and shapes. Raises CheckpointError for damaged files, and where there is no tensor."""
        self.folder, self._naming, self._is_wanted = folder, naming, wanted
        self._safe = Safetensors.files(folder)
        self._pickled = [] if self._safe else PyTorchFiles.files(folder)
        self.shapes: Mapping[str, tuple[int, ...]] = {naming.rename(name): shape for name, shape in self._shapes()}
        if not self.shapes:
            raise CheckpointError(f"{folder} has no weights of a head that guesses tokens.")

    def narrowed(self, wanted: Wanted) -> HeadFiles:
        """Return the same files with fewer tensors."""
        return HeadFiles(self.folder, self._naming, wanted)

    def _wanted(self, name: str) -> bool:
        return self._is_wanted(self._naming.rename(name))

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file in self._safe:
            yield from ((name, shape) for name, (shape, _) in shapes(file).items() if self._wanted(name))
        if not self._safe:
            yield from ((name, tuple(tensor.shape)) for name, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the wanted tensors, on the host, by the file's names."""
        for file in self._safe:
            sizes = {name: size for name, (_, size) in shapes(file).items() if self._wanted(name)}
            yield from read_tensors(file, sizes)
        for file in self._pickled:  # mapped
            yield from ((name, tensor) for name, tensor in read_file(file).items() if self._wanted(name))

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor by the head's name for it; None where there is none."""
        return next((tensor for source, tensor in self.tensors() if self._naming.rename(source) == name), None)

    def need(self, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix. Raises CheckpointError where there is none of that name."""
        shape = self.shapes.get(name, ())
        if len(shape) != 2:
            raise CheckpointError(f"The weights in {self.folder} have no matrix {name}.")
        return shape

    def fill(self, head: nn.Module, build: BuildContext, method: QuantizationMethod | None = None) -> None:
        """Load the tensors into a head, and pack it. Raises CheckpointError where these are not exactly its weights.

        `method` reads what is quantized among them. A head on the meta device is only compared with the tensors' names
        and shapes, and not at all if it is quantized.
        """
        outlined = torch.empty(0, device=build.device).is_meta
        if outlined and method is not None:
            return
        tensors = self._outlines(build.dtype) if outlined else self.tensors()
        tensors = tensors if method is None else method.decode_tensors(tensors)
        asked = {name for name, _ in head.named_parameters()}
        try:
            with torch.no_grad():
                filled = load_into(head, tensors, self._naming)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error.message}", error.hint) from None
        missing = sorted(asked.intersection(name for name, _ in head.named_parameters()) - filled)
        if missing:
            raise CheckpointError(f"The weights in {self.folder} lack {', '.join(missing[:3])}.")
        for part in () if outlined else head.modules():
            if isinstance(part, Packable):
                part.pack()

    def _outlines(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors without values, by the file's names."""
        for name, shape in self._shapes():
            yield name, torch.empty(shape, dtype=dtype, device="meta")


def folder_of(context: SpeculatorContext, method: str) -> Path:
    """Return the folder that the settings name as `model`. Raises ConfigError where they name none."""
    if "model" not in context.settings:
        raise ConfigError(
            f"--speculative-config: the method {method} needs the key 'model', a folder or hub id with its weights."
        )
    return Path(context.settings["model"])


def config_of(folder: Path) -> Values:
    """Read a head's config.json. Raises CheckpointError."""
    file = folder / "config.json"
    stated = read_json(file)
    return Values(stated, file, stated, stated)


def size(config: Mapping[str, Any], key: str) -> int:
    """Return a size that the configuration must have. Raises CheckpointError that names file and key."""
    return positive(config, key) or config[key]


@dataclass(frozen=True)
class TargetSizes:
    """The sizes of the model whose tokens are guessed."""

    hidden: int
    vocab: int
    layers: int

    @classmethod
    def of(cls, context: SpeculatorContext) -> TargetSizes:
        config = target_config(context)
        return cls(*(int(need(config, name)) for name in ("hidden_size", "vocab_size", "num_hidden_layers")))

    def check(self, folder: Path, *, hidden: int, vocab: int) -> None:
        """Raise CheckpointError for a head that was made for other sizes."""
        pairs = (("vocabulary", vocab, self.vocab), ("hidden size", hidden, self.hidden))
        wrong = [f"a {what} of {own}, and the model has {other}" for what, own, other in pairs if own != other]
        if wrong:
            raise CheckpointError(
                f"The head in {folder} is for {'; for '.join(wrong)}.", "It was made for another model."
            )


def target_config(context: SpeculatorContext) -> Mapping[str, Any]:
    """Return the target's configuration, under common names and with its architecture's defaults."""
    kind = type(context.target)
    return completed(context.build.config, kind.config_names, kind.config_defaults)


def check_count(context: SpeculatorContext, folder: Path, heads: int) -> None:
    """Raise ConfigError where more guesses are asked for than there are heads, each of which makes one."""
    if context.num_tokens > heads:
        raise ConfigError(
            f"--speculative-config.num_speculative_tokens {context.num_tokens}: {folder} has {heads} heads, and each "
            "guesses one token.",
            f"Ask for {heads} or fewer." if heads else "",
        )


def best(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest id [rows] of logits [rows, vocab]."""
    return logits.argmax(-1)
