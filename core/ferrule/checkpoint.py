"""A checkpoint's ``config.json`` and ``generation_config.json``, read without transformers.

Plugins may know other files: a load format one that takes the place of ``config.json``, a quantization method one that
says how weights are quantized. Their classes state the names, which are read without an import.

`read` gives the text part of the configuration in one form, whatever version of transformers wrote it: rotary settings
are in ``rope_parameters`` and nowhere else, the type of the weights is in ``dtype``, and a key that a model asks for
and the file does not have is a CheckpointError that names both.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ferrule import rotary
from ferrule.errors import CheckpointError, ConfigError
from ferrule.rotary import is_positive
from ferrule.small_files import read_json as read_json

if TYPE_CHECKING:
    from ferrule.config import ResolvedModel
    from ferrule.plugin import Plugins

__all__ = [
    "Values",
    "architectures",
    "changed",
    "completed",
    "configured",
    "eos_ids",
    "positive",
    "read",
    "remote_code",
]

# Where composite models keep the text part.
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_SHARED = (
    "architectures",
    "auto_map",
    "quantization_config",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "eos_token_id",
)
_OUTER = (*_SHARED, "model_type")  # keys whose overrides are not meant for the text part in a composite file
_SETTINGS = re.compile("quant|compress")  # in names of keys and files that are about quantization
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "seq_len",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
)
READ = frozenset({*_OUTER, *_LENGTHS, "model_max_length"})  # of any model: by this module, and who asks it
SAMPLING = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
_UNSTATED_LENGTH = 2048


class Values(dict[str, Any]):
    """The text part of a ``config.json``. ``values[key]`` of a missing key is a CheckpointError naming file and key.

    `raw` is the same part as the file (and the overrides) have it, before rotary settings and types were unified;
    `outer` is the whole file, different from `raw` for a composite model. `notes` say which settings nothing reads.
    `names` are the file's own names of common keys, where it is not a ``config.json``.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        values: Mapping[str, Any],
        file: Path,
        raw: Mapping[str, Any],
        outer: Mapping[str, Any],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(values)
        self.names = names
        self.file = file
        self.raw = raw
        self.outer = outer

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(
            f"{self.file} has no {key!r}, which this model needs.",
            "The folder may be incomplete; --hf-overrides can set a value.",
        )


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with some other values. It still knows its file, and which of its keys were asked
    for.
    """
    made = copy.copy(config) if isinstance(config, dict) else dict(config)
    made.update(changes)
    return made


def completed(config: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration with an architecture's `names` as common names too, and `defaults` for keys it lacks."""
    complete = changed(config, {})
    for own, common in names.items():
        if config.get(own) is not None:
            complete[common] = config[own]
    for key, value in defaults.items():
        complete.setdefault(key, value)
    return complete


def other_files(plugins: Plugins | None) -> dict[str, str]:
    """Return the files that may take the place of ``config.json``, by the load formats that read them."""
    names = () if plugins is None else plugins.names("load_format")
    stated = ((name, plugins.stated("load_format", name, "config_file")) for name in names if plugins is not None)
    return {name: file for name, file in stated if isinstance(file, str)}


def config_file(folder: Path | str, form: str = "auto", plugins: Plugins | None = None) -> Path:
    """Return the file that describes the model. Raises ConfigError for an unknown form.

    `form`: hf, a load format that reads a file of its own, or auto, which takes such a file where there is no
    ``config.json``.
    """
    file = Path(folder) / "config.json"
    if form == "hf" or form == "auto" and file.is_file():
        return file
    others = {name: file.with_name(other) for name, other in other_files(plugins).items()}
    if form == "auto":
        return next((other for other in others.values() if other.is_file()), file)
    if form not in others:
        raise ConfigError(f"--config-format {form}: no load format of this name reads a configuration of its own.")
    return others[form]


