"""The kit of load formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.load_format import WeightSource, WritesWeights
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown

Write = Callable[[Path, Mapping[str, torch.Tensor]], None]


def _safetensors(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(weights), str(folder / "model.safetensors"))


def _safetensors_shards(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    _shards(folder, weights, "model.safetensors", lambda part, file: save_file(part, str(file)))


def _pickled(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    torch.save(dict(weights), folder / "pytorch_model.bin")


def _pickled_shards(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    _shards(folder, weights, "pytorch_model.bin", torch.save)


def _shards(folder: Path, weights: Mapping[str, torch.Tensor], name: str, save: Callable[[Any, Any], None]) -> None:
    """Write two files and an index, as transformers does."""
    stem, _, ending = name.partition(".")
    names = list(weights)
    files = {f"{stem}-1.{ending}": names[::2], f"{stem}-2.{ending}": names[1::2]}
    for file, part in files.items():
        save({key: weights[key] for key in part}, folder / file)
    index = {"metadata": {}, "weight_map": {key: file for file, part in files.items() for key in part}}
    (folder / f"{name}.index.json").write_text(json.dumps(index))


class LoadFormatKit(Kit):
    """A load format gives every tensor of a checkpoint once, bit-equal, and refuses what is missing or damaged.

    Settings: `writers`, functions (folder, tensors) that write a checkpoint of the format. By default those of the
    common formats that the plugin does not refuse; a format that is used only when it is named gives its own. A format
    that writes weights reads what it has written, too.
    `name_of`, under which name a tensor of the checkpoint comes out; by default its own.
    """

    kind = "load_format"
    writers: Sequence[Write] = (_safetensors, _safetensors_shards, _pickled, _pickled_shards)
    name_of: Callable[[str], str] = staticmethod(str)

    def weights(self) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        found = {f"layers.{n}.weight": torch.randn(5 + n, 7, generator=draw).to(t) for n, t in enumerate(types)}
        found["bias"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
        found["counts"] = torch.arange(-3, 9, dtype=torch.int64).reshape(2, 2, 3)
        found["empty"] = torch.zeros(0, 4)
        found["scalar"] = torch.tensor(3.5)
        return found

    # ------------------------------------------------------------------------------------ promises

    def test_every_tensor_once_and_bit_equal(self) -> None:
        """Yield each tensor of the checkpoint once, on the CPU, in its stored type, with exactly its bits."""
        for folder, weights in self._checkpoints():
            seen: dict[str, torch.Tensor] = {}
            for name, tensor in self.tensors(folder):
                promise(name not in seen, f"{name!r} comes twice")
                seen[name] = tensor.clone()
            promise(seen.keys() == weights.keys(), f"tensors differ: {shown(sorted(seen.keys() ^ weights.keys()))}")
            for name, wanted in weights.items():
                got = seen[name]
                form = (got.dtype, got.shape, got.device.type) == (wanted.dtype, wanted.shape, "cpu")
                promise(form and _bits(got) == _bits(wanted), f"{name!r} is not what was stored")

    def test_shapes_are_those_of_the_tensors(self) -> None:
        """Return from `shapes`, where the format knows any, the shapes of the checkpoint's tensors."""
        for folder, weights in self._checkpoints():
            found = self.new().shapes(folder, {})
            wanted = sorted(tuple(tensor.shape) for tensor in weights.values())
            promise(found is None or sorted(found.values()) == wanted, f"shapes are {shown(found)}")

    def test_the_place_of_a_tensor_is_told(self) -> None:
        """Name in `place` the file of each tensor as it comes, and the folder after the last one."""
        for folder, _ in self._checkpoints():
            source: WeightSource = self.new()
            for name, _ in source.tensors(folder, _model(), {}):
                promise(Path(source.place).is_file(), f"the place of {name!r} is {source.place!r}, which is not a file")
            promise(Path(source.place) == folder, f"the last place is {source.place!r}, not the folder")

    def test_nothing_is_kept_between_loads(self) -> None:
        """Load twice with one object, and another folder after it, with the same result as a new object."""
        source: WeightSource = self.new()
        for folder, weights in self._checkpoints():
            for _ in range(2):
                names = sorted(name for name, _ in source.tensors(folder, _model(), {}))
                promise(names == sorted(weights), f"a second load gives {shown(names)}")

    def test_damaged_files_are_named(self) -> None:
        """Raise CheckpointError for a file that is cut short or empty, naming the file or the tensor."""
        for folder, _ in self._checkpoints():
            for file in sorted(folder.iterdir()):
                whole = file.read_bytes()
                for length in (0, 1, len(whole) // 2, len(whole) - 1):
                    file.write_bytes(whole[:length])
                    said = self._refusal(folder)
                    promise(file.name in said, f"{file.name} cut to {length} bytes: {shown(said)}")
                file.write_bytes(whole)

    def test_a_missing_file_is_named(self) -> None:
        """Raise CheckpointError for a missing file of the checkpoint, and never yield fewer tensors."""
        for folder, _ in self._checkpoints():
            for file in sorted(folder.iterdir()):
                if file.suffix == ".json":
                    continue
                whole = file.read_bytes()
                file.unlink()
                promise(bool(self._refusal(folder)), f"nothing is said of the missing {file.name}")
                file.write_bytes(whole)

    def test_unknown_options_are_refused(self) -> None:
        """Raise ConfigError that names an option which the format does not know."""
        folder = next((folder for folder, _ in self._checkpoints(skip=False)), None)
        try:
            list(self.new().tensors(folder, _model(), {"no_such_option": 1}))
        except ConfigError as error:
            promise("no_such_option" in str(error), f"the refusal does not name the option: {shown(str(error))}")
        else:
            promise(False, "an unknown option is accepted")

    def test_refusal_is_an_answer(self) -> None:
        """Return a reason or None from `refuses` for no folder, a missing, an empty and a foreign one, and never
        raise.
        """
        empty, foreign = self.folder(), self.folder()
        (foreign / "config.json").write_text("{")
        (foreign / "weights.xyz").write_bytes(b"\0" * 100)
        for folder in (None, empty, empty / "none", foreign, foreign / "config.json"):
            reason = self.plugin.refuses(folder)
            told = reason is None or (isinstance(reason, str) and bool(reason))
            promise(told, f"refuses({folder and folder.name}) gives {shown(reason)}")

    def test_what_is_fetched_is_stated(self) -> None:
        """State in the class itself which files are fetched: `forms` and `reserves` are patterns of file names, none
        with a folder, and a format that has `describe` says that it `describes`.
        """
        cls: type[WeightSource] = self.plugin
        for name in ("forms", "reserves", "describes", "streams_from"):
            usual = getattr(cls, name) == getattr(WeightSource, name)
            promise(usual or name in vars(cls), f"{name} is inherited, and read without an import")
        for form in (*(cls.forms or ()), cls.reserves):
            for pattern in (form,) if isinstance(form, str) else form:
                promise(isinstance(pattern, str) and "/" not in pattern and bool(pattern), f"pattern {pattern!r}")
        has = cls.describe.__func__ is not WeightSource.describe.__func__  # type: ignore[attr-defined]
        promise(has == cls.describes, f"describes is {cls.describes}, and {'a' if has else 'no'} describe is there")

    def test_what_needs_no_files_fills_the_model(self) -> None:
        """Yield, in a format without files, each parameter of the model once, in its shape and type, the same each
        time.
        """
        if self.plugin.forms or any(True for _ in self._checkpoints(skip=False)):
            does_not_apply("this format reads files")
        model = _model()
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_parameters()}
        first, again = ([*self.new().tensors(None, model, {})] for _ in range(2))
        got = {name: (tensor.shape, tensor.dtype) for name, tensor in first}
        promise(got == wanted and len(first) == len(wanted), f"{shown(got)} comes, not {shown(wanted)}")
        equal = all(torch.equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))
        promise(equal, "a second load gives other numbers")

    # ------------------------------------------------------------------------------------ parts

    def tensors(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.new().tensors(folder, _model(), {})

    def _checkpoints(self, skip: bool = True) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
        """Yield folders that the format accepts, with their tensors."""
        found, given = False, self.writers is not LoadFormatKit.writers
        own = [self._write] if issubclass(self.plugin, WritesWeights) else []
        for write in (*own, *self.writers):
            folder, weights = self.folder(), self.weights()
            write(folder, weights)
            if given or write in own or self.plugin.refuses(folder) is None:
                found = True
                yield folder, {self.name_of(name): tensor for name, tensor in weights.items()}
        if skip and not found:
            does_not_apply("no writer makes a checkpoint of this format: give `writers`")

    def _write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
        needed = self.plugin.write(folder, forms, weights.items())
        promise(not needed, f"without options it needs {shown(needed)} to be read")

    def _refusal(self, folder: Path) -> str:
        """Return the message of the CheckpointError; empty when the load succeeds."""
        try:
            for _ in self.tensors(folder):
                pass
        except CheckpointError as error:
            return str(error)
        return ""


def _model() -> Any:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
            self.norm = torch.nn.LayerNorm(4)

    return Small()


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
