"""Does the paged attention of `transformers` models compute what their class computes? A short forward pass shows it.

A class tells attention about its window, its soft cap and its sinks twice: in the arguments of the call, which is what
the paged cache obeys, and in the mask that it builds or in its own eager function, which is what the library's forward
pass obeys. A class can contradict itself. So the model is run once more as the library runs it, over a few tokens: all
windows of its configuration are cut to `_WINDOW` tokens, and it shares the weights of the model, so that this costs
about as much as a prompt of `_TOKENS` tokens and no memory. Every attention call is compared.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import AttentionOptions
from ferrule_plugins.model.transformers.build import EAGER, set_attention

NAME = "ferrule_check"  # of the comparing attention function in the library's registry
_COMPARISON = "ferrule_comparison"  # attribute of the library's modules
_WINDOW = 4  # tokens
_TOKENS = 3 * _WINDOW
_SCORES = 6.0  # standard deviation of the scores that are compared: soft caps change such values
_TOLERANCE = 1e-3  # of attention outputs in float32, relative to their size
_SAME = 1e-2  # of hidden states in the model's type, which are computed by the same functions

Options = Callable[[str, nn.Module, torch.Tensor, torch.Tensor, Mapping[str, Any]], AttentionOptions]


def short_windows(config: Any) -> Any:
    """Copy the library's configuration with windows of `_WINDOW` tokens."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for key, value in text.to_dict().items():
        if "window" in key and "layer" not in key and type(value) is int and value > _WINDOW:
            setattr(text, key, _WINDOW)
    return small


def check(inner: Any, twin: Any, options: Options, limit: int) -> None:
    """Compare the attention of `twin`, a model of the same class on the meta device, with what the class computes.

    `twin` takes the weights of `inner`. `options` gives the options that the paged cache would use for a call, from the
    module's path, the module, keys, values and the call's other arguments. At most `limit` tokens are run. Raises
    CheckpointError that names the layer and the first position that differs.
    """
    _share_weights(inner, twin)
    comparison = _Comparison(options)
    for path, module in twin.named_modules():
        module.__dict__[_COMPARISON] = (path, comparison)
    compared = _hidden(twin, min(_TOKENS, limit))
    longest = max(comparison.windows, default=0)
    if _TOKENS <= longest < limit:  # a window that is not in the configuration
        compared = _hidden(twin, min(longest + _WINDOW, limit))
    set_attention(twin, EAGER)
    plain = _hidden(twin, compared.shape[0], positions=False)
    error = float((compared - plain).norm() / (plain.norm() + 1e-9))
    if not error <= _SAME:
        raise CheckpointError(
            f"{type(inner).__name__} of transformers computes something else where its attention is replaced, or where "
            f"it is told the positions of tokens: hidden states differ by {error:.0%}.",
        )


def compare(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, Any]:
    """Attend, under `NAME` in the library's registry: by the class's own eager function, compared with what the paged
    cache would compute.
    """
    path, comparison = module.__dict__[_COMPARISON]
    eager = _eager(module)
    comparison.compare(path, module, (query, key, value), attention_mask, given)
    out: tuple[torch.Tensor, Any] = eager(module, query, key, value, attention_mask, **given)
    return out


@dataclass
class _Comparison:
    options: Options
    windows: set[int] = field(default_factory=set)

    def compare(
        self,
        path: str,
        module: nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # queries, keys, values [1, heads, tokens, dim]
        mask: torch.Tensor | None,
        given: Mapping[str, Any],
    ) -> None:
        """Compare the class with paged attention on random heads. Raises CheckpointError where the class computes
        something else.
        """
        options = self.options(path, module, heads[1], heads[2], given)
        self.windows.add(options.window)
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(each.shape, generator=draw).to(each.device) for each in heads)
        q = q * (_SCORES / (abs(options.scale) * k.shape[-1] ** 0.5))
        theirs = _eager(module)(module, q, k, v, mask, **given)[0].float()
        ours = _paged(q[0], k[0], v[0], options).transpose(0, 1).unsqueeze(0)
        error = (theirs - ours).norm(dim=-1).amax(-1)[0] / (ours.norm(dim=-1).amax(-1)[0] + 1e-9)  # [tokens]
        wrong = (~(error <= _TOLERANCE)).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise CheckpointError(
                f"{path} of {type(module).__name__} computes other attention than its call asks for: with "
                f"{_told(options)}, position {first} of {len(error)} is the first that differs, by "
                f"{float(error[first]):.0%}. The class builds a mask, or scores, that contradict these arguments.",
                "It would answer with other tokens than transformers does, so it is not served.",
            )


def _told(options: AttentionOptions) -> str:
    told = [f"a window of {options.window} tokens" if options.window else "no window", f"scale {options.scale:.4g}"]
    told += [f"soft cap {options.soft_cap:g}"] if options.soft_cap else []
    return ", ".join(told + (["sinks"] if options.sinks is not None else []))


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Return what attention over the paged cache computes for one request: q, k, v [heads, tokens, dim] float32."""
    groups, tokens = q.shape[0] // k.shape[0], q.shape[1]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * options.scale
    if options.soft_cap:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    distance = torch.arange(tokens, device=q.device)[:, None] - torch.arange(tokens, device=q.device)
    hidden = (distance < 0) | (distance >= (options.window or tokens))
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:  # one more key without a value
        sinks = options.sinks.float().to(q.device).view(-1, 1, 1).expand(-1, tokens, 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def _eager(module: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Return the attention function in the file of the module's class; the library's for torch where the file has
    none.
    """
    own: Callable[..., tuple[torch.Tensor, Any]] | None
    own = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
    if own is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        own = sdpa_attention_forward
    return own


def _share_weights(inner: nn.Module, twin: nn.Module) -> None:
    """Give each module of `twin` the tensors of the same module of `inner`: no copy."""
    for path, module in twin.named_modules():
        source = inner.get_submodule(path)
        module._parameters.update(source._parameters)
        module._buffers.update(source._buffers)
        for name, value in vars(source).items():
            if isinstance(value, torch.Tensor):
                module.__dict__[name] = value


def _hidden(model: Any, tokens: int, positions: bool = True) -> torch.Tensor:
    """Return the hidden states [tokens, hidden] float32 of some ids; without `positions` the class finds them
    itself.
    """
    table = model.get_input_embeddings().weight
    ids = torch.arange(1, tokens + 1, device=table.device) % table.shape[0]
    base: nn.Module = getattr(model, model.base_model_prefix)
    told = {"position_ids": torch.arange(tokens, device=table.device).unsqueeze(0)} if positions else {}
    with torch.inference_mode():
        out = base(input_ids=ids.unsqueeze(0), **told, use_cache=False, return_dict=True)
    hidden: torch.Tensor = out.last_hidden_state[0].float()
    return hidden