def read(
    folder: Path | str,
    overrides: Mapping[str, Any] | None = None,
    form: str = "auto",
    plugins: Plugins | None = None,
) -> Values:
    """Return the text part of a folder's configuration with `overrides` (``--hf-overrides``) applied.

    An override of ``text_config`` and its like is merged into the file's; any other value replaces the file's, in the
    text part too. `form` is that of `config_file`; any file is returned as a ``config.json`` would be. Without
    `plugins` no other files are known. Raises CheckpointError, ConfigError.
    """
    try:
        return _read(config_file(folder, form, plugins), dict(overrides or {}), plugins)
    except CheckpointError as error:
        if overrides:
            raise CheckpointError(f"With --hf-overrides: {error.message}", error.hint) from None
        raise


def configured(section: ResolvedModel, plugins: Plugins, folder: Path | str | None = None) -> Values:
    """Read the configuration as the model's section of the options says: see `read`. Without a `folder`, the section's
    own is read.
    """
    return read(folder or section.hf_config_path, section.hf_overrides, section.config_format, plugins)


def _read(file: Path, changes: Mapping[str, Any], plugins: Plugins | None) -> Values:
    outer, names = read_json(file), MappingProxyType[str, str]({})
    if plugins is not None and (form := _form_of(file, plugins)) is not None:
        source = plugins.load("load_format", form)
        with plugins.blamed("load_format", form):
            outer, names = dict(source.configuration(outer, file)), source.config_names
    elif plugins is not None and not outer.get("quantization_config"):
        outer.update(_settings_elsewhere(outer, file.parent, plugins))
    _override(outer, changes)
    raw = _text_part(outer)
    if raw is not outer:
        raw = {
            **{key: outer[key] for key in _SHARED if key in outer},
            **raw,
            "architectures": outer.get("architectures"),
        }
        raw.update((key, value) for key, value in changes.items() if key not in (*_TEXT_SECTIONS, *rotary.KEYS))
    values = Values(raw, file, raw, outer, names)
    values["architectures"] = list(architectures(values))
    values["dtype"] = _dtype(values)
    values.pop("torch_dtype", None)
    values.notes = rotary.unify(values, file)
    check_sizes(values, names)
    return values


def _form_of(file: Path, plugins: Plugins) -> str | None:
    """Return the load format that reads a file in the place of ``config.json``; None for ``config.json`` itself."""
    if file.name == "config.json":
        return None
    return next((name for name, other in other_files(plugins).items() if other == file.name), None)


def _settings_elsewhere(outer: Mapping[str, Any], folder: Path, plugins: Plugins) -> dict[str, Any]:
    """Return the quantization settings from another key or file that a method names. Raises CheckpointError.

    Sources of methods are looked at only where there are such keys or files, which have "quant" or "compress" in their
    names.
    """
    keys = [key for key, value in outer.items() if isinstance(value, dict) and _SETTINGS.search(key)]
    files = [file for file in sorted(folder.glob("*.json")) if _SETTINGS.search(file.name)]
    found: dict[str, Path | None] = {**{file.name: file for file in files}, **dict.fromkeys(keys)}
    for name in plugins.names("quantization") if found else ():
        stated = plugins.stated("quantization", name, "settings_elsewhere")
        for place, method in (stated if isinstance(stated, dict) else {}).items():
            if place in found:
                file = found[place]
                return {"quantization_config": {"quant_method": method, **(read_json(file) if file else outer[place])}}
    return {}


