"""The options of `ferrule quantize`: the model, the format, and the folder to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrule.config import Config
from ferrule.errors import ConfigError
from ferrule_files import commands
from ferrule_files.commands import opt

_TAKEN = {  # sections of `Config`, and what is taken of them
    "model": ("model", "revision", "hub", "hf_token"),
    "load": ("download_dir",),
    "observability": ("log_level", "log_config_file", "debug"),
    "plugins": ("plugins_allow", "plugins_deny", "plugins_prefer", "plugin"),
}
_SAID: Mapping[str, Mapping[str, Any]] = {"model": {"doc": "Folder or hub id of a float checkpoint."}}


CALIBRATED = ("gptq", "awq")
_LIMITED = {  # options that mean nothing with other formats
    "skip_tokenizer": ("q8_0", "q4_0", "q4_k_m"),
    "bits": ("gptq",),
    "desc_act": ("gptq",),
    "calibration": CALIBRATED,
    "calibration_samples": CALIBRATED,
    "calibration_length": CALIBRATED,
}


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """The file or folder to write, and its format."""

    to: str | None = opt(
        None,
        "Format of the quantized weights. Required. int8, fp8 and int4 are a folder in the layout of "
        "compressed-tensors; gptq and awq are folders in these tools' layouts, calibrated with texts; q8_0, q4_0 and "
        "q4_k_m are one GGUF file.",
        choices=("int8", "fp8", "int4", *CALIBRATED, "q8_0", "q4_0", "q4_k_m"),
        common=True,
    )
    output: str | None = opt(None, "Folder or GGUF file to write. Required.", aliases=("-o",), common=True)
    force: bool = opt(False, "Replace a folder that an earlier run wrote, or a GGUF file.", common=True)
    skip_tokenizer: bool = opt(
        False,
        "Leave the tokenizer out of a GGUF file, which cannot state every one: --tokenizer names it when the "
        "file is served.",
        common=True,
    )
    group_size: int = opt(128, "Inputs that share a scale, with --to int4, gptq and awq.", ge=8, common=True)
    bits: int = opt(4, "Bits of a weight, with --to gptq.", choices=(2, 3, 4, 8), common=True)
    desc_act: bool = opt(
        False,
        "Quantize the inputs with the largest activations first, with --to gptq: a smaller error, and slower kernels "
        "in some programs.",
        common=True,
    )
    calibration: str = opt(
        "builtin",
        "Texts that --to gptq and awq run the model with: a text file, or one that ends in .jsonl with an object on "
        'each line that has "text" or "messages"; builtin: the documentation of Python.',
        common=True,
    )
    calibration_samples: int = opt(128, "Most texts of --calibration that are used.", ge=1, le=100_000, common=True)
    calibration_length: int | None = opt(
        None,
        "Most tokens of a text of --calibration; by default 512, or the model's context if that is shorter.",
        ge=2,
        le=1_000_000,
        common=True,
    )
    ignore: tuple[str, ...] = opt(
        (),
        "Regular expressions; layers whose whole name matches one are not quantized. The output layer, embeddings and "
        "routers of experts never are.",
        nargs="+",
        common=True,
    )
    evaluate: str = opt(
        "builtin",
        "Text file on which the perplexity before and after is measured; builtin: a short English text; none: no "
        "measurement, which would load both models.",
        common=True,
    )


def sections() -> Mapping[str, type]:
    """Return every section of the command's options."""
    return {**commands.sections(_TAKEN, _SAID), "quantize": QuantizeConfig}


def whole(config: Config) -> Config:
    """Return a complete configuration, for the CPU."""
    full = commands.whole(config, _TAKEN)
    return dataclasses.replace(full, device=dataclasses.replace(config.device, device="cpu"))


def check(options: QuantizeConfig) -> None:
    """Raise ConfigError for an option that the format does not have."""
    for field in dataclasses.fields(options):
        formats = _LIMITED.get(field.name)
        if formats is not None and options.to not in formats and getattr(options, field.name) != field.default:
            files = " GGUF files:" if field.name == "skip_tokenizer" else ""
            name = field.name.replace("_", "-")
            raise ConfigError(f"--{name} is for{files} --to {', '.join(formats)}.")
