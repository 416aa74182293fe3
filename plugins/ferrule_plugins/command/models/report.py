"""The report of `ferrule models`. A model is built on the meta device, which needs its config.json and no memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import nn

from ferrule.assembly.choose import ModelChoice, PluginChooser
from ferrule.assembly.limits import cache_bytes
from ferrule.assembly.memory import count_parameters
from ferrule.assembly.model import outline
from ferrule.config import Resolved
from ferrule.errors import FerruleError, StartupError
from ferrule.interfaces.model import Model
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule.locate.localise import find_settings, is_path
from ferrule.runner.cache import snapshots_in
from ferrule_plugins.command.families import find_family

_METHODS = ("int8", "int4", "fp8")  # that quantize float weights as they load
_GIB = 2**30


@dataclass
class Report:
    """A description of one model. `refusal` is why it would not run here; an unknown value is None or empty."""

    model: str
    architecture: str = ""
    implementation: str = ""
    way: str = ""  # how requests run through transformers
    refusal: str = ""
    parameters: int = 0
    context: int = 0
    weights: dict[str, int] = field(default_factory=dict)  # bytes by quantization
    memory: int = 0  # bytes that are free for weights
    token_bytes: int = 0  # of the cache, for each token
    state_bytes: int = 0  # for each request
    cache: int = 0  # bytes of the cache
    fits: int = 0  # tokens of one request
    family: str = ""
    flags: tuple[str, ...] = ()
    template: str = ""
    notes: tuple[str, ...] = ()


def list_architectures(plugins: Plugins, *, as_json: bool) -> int:
    """Print every architecture, one a line, with what implements it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LIBRARY

    native = {name: plugins.origin("model", name) for name in plugins.names("model") if name != "transformers"}
    rows = [*native.items(), *((name, "transformers") for name in sorted({*LIBRARY.values()} - {*native}))]
    if as_json:
        print(msgspec.json.encode([{"architecture": name, "through": origin} for name, origin in rows]).decode())
        return 0
    width = max(len(name) for name, _ in rows)
    for name, origin in rows:
        print(f"{name:<{width}}  {origin if origin == 'transformers' else f'native ({origin})'}")
    return 0


def show(config: Resolved, plugins: Plugins, *, as_json: bool) -> int:
    """Print the description of one model. Returns 1 where it would not run. Raises StartupError for a model that is not
    found.
    """
    named = config.model.model
    folder = str(find_settings(config, plugins))
    changed = replace(config.model, model=folder)
    if config.model.hf_config_path == named:
        changed = replace(changed, hf_config_path=folder)
    report = describe(replace(config, model=changed), plugins, named)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(asdict(report)), indent=2).decode())
    else:
        print("\n".join(_lines(report)))
    return 1 if report.refusal else 0


def describe(config: Resolved, plugins: Plugins, named: str) -> Report:
    """Describe how the model in a folder would be run, from its config.json. Raises StartupError for a folder without
    one.
    """
    from ferrule import checkpoint

    report = Report(named)
    values = checkpoint.configured(config.model, plugins)
    report.architecture = checkpoint.architectures(values)[0]
    family = find_family(values, (named, config.model.model))
    if family is not None:
        report.family, report.flags, report.template = family.title, family.flags, family.template
    chooser = PluginChooser(plugins)
    try:
        # For a repository on a hub, only the configuration was fetched.
        choice, model = outline(config, chooser, compare=is_path(named))
    except StartupError as error:
        report.refusal = " ".join(part for part in (error.message, error.hint) if part)
        return report
    report.notes = (*chooser.notes, *filter(None, [choice.unread]))
    report.architecture = choice.architecture
    report.implementation = "transformers" if choice.implementation == "transformers" else "native"
    report.context = choice.context.max_model_len
    model.cache_specs()  # shows which way a class of transformers goes
    report.way = str(getattr(model, "way", ""))
    _measure(report, config, plugins, choice, model)
    return report