def _override(part: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply overrides to a configuration, and to the text part in it, for which most overrides of outer keys are meant
    too.
    """
    inner = next((name for name in _TEXT_SECTIONS if isinstance(part.get(name), dict)), None)
    if inner is None:
        rotary.override(part, changes)
    else:
        own = changes.get(inner)
        shared = {key: value for key, value in changes.items() if key not in _OUTER and not isinstance(value, dict)}
        shared |= {key: changes[key] for key in rotary.KEYS & changes.keys()}
        part[inner] = dict(part[inner])
        _override(part[inner], {**shared, **own} if isinstance(own, dict) else shared)
        changes = {key: value for key, value in changes.items() if not (key == inner and isinstance(own, dict))}
    part.update((key, value) for key, value in changes.items() if key not in rotary.KEYS)


def _text_part(outer: dict[str, Any]) -> dict[str, Any]:
    for part in _TEXT_SECTIONS:
        inner = outer.get(part)
        if isinstance(inner, dict):
            return _text_part(inner)
    return outer


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names that the checkpoint says it is for; at least one. Raises CheckpointError where there is
    none.
    """
    names = config.get("architectures")
    if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) and name for name in names):
        return tuple(names)
    if isinstance(config.get("_class_name"), str):
        raise CheckpointError(
            f"{_file(config)} is for {config['_class_name']:.80} of diffusers, which generates images and no text.",
            "Ferrule serves models that continue text: take a checkpoint whose architecture ends in ForCausalLM.",
        )
    raise CheckpointError(
        f"{_file(config)} does not name its 'architectures', so the model that it is for is unknown.",
        'Set it with --hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\'.',
    )


def _file(config: Mapping[str, Any]) -> str:
    return str(getattr(config, "file", "config.json"))


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    if not isinstance(name, str):
        raise CheckpointError(f"{_file(config)}: 'dtype' must be a name such as 'bfloat16', not {name!r}.")
    return name.removeprefix("torch.")


# ------------------------------------------------------------------------------------------------ limits


def positive(config: Mapping[str, Any], key: str) -> int | None:
    """Return a positive integer of the configuration, or None when it is absent or null. Raises CheckpointError."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{_file(config)}: {key!r} must be a positive integer, not {value!r}.")
    return value


_SIZES = {  # the largest that is taken: far beyond any model, and small enough to fail at once
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 1 << 12),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), 1 << 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim", "moe_intermediate_size"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 1 << 24),
    "vocab_size": 1 << 26,
}
_POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_local_base_freq")
_NEVER_ZERO = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "head_dim",
    "hidden_size",
    "n_embd",
    "vocab_size",
)
_LONGEST = 1 << 27  # tokens: far beyond any model


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the configuration that state the model's sizes, with their values."""
    return {key: config[key] for key in (*_SIZES, *_LENGTHS) if config.get(key) is not None}


