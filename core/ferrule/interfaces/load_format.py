"""`load_format`: where weights come from. Entry point name = what `--load-format` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from ferrule.interfaces.model import Model


@dataclass(frozen=True)
class Description:
    """A model folder for files that say all of it themselves. `texts`: small files such as ``config.json``, by name.

    `weights` are the files of the model, which will be in that folder under their own names.
    """

    texts: Mapping[str, bytes]
    weights: tuple[Path, ...]


class WeightSource(ABC):
    """`forms` say which files of a hub repository the format needs, when it is named and for `auto`.

    Each form is a pattern of file names, or a tuple of them. All files of the first form are fetched of which the
    repository has one. Without forms no weights are fetched. None says nothing: a format that is named gets all files
    then. `auto` goes through the forms of all formats by their `fetch_order`, the lowest first.

    `reserves` are patterns of files that no other format is to get, although they may match its forms. `describes` says
    that the files are a model without a ``config.json``: see `describe`. `streams_from` are beginnings of the names of
    models whose weights the format reads from where they are: none are fetched. These five are literals of the class
    itself, because they are read without an import.

    `place` is set by `tensors` before each tensor that it yields, to the file that holds it, and to the folder after
    the last one. Error messages about a tensor name it and this place.

    `config_file` is the name of a file that may take the place of ``config.json``, and `config_names` maps its own
    names to the common ones there (`n_heads` to `num_attention_heads`), for messages. `--config-format` with the
    format's name chooses it, and so does `auto` where there is no ``config.json``. The former is a literal of the class
    itself, because it is read without an import.

    `quantization` is the method that the format is made for: `--quantization` is that where it names none, and naming
    another is an error.
    """

    forms: ClassVar[tuple[str | tuple[str, ...], ...] | None] = None
    fetch_order: ClassVar[int] = 0
    reserves: ClassVar[tuple[str, ...]] = ()
    describes: ClassVar[bool] = False
    streams_from: ClassVar[tuple[str, ...]] = ()
    config_file: ClassVar[str | None] = None
    config_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    place: str = ""
    quantization: str | None = None

    @classmethod
    @abstractmethod
    def refuses(cls, folder: Path | None) -> str | None:
        """Say why `auto` should not choose this format for the folder, or return None: `auto` takes the first of those.

        Not asked about a format that was chosen by name; that one's `tensors` raises.
        """

    @classmethod
    def describe(cls, place: Path) -> Description | None:
        """Read what the files of a model say beside weights, for formats whose files say it; None for all others.

        `place` is one of these files, whose name matches `forms`, or a folder that is not refused. Raises
        CheckpointError. Called in the launcher: imports neither torch nor anything that takes as long.
        """
        return None

    @classmethod
    def configuration(cls, stated: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
        """Translate the statements of the file `config_file` into the terms of a ``config.json``. Raises
        CheckpointError.

        Called in all processes: imports neither torch nor anything that takes as long.
        """
        raise NotImplementedError(f"{cls.__name__} states a config_file and does not read it")

    @abstractmethod
    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of the checkpoint once, in the type that the file has: on the CPU, where no option names
        another device.

        `options` is `--model-loader-extra-config` plus `use_tqdm_on_load`, `ignore_patterns` and
        `pt_load_map_location`, devices by the locations that files state; an unknown key is a ConfigError.
        Raises CheckpointError that names file and tensor for anything missing or damaged.
        """

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]] | None:
        """Return names and shapes of all tensors, as the files have them, or None where only reading the tensors would
        tell.

        Raises as `tensors` does.
        """
        return None


class WritesWeights(ABC):
    """A mix-in of formats that `ferrule pack --format NAME` writes, too."""

    @classmethod
    @abstractmethod
    def write(
        cls, into: Path, forms: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]], **options: Any
    ) -> Mapping[str, Any]:
        """Write a checkpoint's tensors into a folder, and return what `--model-loader-extra-config` must say for them
        to be read.

        `forms` are all tensors on the meta device, by name; `tensors` brings each once, in this order. `options` may
        have `encryption_keyfile`, the file of the key that tensors are encrypted with. Raises OSError, and ConfigError
        for a type of tensors or an option that the format does not have.
        """