def _measure(report: Report, config: Resolved, plugins: Plugins, choice: ModelChoice, model: Model) -> None:
    module = model if isinstance(model, nn.Module) else nn.Module()
    parameters = list({id(each): each for each in module.parameters()}.values())
    report.parameters = count_parameters(model)
    width = choice.context.dtype
    own = sum(each.nbytes for each in parameters) - sum(_packed_less(part) for part in module.modules())
    report.weights = {choice.quantization or _short(width): own}
    if choice.method is None:
        for name in _METHODS:
            cls = plugins.load("quantization", name)
            if cls.refuses({}, choice.device.caps, width) is None:
                report.weights[name] = own - _saved(module, plugins.make("quantization", name, {}))
    report.memory = _free(choice)
    item = width.itemsize
    specs, states = model.cache_specs(), model.state_specs()
    each = {
        name: spec.num_kv_heads * spec.head_dim * (2 if spec.attended else 1) * item for name, spec in specs.items()
    }
    report.token_bytes = sum(each[name] for name, spec in specs.items() if not spec.group.window)
    window = sum(each[name] * spec.group.window for name, spec in specs.items() if spec.group.window)
    state_bytes = sum(torch.Size(spec.shape).numel() * (spec.dtype or width).itemsize for spec in states.values())
    report.state_bytes = window + state_bytes
    try:
        report.cache = cache_bytes(config, choice.device.platform.memory())
    except FerruleError:  # the free memory is not known before weights are loaded
        return
    room = report.cache - report.state_bytes * (config.scheduler.max_num_seqs if states else 1)
    if config.cache.enable_prefix_caching and report.token_bytes and room > 0:
        page_bytes = report.token_bytes * config.cache.block_size
        room -= state_bytes * snapshots_in(room, state_bytes, page_bytes)
    if report.token_bytes:
        report.fits = max(0, min(report.context, room // report.token_bytes))
    elif states:
        report.fits = report.context if room > 0 else 0


def _packed_less(part: nn.Module) -> int:
    """Return the bytes by which packing shrinks a layer that a checkpoint has quantized; 0 where that is not known.

    The bytes of a tied embedding count too, whose rows are then read from the head.
    """
    scheme = getattr(part, "scheme", None)
    form = getattr(scheme, "form", None)
    if form is None or not getattr(part, "quantized", False):
        return 0
    own = sum(each.nbytes for name, each in part.named_parameters(recurse=False) if name != "bias")
    tied = getattr(part, "tied", None)
    read = isinstance(scheme, LinearScheme) and type(scheme).rows is not LinearScheme.rows
    table = int(tied.weight.nbytes) if read and tied is not None else 0
    return own + table - int(form.packed_bytes(part.out_features, part.in_features))


def _saved(module: nn.Module, method: QuantizationMethod) -> int:
    """Return the bytes that quantization saves in the layers that it has schemes for."""
    saved = 0
    seen: set[int] = set()
    table = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        if not hasattr(part, "in_features") or not isinstance(weight, torch.Tensor) or id(weight) in table | seen:
            continue
        seen.add(id(weight))
        head = bool(getattr(part, "head", False)) or name.endswith("lm_head")
        scheme = method.scheme(LinearLayer(name, part.in_features, part.out_features, head=head))
        if scheme is not None:
            form = getattr(scheme, "form", None)
            size = part.in_features * part.out_features
            saved += weight.nbytes - (form.packed_bytes(part.out_features, part.in_features) if form else size)
    return saved


def _free(choice: ModelChoice) -> int:
    if "cuda" in choice.device.caps.features:
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------ printing


def _lines(report: Report) -> Sequence[str]:
    lines = [f"{report.model} ({report.architecture})"]

    def add(title: str, text: Any) -> None:
        if text:
            lines.append(f"  {title:<12}{text}")

    if report.refusal:
        add("runs here", f"no: {report.refusal}")
    else:
        how = f"through transformers, requests {report.way}" if report.way else "natively"
        add("runs here", f"yes, {how}" if _fitting(report) else f"{how}, but its weights do not fit into memory")
        add("parameters", f"{report.parameters / 1e6:,.3g} million")
        add("weights", ", ".join(f"{name} {_size(count)}" for name, count in report.weights.items()))
        add("memory", f"{_size(report.memory)} free; {_fits_as(report)}")
        add("context", f"{report.context:,} tokens")
        add("cache", _cache(report) or "what is kept for each token is known once the weights are there")
        for note in report.notes:
            add("note", note)
    add("family", report.family)
    add("options", " ".join(report.flags))
    add("template", report.template and f"the model's own; where it has none: --chat-template {report.template}")
    return lines


def _fitting(report: Report) -> list[str]:
    return [name for name, count in report.weights.items() if count < report.memory]


def _fits_as(report: Report) -> str:
    fitting = _fitting(report)
    return f"the weights fit as {', '.join(fitting)}" if fitting else "the weights fit in none of these"


def _cache(report: Report) -> str:
    parts = []
    if report.token_bytes:
        parts.append(f"{_size(report.token_bytes)} for each token")
    if report.state_bytes:
        parts.append(f"{_size(report.state_bytes)} for each request")
    if report.fits:
        parts.append(f"{report.fits:,} tokens fit in {_size(report.cache)}")
    return "; ".join(parts)


def _size(count: int) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