def check_sizes(config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check the sizes that a configuration states. Raises CheckpointError, naming the key, for a size that no model
    has, and for numbers that contradict each other.

    A size is an integer, or a list of them, one for each layer. `names` are an architecture's own names of common keys.
    """
    own = {common: name for name, common in names.items() if config.get(name) is not None}
    for key, limit in _SIZES.items():
        value = config.get(key)
        least = 1 if key in _NEVER_ZERO else 0
        for size in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= limit:
                wanted = f"an integer from {least} to {limit}"
                raise CheckpointError(f"{_file(config)}: {own.get(key, key)!r} must be {wanted}, not {size!r:.40}.")
    heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and key_heads and heads % key_heads:
        name, other = (own.get(key, key) for key in ("num_attention_heads", "num_key_value_heads"))
        raise CheckpointError(f"{_file(config)}: {name!r} {heads} must be a multiple of {other!r} {key_heads}.")
    for key in _POSITIVE:
        number = config.get(key)
        if number is not None and not is_positive(number):
            name = own.get(key, key)
            raise CheckpointError(f"{_file(config)}: {name!r} must be a positive number, not {number!r:.40}.")


def max_length(config: Mapping[str, Any], *, sliding_window: bool = True) -> int:
    """Return the longest context that the checkpoint was made for, in tokens.

    That is the smallest of the lengths that it states, multiplied by the factor of rotary scalings that stretch it
    (linear, dynamic, yarn; yarn from its original length). Scalings whose stated length is the stretched one already
    (llama3, longrope) change nothing. With `sliding_window` False the window is a limit as well.
    """
    stated = [length for key in _LENGTHS if (length := positive(config, key)) is not None]
    longest = positive(config, "model_max_length")  # Cohere: wins over max_position_embeddings
    length = _sensible(config, longest or (min(stated) if stated else _UNSTATED_LENGTH))
    rope = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        rope = rope.get("full_attention") or {}
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1.0
    if kind == "yarn":
        original = _sensible(config, rope.get("original_max_position_embeddings") or length)
        length = max(_sensible(config, original * factor), 1)
    elif kind in {"linear", "dynamic"} and not str(config.get("model_type", "")).startswith("gemma3"):
        length = _sensible(config, length * factor)  # Gemma 3 states the stretched length
    span = window(config)
    return min(length, span) if span and not sliding_window else length


def _sensible(config: Mapping[str, Any], length: float) -> int:
    if length > _LONGEST:
        keys = {key: config[key] for key in (*_LENGTHS, "model_max_length", "rope_parameters") if config.get(key)}
        stated = ", ".join(f"{key!r} {value!r:.80}" for key, value in keys.items())
        raise CheckpointError(f"{_file(config)}: {stated} make a context of more than {_LONGEST} tokens.")
    return int(length)


def window(config: Mapping[str, Any]) -> int:
    """Return the number of tokens that a sliding-window layer of this checkpoint sees, 0 when it has none."""
    if config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not any("sliding" in str(kind) for kind in kinds):
        return 0
    return positive(config, "sliding_window") or 0


# ------------------------------------------------------------------------------------------------ generation


def eos_ids(config: Mapping[str, Any], folder: Path | str | None = None) -> tuple[int, ...]:
    """Return the ids that end a text: those of ``config.json`` and of ``generation_config.json``, each once, in this
    order.
    """
    found: list[int] = []
    sources = [(_file(config), config)]
    if folder is not None:
        sources.append((str(Path(folder) / "generation_config.json"), generation(folder)))
    for file, source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None or token == -1:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise CheckpointError(f"{file}: 'eos_token_id' must be token ids, not {value!r}.")
            if token not in found:
                found.append(token)
    return tuple(found)


def generation(folder: Path | str) -> dict[str, Any]:
    """Read the ``generation_config.json`` of a folder; empty when there is none."""
    file = Path(folder) / "generation_config.json"
    return read_json(file) if file.exists() else {}


def sampling_defaults(folder: Path | str | None, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the default sampling values that ``generation_config.json`` states, under the names of `SamplingParams`.

    `overrides` (``--override-generation-config``) win, and are all there is without a folder. Other keys of the file
    are not sampling values and are left. Raises ConfigError for an override that is not a number, CheckpointError for
    such a value of the file.
    """
    source = {**(generation(folder) if folder else {}), **(overrides or {})}
    defaults: dict[str, Any] = {}
    for key in SAMPLING:
        value = source.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            given = folder is None or key in (overrides or {})
            where = "--override-generation-config" if given else Path(folder or "") / "generation_config.json"
            kind = ConfigError if given else CheckpointError
            raise kind(f"{where}: {key!r} must be a number, not {value!r:.80}.")
        defaults["max_tokens" if key == "max_new_tokens" else key] = value
    return defaults


# ------------------------------------------------------------------------------------------------ remote code


def remote_code(config: Mapping[str, Any], *, known: bool, trusted: bool) -> bool:
    """Decide whether Python code of the checkpoint runs. This is the only place that decides, called before any such
    import.

    `known`: the architecture has an implementation that needs no such code; then ``auto_map`` is ignored unless
    `trusted`. Raises CheckpointError for code that is needed and not trusted.
    """
    wanted = bool(config.get("auto_map"))
    if wanted and not known and not trusted:
        raise CheckpointError(
            f"{_file(config)} names Python code of its own ('auto_map') and no implementation here knows the model.",
            "Read that code, and start with --trust-remote-code if you trust it.",
        )
    return wanted and trusted
