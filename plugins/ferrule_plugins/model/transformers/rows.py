"""The way for every class: the requests of a step run one after another through the library's own forward pass.

Nothing of a class is replaced. Before a request runs, its cache object is put together from what blocks and slots keep;
afterwards what the step has added is written there. So prompts can be cut, requests can be preempted, and where a class
keeps only keys and values, prefixes are shared. How a class wants to be called is found out when its weights are there:
each `Manner` is tried on a short text in chunks, until one gives what the class computes of the whole text at once.

A class whose cache cannot be kept, or that has none, computes the whole text anew in each step: always right, and slow.
Then the ids are all that is kept, as bits, which every type of cache keeps exactly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext, LayerCache, StateSpec, StepRow
from ferrule.types import CacheGroup
from ferrule_plugins.model.transformers.caches import Attributes, CacheForm, CannotKeepError, OwnState, name, record_all
from ferrule_plugins.model.transformers.rope import Lengths

_IDS = "ids"  # the layer that keeps them, where nothing else can be kept
_BITS = 32
_CACHES = ("past_key_values", "cache_params", "state", "past_buckets_states", "mems")  # what classes call theirs
_LENGTHS = (3, 5, 8)  # of the texts that show what a cache holds
NO_CACHE = "it keeps nothing from one step to the next, so each step computes the whole text"


@dataclass(frozen=True)
class Manner:
    """A way to call a class."""

    cache: str | None  # the argument with its cache; None: the whole text each time
    library_cache: bool = True  # a first step is given a cache of the library; False: the class makes its own
    mask: bool = False  # a mask of ones, as long as the text
    positions: bool = True
    single: bool = False  # one token at a time behind the first step: chunks would begin anew


class Rows:
    """A runner of one class in one manner, row after row.

    `head`: the hidden states that `forward` gives are the logits already. `fresh`: the attributes of its modules before
    any text.
    """

    def __init__(
        self, ctx: BuildContext, inner: Any, manner: Manner, *, head: bool, lengths: Lengths, fresh: Attributes
    ) -> None:
        self._ctx = ctx
        self._inner = (inner,)
        self._manner = manner
        self._head = head
        self._lengths = lengths
        run: nn.Module = inner if head else getattr(inner, inner.base_model_prefix)
        self._run = (run,)
        self._accepts = frozenset(inspect.signature(run.forward).parameters)
        self._fresh = fresh
        self._own_state = OwnState()
        self._form: CacheForm | None = None if manner.cache is None else self._find_form()

    @property
    def keeps_cache(self) -> bool:
        """Whether a cache is kept. False: each step computes the whole text."""
        return self._form is not None

    def cache_specs(self) -> dict[str, LayerCache]:
        """Return what is kept by token."""
        size = self._ctx.block_size
        if self._form is None:
            return {_IDS: LayerCache(CacheGroup("full", size), 1, _BITS, attended=False)}
        specs = {}
        for each in self._form.tokens:
            window = each.window if self._ctx.sliding_window else 0
            group = CacheGroup("sliding" if window else "full", size, window)
            specs[name(each.path)] = LayerCache(group, 1, each.size, attended=False)
        return specs

    def state_specs(self) -> dict[str, StateSpec]:
        """Return what is kept by slot."""
        states = () if self._form is None else self._form.states
        return {name(each.path): StateSpec(each.shape, each.dtype) for each in states}

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Run the rows one after another: ids [tokens] → [tokens, hidden]."""
        embeds = self._embeds(ids, ctx)
        done = []
        for number, row in enumerate(ctx.rows):
            part = slice(row.first, row.first + row.count)
            given = None if embeds is None else embeds[part]
            self._lengths.of_tokens = ctx.lengths[part]
            if self._form is None:
                done.append(self._again(ids[part], ctx, number, row))
            else:
                done.append(self._continue(ids[part], given, ctx, number, row, self._form))
        self._lengths.of_tokens = None
        return torch.cat(done)

    def _embeds(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor | None:
        if ctx.embeds is None:
            return None
        rows = self._inner[0].get_input_embeddings()(ids)
        embeds: torch.Tensor = rows.index_copy(0, ctx.embeds.tokens, ctx.embeds.data.to(rows.dtype))
        return embeds

    # ------------------------------------------------------------------------------------------ one request

    def _again(self, ids: torch.Tensor, ctx: ForwardContext, number: int, row: StepRow) -> torch.Tensor:
        """Compute the whole text, and return the hidden states [count, hidden] of its last tokens."""
        places = torch.arange(_BITS, device=ids.device)
        before = (ctx.recall(_IDS, number).to(torch.int64) << places).sum(-1)
        ctx.keep(_IDS, number, ((ids.unsqueeze(-1) >> places) & 1).to(self._ctx.dtype))
        if self._lengths.of_tokens is not None:  # of one text there is one length
            self._lengths.of_tokens = self._lengths.of_tokens.max().expand(row.begin + row.count)
        hidden, _ = self._call(torch.cat((before, ids)), None, 0, None)
        return hidden[-row.count :]

    def _continue(
        self,
        ids: torch.Tensor,
        embeds: torch.Tensor | None,
        ctx: ForwardContext,
        number: int,
        row: StepRow,
        form: CacheForm,
    ) -> torch.Tensor:
        """Compute a row's tokens behind what is kept of it, and keep what they add."""
        cache = None
        if row.begin:
            kept = {each.path: each.tensor(ctx.recall(name(each.path), number)) for each in form.tokens}
            for each in form.states:
                rows = ctx.state(name(each.path))
                kept[each.path] = rows.data[rows.slots[number]].clone()
            cache = form.build(row.begin, kept)
        hidden, cache = self._chunks(ids, embeds, row.begin, cache)
        found = form.find(cache)
        for token in form.tokens:
            ctx.keep(name(token.path), number, token.entries(found[token.path], row.count))
        for state in form.states:
            rows = ctx.state(name(state.path))
            rows.data[rows.slots[number]] = found[state.path]
        return hidden

    def _chunks(
        self, ids: torch.Tensor, embeds: torch.Tensor | None, begin: int, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        if not self._manner.single or not begin:
            return self._call(ids, embeds, begin, cache)
        done, lengths = [], self._lengths.of_tokens
        for place in range(len(ids)):
            one = slice(place, place + 1)
            self._lengths.of_tokens = None if lengths is None else lengths[one]
            hidden, cache = self._call(ids[one], None if embeds is None else embeds[one], begin + place, cache)
            done.append(hidden)
        return torch.cat(done), cache

    def _call(self, ids: torch.Tensor, embeds: torch.Tensor | None, begin: int, cache: Any) -> tuple[torch.Tensor, Any]:
        """Run one forward pass of the library: returns hidden states [tokens, hidden] and the cache after them."""
        manner, count = self._manner, len(ids)
        given: dict[str, Any] = {"return_dict": True}
        given |= {"input_ids": ids.unsqueeze(0)} if embeds is None else {"inputs_embeds": embeds.unsqueeze(0)}
        if manner.positions and "position_ids" in self._accepts:
            given["position_ids"] = torch.arange(begin, begin + count, device=ids.device).unsqueeze(0)
        if manner.mask and "attention_mask" in self._accepts:
            given["attention_mask"] = torch.ones((1, begin + count), dtype=torch.int64, device=ids.device)
        if manner.cache is None:
            given |= {"use_cache": False} if "use_cache" in self._accepts else {}
        else:
            cache = self._own_state.restore(cache)
            cache = self._first_cache() if cache is None else cache
            given |= {manner.cache: cache, "use_cache": True}
        out = self._run[0](**given)
        hidden: torch.Tensor = out.logits[0].float() if self._head else out.last_hidden_state[0]
        if manner.cache is not None:
            after = getattr(out, manner.cache, None)
            cache = self._own_state.save(cache if after is None else after)
        return hidden, cache

    def _first_cache(self) -> Any:
        if not self._manner.library_cache:
            return None
        from transformers import DynamicCache

        cache = DynamicCache(config=self._inner[0].config)
        record_all(cache)
        return cache

    def _find_form(self) -> CacheForm:
        """Run short texts. Raises CannotKeepError, and whatever the class raises."""
        device = self._inner[0].get_input_embeddings().weight.device
        texts = {length: torch.arange(1, length + 1, device=device) for length in _LENGTHS}
        with torch.inference_mode():
            passes = [partial(self._call, ids, None, 0, None) for ids in texts.values()]
            self._own_state = OwnState.of(self._inner[0], self._fresh, passes)
            caches = {length: self._call(ids, None, 0, None)[1] for length, ids in texts.items()}
        if any(cache is None for cache in caches.values()):
            raise CannotKeepError("the class returns no cache")
        form = CacheForm.of(caches)
        if not form.tokens and not form.states:
            raise CannotKeepError("the class returns an empty cache")
        return form


def manners(inner: Any) -> Iterator[Manner]:
    """Yield the manners in which a class may want to be called, the likeliest first."""
    accepted = set()
    for module in (inner, getattr(inner, inner.base_model_prefix or "-", inner)):
        accepted |= set(inspect.signature(module.forward).parameters)
    caches = [each for each in _CACHES if each in accepted]
    for cache, single, library_cache, mask in product(caches, (False, True), (True, False), (False, True)):
        yield Manner(cache, library_cache=library_cache, mask=mask, single=single)
    for mask, positions in product((False, True), (True, False)):
        yield Manner(None, mask=mask, positions=positions)


# ------------------------------------------------------------------------------------------------ rehearsal


@dataclass(frozen=True)
class _State:
    data: torch.Tensor
    slots: torch.Tensor


class Rehearsal:
    """The parts of a `ForwardContext` that `Rows` uses, for one request without blocks and slots."""

    embeds = None

    def __init__(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> None:
        self._tokens = {
            layer: torch.zeros((0, spec.head_dim), device=device, dtype=dtype)
            for layer, spec in rows.cache_specs().items()
        }
        self._windows = {layer: spec.group.window for layer, spec in rows.cache_specs().items()}
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._states = {
            layer: torch.zeros((1, *spec.shape), device=device, dtype=spec.dtype or dtype)
            for layer, spec in rows.state_specs().items()
        }
        self.rows: tuple[StepRow, ...] = ()
        self.lengths = self._slot

    def begin(self, begin: int, count: int) -> None:
        """Begin the next step, of `count` tokens at `begin`."""
        self.rows = (StepRow(0, count, begin),)
        self.lengths = torch.full((count,), begin + count, device=self._slot.device)

    def recall(self, layer: str, row: int) -> torch.Tensor:
        window = self._windows[layer]
        return self._tokens[layer][max(0, self.rows[row].begin - window + 1) if window else 0 :]

    def keep(self, layer: str, row: int, entries: torch.Tensor) -> None:
        self._tokens[layer] = torch.cat((self._tokens[layer], entries.to(self._tokens[layer].dtype)))

    def state(self, layer: str) -> _State:
        return _State(self._states[layer], self._slot)


def compute(
    rows: Rows, ids: torch.Tensor, chunks: tuple[int, ...], dtype: torch.dtype, between: Callable[[], object] = object
) -> torch.Tensor:
    """Return the hidden states [tokens, hidden] of one text, computed in chunks; `between` runs after each chunk."""
    rehearsal: Any = Rehearsal(rows, ids.device, dtype)
    done, begin = [], 0
    with torch.inference_mode():
        for count in chunks:
            rehearsal.begin(begin, count)
            done.append(rows.forward(ids[begin : begin + count], rehearsal))
            begin += count
            between()
    return torch.cat(done)
