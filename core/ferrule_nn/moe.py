"""Mixtures of experts: a router chooses a few feed-forward blocks for each token, and their results are summed.

A family defines a `Routing` (`ferrule_kernels.moe`) and the numbers of an `MoESpec`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add
from ferrule_kernels.moe import Arranged, Routing, arrange, combine, route
from ferrule_nn import ops
from ferrule_nn.adapted import Rows, TokenAdd, adapted, alive, token_add, undivided
from ferrule_nn.division import UNDIVIDED
from ferrule_nn.linear import Linear, PacksForCpu
from ferrule_nn.mlp import GatedMLP
from ferrule_nn.parameters import parameter

__all__ = ["Experts", "MoE", "MoESpec", "Router", "Routing"]


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The numbers of one layer's experts. `inner_size` is that of one expert, `shared_size` that of the shared ones.

    With `correction` the router has a bias for the choice alone. With `weigh_inputs` an expert's weight multiplies its
    input, and not its result (Llama 4). With `shared_gate` the shared expert's result is multiplied by a sigmoid.
    """

    hidden_size: int
    inner_size: int
    routing: Routing
    act: str = "silu"
    router_bias: bool = False
    correction: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    weigh_inputs: bool = False


class Router(nn.Module):
    """The scores of experts, and the choice that `Routing` makes by them. Never quantized; computes in float32.

    Parameters: `weight` [experts, hidden]; `bias` [experts] where the model has one; `e_score_correction_bias`
    [experts] float32, which is added to the scores for the choice and not to the weights.
    """

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.routing = spec.routing
        count = spec.routing.num_experts
        self.weight = parameter(count, spec.hidden_size, division=UNDIVIDED)
        self.bias = parameter(count, division=UNDIVIDED) if spec.router_bias else None
        wide = torch.float32
        self.e_score_correction_bias = parameter(count, division=UNDIVIDED, dtype=wide) if spec.correction else None
        self._kernels = ops.for_layers()
        self._route: ops.Route = route
        self._matrix: ops.Matrix | None = None
        self._packed: ops.Library | None = None
        self._add: TokenAdd | None = None  # what adapters change

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add the adapters' part to the scores."""
        self._add = token_add(bank, undivided(name, self.weight.shape[1], self.weight.shape[0]))
        return self._add is not None

    def pack(self) -> None:
        """Copy the weight into the form of the device's kernels. On a CPU rows then have the same bits in any batch."""
        kernels, weight = self._kernels, self.weight.detach()
        self._route = ops.router(kernels, self.routing)
        self._matrix = kernels.matrix(weight, self.bias, False) if kernels.matrix else None
        self._packed = kernels.packed(weight.float()) if kernels.packed and self._matrix is None else None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, hidden] to float32 [tokens, experts]."""
        if self._matrix is not None and x.dtype == self.weight.dtype:
            return self._matrix.multiply(x, torch.float32)
        bias = None if self.bias is None else self.bias.float()
        if self._packed is not None:
            return self._packed.matmul(x.float(), bias)
        return nn.functional.linear(x.float(), self.weight.float(), bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [tokens, hidden] to weights float32 and ids int32 of the experts, both [tokens, top_k]."""
        scores = self.logits(x)
        scores = scores if self._add is None else self._add(x, scores)
        return self._route(scores, self.routing, self.e_score_correction_bias)


