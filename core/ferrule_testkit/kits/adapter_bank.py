"""The kit of adapter banks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferrule.errors import RequestError
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add, BankContext
from ferrule.interfaces.kernels import Kernels
from ferrule.types import Adapter
from ferrule_testkit.adapters import write_adapter
from ferrule_testkit.kits.base import Kit, promise, shown
from ferrule_testkit.simulate import load

Modules = Sequence[tuple[str, int, int]]
MODULES: Modules = (("layers.0.q_proj", 24, 40), ("layers.0.o_proj", 40, 24), ("layers.1.q_proj", 24, 40))
_SLOTS = 3
_ROWS = 7


def write_low_rank(folder: Path, modules: Modules, seed: int) -> None:
    """Write an adapter of low rank for the modules, each a name with inputs and outputs."""
    write_adapter(folder, modules, seed=seed)


def layer(name: str, inputs: int, outputs: int) -> AdaptedLayer:
    """Describe a linear layer that one rank has whole."""
    return AdaptedLayer(
        name=name,
        in_features=inputs,
        out_features={"": outputs},
        own_inputs=inputs,
        own_outputs=(outputs,),
        modules={name: (0, None)},
        inputs=lambda down: down,
        outputs=lambda up, projection: up,
    )


@dataclass
class Opened:
    """A bank, and what it adds to each layer's product."""

    bank: AdapterBank
    adds: dict[str, Add]

    def add(self, name: str, x: torch.Tensor, y: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        return self.adds[name](x, y.clone(), torch.tensor(slots, dtype=torch.int64))


class AdapterBankKit(Kit):
    """A bank adds an adapter's part to the rows of its slot, and nothing to others, whatever is loaded meanwhile.

    Settings: `write`, a function that writes an adapter that the bank reads: it is given a folder, modules with their
    inputs and outputs, and a seed; another seed gives another adapter.
    """

    kind = "adapter_bank"
    write: Callable[[Path, Modules, int], None] = staticmethod(write_low_rank)

    # ------------------------------------------------------------------------------------ promises

    def test_rows_without_an_adapter_keep_their_bits(self) -> None:
        """Change nothing of rows of slot 0, nor of any row before the first adapter is loaded."""
        opened = self.open()
        for name, x, y in self.products():
            promise(torch.equal(opened.add(name, x, y, [1] * _ROWS), y), f"{name}: an empty slot changes a product")
        opened.bank.load(1, self.adapter(1))
        for name, x, y in self.products():
            found = opened.add(name, x, y, [0, 1] * (_ROWS // 2) + [0])
            promise(torch.equal(found[::2], y[::2]), f"{name}: rows of slot 0 are changed")
            promise(not torch.equal(found[1], y[1]), f"{name}: an adapter has no effect")

    def test_a_row_does_not_depend_on_others(self) -> None:
        """Give a row in a batch of several adapters what it has alone."""
        opened = self.open()
        for slot in range(1, 1 + _SLOTS):
            opened.bank.load(slot, self.adapter(slot))
        slots = [row % (1 + _SLOTS) for row in range(_ROWS)]
        for name, x, y in self.products():
            found = opened.add(name, x, y, slots)
            for row in range(_ROWS):
                alone = opened.add(name, x[row : row + 1], y[row : row + 1], slots[row : row + 1])
                _same(alone[0], found[row], f"{name}: a row of slot {slots[row]} is another alone")

    def test_a_slot_does_not_matter(self) -> None:
        """Give an adapter's rows the same in any slot, and beside any other adapter."""
        opened, other = self.open(), self.open()
        opened.bank.load(1, self.adapter(1))
        other.bank.load(3, self.adapter(1))
        other.bank.load(1, self.adapter(2))
        for name, x, y in self.products():
            found, again = opened.add(name, x, y, [1] * _ROWS), other.add(name, x, y, [3] * _ROWS)
            _same(again, found, f"{name}: an adapter is another in slot 3")
            promise(not torch.allclose(other.add(name, x, y, [1] * _ROWS), found), f"{name}: two adapters are the same")

    def test_an_adapter_takes_anothers_place(self) -> None:
        """Load into a slot in use, in place: what `layer` gave before follows, and other slots keep their bits."""
        opened, fresh = self.open(), self.open()
        opened.bank.load(1, self.adapter(1))
        opened.bank.load(2, self.adapter(2))
        before = {name: opened.add(name, x, y, [2] * _ROWS) for name, x, y in self.products()}
        opened.bank.load(1, self.adapter(3))
        fresh.bank.load(1, self.adapter(3))
        for name, x, y in self.products():
            promise(torch.equal(opened.add(name, x, y, [2] * _ROWS), before[name]), f"{name}: another slot is changed")
            found, wanted = opened.add(name, x, y, [1] * _ROWS), fresh.add(name, x, y, [1] * _ROWS)
            _same(found, wanted, f"{name}: something of the adapter that was there before is left")

    def test_an_adapter_for_some_layers_leaves_others(self) -> None:
        """Take an adapter that changes some of the layers, also in the place of one that changes all."""
        opened = self.open()
        opened.bank.load(1, self.adapter(1))
        opened.bank.load(1, self.adapter(2, MODULES[:1]))
        for name, x, y in self.products():
            changed = not torch.equal(opened.add(name, x, y, [1] * _ROWS), y)
            promise(changed == (name == MODULES[0][0]), f"{name}: it is {'' if changed else 'not '}changed")

    def test_reading_loads_nothing(self) -> None:
        """Leave the slots as they are when an adapter is read."""
        opened = self.open()
        opened.bank.read(self.adapter(1))
        for name, x, y in self.products():
            promise(torch.equal(opened.add(name, x, y, [1] * _ROWS), y), f"{name}: an adapter that was read has a slot")

    def test_what_cannot_be_loaded_is_an_error_of_the_request(self) -> None:
        """Raise RequestError for folders that are not there or empty, files, and an adapter of other sizes or modules;
        the slot is empty then, and others are as they were.
        """
        opened, home = self.open(), self.folder()
        opened.bank.load(2, self.adapter(2))
        (home / "file").write_bytes(b"{")
        (home / "empty").mkdir()
        name, inputs, outputs = MODULES[0]
        bad = {
            "nothing": home / "no-such-folder",
            "file": home / "file",
            "empty": home / "empty",
            "sizes": Path(self.adapter(3, [(name, inputs + 1, outputs + 1)]).path),
            "modules": Path(self.adapter(3, [*MODULES, ("layers.0.no_such_module", inputs, outputs)]).path),
        }
        for what, path in bad.items():
            opened.bank.load(1, self.adapter(1))
            adapter = Adapter(name=what, path=str(path))
            _refused(lambda one=adapter: opened.bank.read(one), f"read of {what}")  # type: ignore[misc]
            _refused(lambda one=adapter: opened.bank.load(1, one), f"load of {what}")  # type: ignore[misc]
            for layer_name, x, y in self.products():
                promise(torch.equal(opened.add(layer_name, x, y, [1] * _ROWS), y), f"{what}: its slot is not empty")
                kept = opened.add(layer_name, x, y, [2] * _ROWS)
                promise(not torch.equal(kept, y), f"{what}: another slot is empty after it")

    def test_copies_of_a_model_share_what_is_loaded(self) -> None:
        """Let the layers of a second copy of the model, with the same names, use what is loaded."""
        opened = self.open()
        opened.bank.load(1, self.adapter(1))
        copy = Opened(opened.bank, _layers(opened.bank))
        for name, x, y in self.products():
            found, wanted = copy.add(name, x, y, [1] * _ROWS), opened.add(name, x, y, [1] * _ROWS)
            promise(torch.equal(found, wanted), f"{name}: the second copy has another adapter, or none")

    def test_more_are_read_than_the_host_keeps(self) -> None:
        """Load adapters again that were dropped from the host's memory, however many there are."""
        opened = self.open()
        adapters = [self.adapter(seed) for seed in range(1, 7)]
        for adapter in adapters:
            opened.bank.read(adapter)
        opened.bank.load(1, adapters[0])
        fresh = self.open()
        fresh.bank.load(1, adapters[0])
        for name, x, y in self.products():
            _same(opened.add(name, x, y, [1] * _ROWS), fresh.add(name, x, y, [1] * _ROWS), f"{name}: it has changed")

    # ------------------------------------------------------------------------------------ what it is asked

    def open(self, kernels: Kernels | None = None) -> Opened:
        """Make a bank on the CPU, with its kernels, and give it the layers."""
        made: Any = self.new(
            BankContext(
                num_slots=_SLOTS,
                max_rank=8,
                max_host=_SLOTS,
                dtype=torch.float32,
                device=torch.device("cpu"),
                kernels=load("platform", "cpu")().execution().kernels() if kernels is None else kernels,
            )
        )
        return Opened(made, _layers(made))

    def adapter(self, seed: int, modules: Modules = MODULES) -> Adapter:
        """Write an adapter to a new folder."""
        folder = self.folder()
        self.write(folder, modules, seed)
        return Adapter(name=f"adapter-{seed}-{folder.name}", path=str(folder))

    def products(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return inputs and a product for each layer."""
        draw = torch.Generator().manual_seed(0)
        return [
            (name, torch.randn(_ROWS, inputs, generator=draw), torch.randn(_ROWS, outputs, generator=draw))
            for name, inputs, outputs in MODULES
        ]


def _layers(bank: AdapterBank) -> dict[str, Add]:
    adds = {name: bank.layer(layer(name, inputs, outputs)) for name, inputs, outputs in MODULES}
    promise(any(add is not None for add in adds.values()), "it changes no linear layer")
    return {name: add for name, add in adds.items() if add is not None}


def _same(found: torch.Tensor, wanted: torch.Tensor, message: str) -> None:
    promise(torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), message)


def _refused(call: Callable[[], None], what: str) -> None:
    try:
        call()
    except RequestError as error:
        promise(bool(error.message.strip()), f"{what}: the error says nothing")
        return
    except Exception as error:
        promise(False, f"{what}: {shown(error)} in the place of RequestError")
    promise(False, f"{what}: it is no error")
