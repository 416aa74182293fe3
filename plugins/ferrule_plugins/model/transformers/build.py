"""The library's configuration and model of a checkpoint, and the refusal of what is not a decoder.

Loading is the library's own conversion from checkpoint names to parameters, fed with tensors that a Ferrule load format
has read: no file is opened by the library, and a missing, unexpected or mis-shaped tensor is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ferrule.checkpoint import remote_code
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext

EAGER = "eager"  # the library's attention that always has a mask; some classes compute something else without one
_HEADS = {  # tables of the library: for each type the class with another head, and what such a model does
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "classifies whole texts",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "classifies tokens",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "finds answers within a text",
}
_ELSEWHERE = {  # tables of the library, and what a model that is only in one of them is
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "reads images and text together",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "reads images, sound and text together",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "transcribes speech",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "has an encoder and a decoder",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "is an encoder, which fills gaps in text and does not continue it",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES": "is an encoder of text, which does not continue it",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES": "generates sound",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "reads sound",
    "MODEL_FOR_CTC_MAPPING_NAMES": "transcribes speech",
    "MODEL_FOR_IMAGE_MAPPING_NAMES": "reads images only",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "reads images only",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES": "reads images only",
    "MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING_NAMES": "generates images",
}


def library_config(ctx: BuildContext) -> Any:
    """Return the library's configuration object, with the overrides that `ctx.config` has. Raises CheckpointError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    outer: Mapping[str, Any] = getattr(ctx.config, "outer", ctx.config)
    kind = outer.get("model_type")
    known = kind in CONFIG_MAPPING
    trusted = remote_code(outer, known=known, trusted=ctx.trust_remote_code)
    if not known and not trusted:
        raise CheckpointError(
            f"transformers has no model type {kind!r}, and Ferrule has no model {ctx.config.get('architectures')}.",
            "A newer transformers may have it.",
        )
    if not trusted:
        _check_kind(str(kind), outer)
    try:
        if trusted:
            file: Path | None = getattr(ctx.config, "file", None)  # --hf-config-path may name another
            folder = file.parent if file is not None else ctx.folder
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
            config.__dict__.pop("quantization_config", None)  # else the library would quantize
            return config
        floats = {key: value for key, value in outer.items() if key != "quantization_config"}
        config = CONFIG_MAPPING[kind].from_dict(_numbers(floats))
        config.get_text_config(decoder=True)  # raises where there are several
        return config
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"transformers does not accept this config.json: {error}.") from error


def _numbers(value: Any) -> Any:
    """Copy a value so that infinities are numbers: the library writes them as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _numbers(each) for key, each in value.items()}
    return [_numbers(each) for each in value] if isinstance(value, list) else value


def _check_kind(kind: str, outer: Mapping[str, Any]) -> None:
    """Check that a model type of the library continues text. Raises CheckpointError where it does not."""
    from transformers.models.auto import modeling_auto

    classes = outer.get("architectures") or ()
    named = ", ".join(map(str, classes)) or kind
    pairs = {**modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}  # class of each type with an encoder, too
    pairs = {**pairs, **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    if outer.get("is_encoder_decoder") is True or pairs.get(kind) in classes:
        raise CheckpointError(
            f"{named} has an encoder and a decoder; Ferrule serves models that only have a decoder.",
            "Take a decoder-only model, or serve this one with transformers itself.",
        )
    tasks = [does for table, does in _HEADS.items() if getattr(modeling_auto, table, {}).get(kind) in classes]
    if not tasks and kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    tasks += [does for table, does in _ELSEWHERE.items() if kind in getattr(modeling_auto, table, {})]
    if tasks:
        raise CheckpointError(
            f"{named} {tasks[0]}; Ferrule serves models that continue text.",
            "Take a checkpoint whose architecture ends in ForCausalLM.",
        )
    raise CheckpointError(
        f"transformers has no causal language model of the type {kind!r}, which {named} is.",
        "Ferrule serves models that continue text.",
    )


def build(config: Any, ctx: BuildContext, attention: str) -> Any:
    """Build the library's model without weights, on the meta device.

    Its attention goes to the function of that name in the library's registry. Raises CheckpointError.
    """
    from transformers import AutoModelForCausalLM

    trusted = remote_code(getattr(ctx.config, "outer", ctx.config), known=True, trusted=ctx.trust_remote_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention, dtype=ctx.dtype, trust_remote_code=trusted
            )
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError, ImportError) as error:
        what = "" if attention == EAGER else " whose attention can be replaced"  # KeyError: its attention is not ours
        raise CheckpointError(
            f"transformers cannot build a causal language model of type {config.model_type!r}{what} "
            f"({type(error).__name__}: {str(error)[:200]})."
        ) from error
    _check_causal(model)
    return model


def _check_causal(model: Any) -> None:
    """Check for an encoder in a class that is a decoder where its configuration says so, as BERT's. Raises
    CheckpointError.
    """
    encoder = getattr(model.config.get_text_config(), "is_decoder", None) is False  # GPT-NeoX has the key, unread
    if encoder and any(getattr(module, "is_decoder", None) is False for module in model.modules()):
        raise CheckpointError(
            f"{class_name(model)} attends in both directions, because config.json does not say that it is a decoder. "
            "Only causal models continue text.",
            "If the checkpoint is for a decoder, start with --hf-overrides '{\"is_decoder\": true}'.",
        )


def usual_attention(model: Any) -> str:
    """Return the library's attention that a class has if nobody asks for another."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def set_attention(model: Any, name: str) -> None:
    """Let attention go to another function of the library's registry, also where the library thinks that it cannot."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name


def without_padding(model: Any) -> Any:
    """Switch off the search for padding in each step's ids that some models do: the ids are never padded."""
    from huggingface_hub.errors import StrictDataclassError

    with suppress(StrictDataclassError):  # a class whose field must be a number, and that does not look
        model.config.pad_token_id = None
    return model


def class_name(inner: Any) -> str:
    return f"{type(inner).__name__} of transformers"


def filled(cls: Any, config: Any, tensors: dict[str, torch.Tensor], ctx: BuildContext, attention: str) -> Any:
    """Return a model with these weights. Raises CheckpointError that names the first tensors at fault."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the load format has shown one already
    model, report = cls.from_pretrained(
        None,
        config=copy.deepcopy(config),
        state_dict=tensors,
        dtype=ctx.dtype,
        attn_implementation=attention,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    faults = {
        "lacks the tensor": sorted(report["missing_keys"]),
        "holds a tensor that the model does not have:": sorted(report["unexpected_keys"]),
        "holds a tensor of another shape than the model needs:": sorted(map(str, report["mismatched_keys"])),
    }
    for what, names in faults.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"The checkpoint {what} {names[0]}{more}.", f"The model is {class_name(model)}.")
    if report.get("error_msgs"):
        raise CheckpointError(f"The checkpoint does not fit {class_name(model)}: {str(report['error_msgs'])[:500]}")
    return model.eval().to(ctx.device)