class Experts(nn.ModuleList):
    """Feed-forward blocks of one shape, `N.{gate,up,down}_proj`; a checkpoint may stack them (`Naming.stacked`).

    Ranks divide each block, and add up the sum over experts rather than what each expert gives.

    Rows are sorted by their expert, so that each expert's weights are read once in a step. On a GPU, float weights are
    stacked when they are packed, for the grouped products that never wait for the device, with adapters or without;
    quantized ones are multiplied one expert after the other, for which the host must know the router's choice.
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def __init__(self, count: int, make: Callable[[], GatedMLP]) -> None:
        super().__init__(make() for _ in range(count))
        self.blocks: tuple[GatedMLP, ...] = tuple(self)  # type: ignore[arg-type]
        for layer in self.modules():
            if isinstance(layer, Linear):
                layer.of_tokens = False  # each expert has some of them, sorted
        self._kernels = ops.for_layers()
        self._grouped: ops.GroupedExperts | None = None  # where the weights are stacked
        self._banks: tuple[ops.Bank, ops.Bank] | None = None  # where one kernel has all of them
        summed = [block.down_proj for block in self.blocks if block.down_proj.sum_hook is not None]
        for layer in summed:
            layer.leave_sum()
        if summed:
            add_up = summed[0].shard.collectives.all_reduce
            self.register_forward_hook(lambda experts, given, y: add_up(y))
        self._adds: tuple[Add, Add, AdapterBank] | None = None  # adapters' parts of gate_up and down, and their bank
        self._arrange = self._kernels.arrange or arrange
        self._combine = self._kernels.combine or combine

    def pack(self) -> None:
        for block in self.blocks:
            block.pack()
        if self._grouped is not None or self._stack():
            return
        parts = [block.gate_up_proj for block in self.blocks], [block.down_proj for block in self.blocks]
        for layer in (*parts[0], *parts[1]):
            layer.pack()
        gate_up, down = (bank_of(layers, self._kernels) for layers in parts)
        self._banks = None if gate_up is None or down is None else (gate_up, down)

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add adapters of single experts, each the part of a layer."""
        mine = weakref.ref(self)  # a bank keeps no layers

        def described(own: str, layers: Sequence[Linear]) -> AdaptedLayer:
            named = {
                module: (index, projection)
                for index, layer in enumerate(layers)
                for module, projection in layer.modules_of(f"{name}.{index}.{own}").items()
            }
            return adapted(f"{name}.{own}", layers, named, name, rows=lambda part: alive(mine)._rows(own, part))

        gate_up = bank.layer(described("gate_up_proj", [block.gate_up_proj for block in self.blocks]))
        down = bank.layer(described("down_proj", [block.down_proj for block in self.blocks]))
        if gate_up is not None and down is not None:
            self._adds = gate_up, down, bank
        return self._adds is not None

    def _rows(self, own: str, part: int) -> Rows | None:
        """Return what reads rows of an expert's stacked weights; None where its layers have them."""
        if self._grouped is None:
            return None
        return partial((self.gate_up if own == "gate_up_proj" else self.down)[part].index_select, 0)

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return self.buffers(recurse=False)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, weigh_inputs: bool) -> torch.Tensor:
        """Map x [tokens, hidden], with weights and ids [tokens, top_k], to [tokens, hidden]."""
        if self._grouped is not None and self._adds is None:
            return self._grouped_sum(self._grouped, x, weights, ids, weigh_inputs)
        arranged, shared = self._arrange(ids, len(self.blocks)), len(ids) == 1 and not weigh_inputs
        rows = x if shared else x.index_select(0, arranged.tokens)
        if weigh_inputs:
            rows = (rows * _sorted(weights, arranged).unsqueeze(1)).to(x.dtype)
            weights = torch.ones_like(weights)
        given = self._multiplied(rows, arranged, ids, shared)
        return self._combine(given, weights, arranged.places).to(x.dtype)

    def _multiplied(self, rows: torch.Tensor, arranged: Arranged, ids: torch.Tensor, shared: bool) -> torch.Tensor:
        """Return each expert's results for its rows, one after the other; with `shared`, all have the same row."""
        gated = self.blocks[0].gated
        if self._adds is None:
            return self._products(1, gated(self._products(0, rows, arranged, ids, shared)), arranged, ids)
        add_up, add_down, bank = self._adds
        rows = rows.expand(len(arranged.tokens), -1)
        slots = _sorted(bank.token_slots.unsqueeze(1) * len(self.blocks) + ids, arranged)
        inner = gated(add_up(rows, self._products(0, rows, arranged, ids), slots))
        return add_down(inner, self._products(1, inner, arranged, ids), slots)

    def _products(
        self, which: int, rows: torch.Tensor, arranged: Arranged, ids: torch.Tensor, shared: bool = False
    ) -> torch.Tensor:
        """Multiply each expert's rows by its gate_up matrix, or its down matrix."""
        count = len(arranged.tokens)
        if self._banks is not None:
            return self._banks[which].multiply(rows, arranged.counts, count, shared)
        if self._grouped is not None and self._kernels.expert_product is not None:
            weights, bias = ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias))[which]
            return self._kernels.expert_product(rows, weights, _sorted(ids, arranged), bias)
        counts: list[int] = arranged.counts.tolist()
        layers = [(block.gate_up_proj, block.down_proj)[which] for block in self.blocks]
        pieces = rows.expand(count, -1).split_with_sizes(counts)
        return torch.cat([layer(piece) for layer, piece in zip(layers, pieces, strict=True) if len(piece)])

    def _stack(self) -> bool:
        """Move float weights into one tensor for all experts, where there is a kernel for it: on GPUs."""
        parts: tuple[list[Linear], list[Linear]] = (
            [block.gate_up_proj for block in self.blocks],
            [block.down_proj for block in self.blocks],
        )
        kernel = self._kernels.experts
        missing = kernel is None or self._adds is not None and self._kernels.expert_product is None
        if missing or any(layer.quantized for part in parts for layer in part):
            return False
        for name, part in zip(("gate_up", "down"), parts, strict=True):
            biases = [layer.bias.detach() for layer in part if layer.bias is not None]
            self.register_buffer(name, torch.stack([layer.weight.detach() for layer in part]), persistent=False)
            self.register_buffer(f"{name}_bias", torch.stack(biases) if biases else None, persistent=False)
            for layer in part:
                layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
        self._grouped = kernel
        return True

    def _grouped_sum(
        self,
        kernel: ops.GroupedExperts,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        weigh_inputs: bool,
    ) -> torch.Tensor:
        if weigh_inputs:
            x = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
            weights = torch.ones_like(weights)
        block = self.blocks[0]
        fused = type(block) is GatedMLP and block.act_name in self._kernels.acts
        act = block.act_name if fused else block.gated
        return kernel(x, self.gate_up, self.down, weights, ids, act, (self.gate_up_bias, self.down_bias))


