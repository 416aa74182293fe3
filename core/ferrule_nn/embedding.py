"""Token and position embeddings, and the head that maps back to the vocabulary."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.adapters import AdapterBank, AddedRows
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import InputEmbeds
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule.interfaces.ranks import WHOLE
from ferrule_nn import ops
from ferrule_nn.adapted import TokenAdd, adapted, add_chosen, added_logits, alive, token_add, undivided, with_added
from ferrule_nn.division import ROWS, DividedParameter, Split, current_shard
from ferrule_nn.linear import Linear
from ferrule_nn.parameters import parameter


class Table(Linear):
    """An embedding's quantized table: its rows are read, and nothing is multiplied by it."""

    def __init__(self, weight: nn.Parameter, scheme: LinearScheme, kernels: Kernels) -> None:
        """Make a table in place of `weight`, the parameter that a checkpoint without quantization would fill."""
        with torch.device("meta"), ops.using(kernels):  # the memory is that of `weight`
            super().__init__(weight.shape[1], weight.shape[0])
        if isinstance(weight, DividedParameter):
            self.shard, self.division = weight.shard, weight.division
        self.device, self.weight = weight.device, weight
        self.scheme, self.quantized = scheme, True
        scheme.allocate(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [tokens] to rows [tokens, size]."""
        rows = self.scheme.rows(self)
        if rows is None:
            raise RuntimeError("the scheme of an embedding reads rows once they are packed, and this one does not")
        return rows(ids)


class Embedding(nn.Module):
    """An embedding: rows of a table [count, size], times `scale`, in the table's type.

    Embeddings that are `given` replace these. A quantized table is a layer of its own within this one, `table`. The
    checkpoint's name for it is the embedding's. With the split `ROWS` each rank has a part of the rows, and gives zeros
    for others before the ranks' are added up.
    """

    def __init__(self, count: int, size: int, scale: float = 1.0, split: Split | None = None) -> None:
        super().__init__()
        self.count, self.size, self.scale = count, size, scale
        self.weight: torch.Tensor = parameter(count, size, division=None if split is None else split.of(count))
        self.shard, self.own_count = current_shard() if split else WHOLE, len(self.weight)
        self.kernels = ops.current()
        self._rows: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.exact = True  # rows are as the checkpoint has them
        self.name = ""  # path in the model, once adapters know it
        self._add: TokenAdd | None = None  # what adapters change
        self._added: AddedRows | None = None  # and what they add
        self._bank: AdapterBank

    def quantize(self, name: str, method: QuantizationMethod) -> bool:
        """Quantize the table, unless no kernel could read its rows. Returns whether it did."""
        weight = cast(nn.Parameter, self.weight)
        kernels = self.kernels.part(ops.LayerKernels)
        if kernels is None or not kernels.reads_rows:
            return False
        scheme = method.embedding(LinearLayer(name, self.size, self.count))
        if scheme is not None:
            self.table = Table(weight, scheme, self.kernels)
            self.table.check_units(name, scheme.units(self.table))
            self.read_by(self.table.forward)
            self.exact = False
        return scheme is not None

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add the adapters' part to the rows, before they are scaled. Each rank has all of it."""
        own, divided = weakref.ref(self), self.shard.size > 1

        def weights(ids: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
            table = alive(own)
            return None if divided else (table._read(ids), table.exact)

        layer = replace(undivided(name, self.count, self.size, table=True), weights=weights)
        self.name, self._bank, self._add = name, bank, token_add(bank, layer)
        self._added = None if self._add is None else bank.added(layer)
        return self._add is not None

    def read_by(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have `rows` read the table from now on, from the head's packed form of it."""
        self._rows = rows
        self.remove_table()

    def remove_table(self) -> None:
        """Drop the table: `weight` keeps its width, has no rows, and is not a parameter any more."""
        empty = self.weight.detach().new_empty(0, self.size)
        del self.weight
        self.weight = empty

    def forward(self, ids: torch.Tensor, given: InputEmbeds | None = None) -> torch.Tensor:
        added = None if self._added is None or self._added.data is None else self._added
        known = ids if added is None else ids.clamp(max=self.count - 1)
        rows = self._read(known) if self.shard.size == 1 else self._collected(known)
        rows = rows if self._add is None else self._add(known, rows)
        rows = rows if added is None else with_added(added, ids, rows, self._bank.token_slots)
        if self.scale != 1.0:
            rows = rows * rows.new_full((), self.scale)  # made on the device: a copy to it could not be recorded
        return rows if given is None else rows.index_copy(0, given.tokens, given.data.to(rows.dtype))

    def _read(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight) if self._rows is None else self._rows(ids)

    def _collected(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks' parts of the table."""
        ids = ids - self.shard.rank * self.own_count
        others = (ids < 0) | (ids >= self.own_count)
        rows = self._read(ids.masked_fill(others, 0)).masked_fill(others.unsqueeze(-1), 0)
        return self.shard.collectives.all_reduce(rows)


class Head(Linear):
    """The map from hidden states to logits, float32. With `tied` it uses that embedding's table and has no parameters.

    `scale` multiplies the logits; `soft_cap` c maps them to c tanh(logits / c). Ranks divide the vocabulary, unless
    they do not divide that embedding; each returns the logits of all.
    """

    head = True
    of_tokens = False  # of those that are sampled

    def __init__(self, hidden_size: int, vocab_size: int, tied: Embedding | None = None, bias: bool = False) -> None:
        split = ROWS if tied is None or isinstance(tied.weight, DividedParameter) else None
        super().__init__(hidden_size, vocab_size, bias, split=split)
        if split is not None and self.shard.size > 1:
            gather = self.shard.collectives.all_gather
            self.register_forward_hook(lambda head, given, logits: gather(logits)[..., :vocab_size])
        self.ignored_tensors = ("weight",) if tied is not None else ()  # a copy of the embedding's
        self.scale = 1.0
        self.soft_cap = 0.0
        self._tied = (tied,)  # in a tuple, so that torch does not register it as a submodule
        self._add: TokenAdd | None = None  # what adapters change
        if tied is not None:
            self.weight = cast(nn.Parameter, tied.weight)  # a parameter until it is packed

    @property
    def tied(self) -> Embedding | None:
        """The embedding whose table this is."""
        return self._tied[0]

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add the adapters' part to the logits, before they are scaled, and the logits of tokens that they add."""
        layer = adapted(name, [self], {name: (0, None)}, tied="" if self.tied is None else self.tied.name)
        add = bank.layer(layer)
        if add is None:
            return False
        self._add = lambda hidden, logits: add_chosen(add, hidden, logits, bank.row_slots)
        added = bank.added(layer)
        if added is not None:  # by a hook, which runs once the logits of all ranks are there

            def extend(head: Head, given: tuple[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
                more = added_logits(added, given[0], bank)
                return logits if more is None else torch.cat((logits, head._scaled(more)), 1)

            self.register_forward_hook(extend)
        return True

    def pack(self) -> None:
        """Pack the weight. A tied embedding reads rows from the packed form if it can, else the table is kept twice."""
        super().pack()
        rows = None if self.tied is None else self.scheme.rows(self)
        if self.tied is not None and rows is not None:
            self.tied.read_by(rows)
            self.tied.exact = not self.quantized

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], float32."""
        logits = super().forward(hidden)
        logits = logits if self._add is None else self._add(hidden, logits)
        return self._scaled(logits).float()

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