def _sorted(values: torch.Tensor, arranged: Arranged) -> torch.Tensor:
    """Return values [tokens, top_k] in the order of the pairs that are sorted, [pairs]."""
    flat = values.flatten()
    return torch.empty_like(flat).index_copy_(0, arranged.places, flat)


def bank_of(layers: Sequence[Linear], kernels: ops.LayerKernels) -> ops.Bank | None:
    """Return the bank that multiplies by all of the layers at once, if one kernel has packed them alike, else None."""
    matrices = [layer.scheme.matrix for layer in layers if isinstance(layer.scheme, PacksForCpu)]
    return kernels.bank(matrices) if kernels.bank and len(matrices) == len(layers) else None


class MoE(nn.Module):
    """A router, its experts, and a shared expert that every token uses.

    Submodules: `gate`, `experts`, `shared_expert` and `shared_expert_gate` where the model has them.
    """

    def __init__(self, spec: MoESpec, make_expert: Callable[[], GatedMLP] | None = None) -> None:
        super().__init__()
        hidden, act = spec.hidden_size, spec.act
        self.weigh_inputs = spec.weigh_inputs
        self.gate = Router(spec)
        make = make_expert or (lambda: GatedMLP(hidden, spec.inner_size, act))
        self.experts = Experts(spec.routing.num_experts, make)
        self.shared_expert = GatedMLP(hidden, spec.shared_size, act) if spec.shared_size else None
        self.shared_expert_gate = SharedGate(hidden) if spec.shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        weights, ids = self.gate(x)
        y: torch.Tensor = self.experts(x, weights, ids, self.weigh_inputs)
        if self.shared_expert is None:
            return y
        shared: torch.Tensor = self.shared_expert(x)
        return y + (shared if self.shared_expert_gate is None else shared * self.shared_expert_gate(x))


class SharedGate(nn.Module):
    """The factor of the shared expert: sigmoid(w x), [tokens, 1]. Never quantized. Parameter: `weight` [1, hidden]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(1, hidden_size, division=UNDIVIDED)
        self._add: TokenAdd | None = None  # what adapters change

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add the adapters' part within the sigmoid."""
        self._add = token_add(bank, undivided(name, self.weight.shape[1], 1))
        return self._add is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x.float() * self.weight.float()).sum(-1, keepdim=True)
        y = y if self._add is None else self._add(x, y)
        return y.sigmoid().to(x.dtype)
