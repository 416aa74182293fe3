"""Fields that do nothing: which of them are refused, which are named in `warnings`, and why. None passes in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from ferrule import log
from ferrule.config import Config
from ferrule.errors import RequestError, nearest
from ferrule.interfaces.router import Call
from ferrule_plugins.router.openai_answers import Extension
from ferrule_plugins.router.openai_schema import ChatBody, CompletionBody, GenerateBody

_logger = log.get("openai")
_MAX_NAMED = 16  # unknown fields that an answer names
_MAX_NAME = 64  # characters of an unknown name that are repeated
HEADER = "x-ferrule-ignored-fields"


class Absent(NamedTuple):
    """A documented field that this build does nothing with. `refused`: it would change the answer, so it is a 400."""

    why: str
    refused: bool
    harmless: tuple[Any, ...] = ()  # values that ask for nothing


def _lacking(feature: str, *harmless: Any) -> Absent:
    return Absent(f"{feature} is not available in this build.", True, harmless)


def _idle(why: str, *harmless: Any) -> Absent:
    return Absent(why, False, harmless)


_GUIDED = _lacking("guided decoding")
_GUIDED_OPTION = _idle("has an effect with guided decoding only.")
_MEDIA = _idle("has an effect on images, audio and video only, and this model takes text.", {})
_TRANSFER = _idle("no KV connector runs here; the prompt is computed where it arrives.", {})
_PROMPT_CACHE = _idle("prefixes are cached for everybody alike; cache_salt keeps them apart.")
_DEPRECATED = Absent("is deprecated by OpenAI and not available here; use tools and tool_choice.", True, ([], "none"))

ABSENT: Mapping[str, Absent] = {
    # guided decoding
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "structured_outputs": _GUIDED,
    "guided_decoding_backend": _GUIDED_OPTION,
    "guided_whitespace_pattern": _GUIDED_OPTION,
    # sampling
    "thinking_token_budget": _lacking("a budget for thinking", -1),
    "repetition_detection": _lacking("an end at repeated patterns"),
    "vllm_xargs": _lacking("a map of arguments for processors of the server's", {}),
    "logprob_token_ids": _lacking("the choice of tokens whose logprobs are given", []),
    "watermarking": _lacking("watermarking", False),
    # OpenAI's
    "functions": _DEPRECATED,
    "function_call": _DEPRECATED,
    "modalities": _lacking("output other than text", ["text"], []),
    "audio": _lacking("audio output"),
    "web_search_options": _lacking("web search"),
    "verbosity": _lacking("verbosity other than medium", "medium"),
    "moderation": _idle("answers are not moderated here."),
    "prediction": _idle("answers are not predicted here; it would change their speed only."),
    "prompt_cache_key": _PROMPT_CACHE,
    "prompt_cache_options": _PROMPT_CACHE,
    "prompt_cache_retention": _PROMPT_CACHE,
    "service_tier": _idle("there is one tier here; priority orders requests.", "auto", "default"),
    "store": _idle("answers are not stored here.", False),
    # media, transfer, and forms of the answer
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "return_mm_kwargs": _idle("is for the peer's render routes.", True),
    "return_token_offsets": _idle("is for the peer's render routes; completions give text_offset.", False),
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": _TRANSFER,
    "routed_experts_prompt_start": _idle("choices of experts are not returned here.", 0),
    "return_weight_versions": _idle("weights have no versions here.", False),
    "stream_interval": _idle("each chunk is sent as soon as it is there.", 1),
}


@dataclass
class Notes:
    """Fields of one request that do nothing, each with the reason."""

    known: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, call: Call) -> Notes:
        """What can be told of any body: fields that its type does not know."""
        names = type(call.body).__struct_fields__
        shown = [name[:_MAX_NAME] for name in call.unknown_fields[:_MAX_NAMED]]
        return cls(unknown=[(name, f"unknown, ignored.{nearest(name, names)}") for name in shown])

    @property
    def extension(self) -> Extension | UnsetType:
        """For the answer; absent when there is nothing to say."""
        found = [*self.unknown, *self.known]
        return Extension([f"{name}: {why}" for name, why in found]) if found else UNSET

    @property
    def headers(self) -> dict[str, str]:
        """The known ones; the frame sets a header of the same name for the unknown ones."""
        return {HEADER: ", ".join(name for name, _ in self.known)} if self.known else {}

    def settle(self, strict: bool) -> None:
        """Log the known ones, or refuse them when the server is strict."""
        if self.known and strict:
            name, why = self.known[0]
            raise RequestError(f"{name}: {why} This server refuses fields without effect.", name)
        if self.known:
            _logger.warning("fields without effect", fields=",".join(name for name, _ in self.known))


def refuse(body: GenerateBody) -> None:
    """Refuse fields of features that are not here and that would change the answer."""
    for name, absent in ABSENT.items():
        if absent.refused and _asks(body, name, absent):
            raise RequestError(f"{name}: {absent.why}", name)
    kind = (body.response_format or {"type": "text"}).get("type")
    if kind != "text":
        raise RequestError(
            "response_format can be {'type': 'text'} only: guided decoding is not available in this build.",
            "response_format",
        )


def _asks(body: GenerateBody, name: str, absent: Absent) -> bool:
    value = getattr(body, name, None)
    return value is not None and not any(type(value) is type(idle) and value == idle for idle in absent.harmless)


def review(body: GenerateBody, call: Call, config: Config, template_reads: frozenset[str] | None) -> Notes:
    """All fields of a generate request that do nothing. Raises RequestError on a strict server.

    `template_reads`: variables that the server's chat template uses, None where they are not known.
    """
    notes = Notes.of(call)
    notes.known += [
        (name, absent.why) for name, absent in ABSENT.items() if not absent.refused and _asks(body, name, absent)
    ]
    notes.known += _common(body)
    if isinstance(body, ChatBody):
        notes.known += _chat(body, config)
        if template_reads is not None and body.chat_template is None:
            notes.known += _template(body, template_reads)
    elif isinstance(body, CompletionBody) and body.add_special_tokens is not None and _only_ids(body.prompt):
        notes.known.append(("add_special_tokens", "nothing is added to token ids."))
    notes.settle(config.frontend.strict_requests)
    return notes


def _common(body: GenerateBody) -> list[tuple[str, str]]:
    notes = []
    if body.use_beam_search:
        if body.seed is not None:
            notes.append(("seed", "beam search draws nothing."))
    else:
        if body.length_penalty not in (None, 1.0):
            notes.append(("length_penalty", "has an effect with use_beam_search only."))
        if body.early_stopping:
            notes.append(("early_stopping", "has an effect with use_beam_search only."))
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        notes.append(("stream_options", "continuous_usage_stats needs include_usage."))
    shown = getattr(body, "logprobs", None) not in (None, False) or body.prompt_logprobs is not None
    if body.return_tokens_as_token_ids and not shown:
        notes.append(("return_tokens_as_token_ids", "has an effect with logprobs only."))
    return notes


def _chat(body: ChatBody, config: Config) -> list[tuple[str, str]]:
    notes = []
    if body.parallel_tool_calls is not None and not body.tools:
        notes.append(("parallel_tool_calls", "has an effect with tools only."))
    if body.include_reasoning is False and not config.frontend.reasoning_parser:
        notes.append(("include_reasoning", "no reasoning parser runs here, so reasoning is part of the content."))
    if body.echo and not echo_of(body, role_of(body, config.frontend.response_role)):
        notes.append(("echo", "the last message is not a text of the role that answers."))
    return notes


def _template(body: ChatBody, reads: frozenset[str]) -> list[tuple[str, str]]:
    """Variables that are given to the server's template in vain."""
    notes = [
        (name, "the chat template does not show them to the model.")
        for name in ("tools", "documents")
        if getattr(body, name) and name not in reads and not (name == "tools" and body.tool_choice == "none")
    ]
    if body.reasoning_effort is not None and not reads & {"reasoning_effort", "enable_thinking"}:
        notes.append(("reasoning_effort", "the chat template does not read it."))
    if idle := sorted(set(body.chat_template_kwargs or ()) - reads):
        names = ", ".join(repr(name[:_MAX_NAME]) for name in idle[:_MAX_NAMED])
        notes.append(("chat_template_kwargs", f"the chat template does not read {names}."))
    return notes


def _only_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not any(isinstance(item, str) for item in prompt)


def generation_prompt(body: ChatBody) -> bool:
    """True by default, false by default when the last message is to be continued."""
    wanted = body.add_generation_prompt
    return not body.continue_final_message if wanted is None else wanted


def role_of(body: ChatBody, response_role: str) -> str:
    """The role that answers: without a generation prompt it is the last message's."""
    role = body.messages[-1].get("role") if body.messages else None
    return response_role if generation_prompt(body) or not isinstance(role, str) else role


def echo_of(body: ChatBody, role: str) -> str:
    """The text of the last message, when it is to be sent back before the answer."""
    last = body.messages[-1] if body.messages else {}
    if not body.echo or last.get("role") != role:
        return ""
    content = last.get("content")
    if isinstance(content, list):
        content = "".join(
            str(part.get("text", "")) for part in content if isinstance(part, dict) and part.get("type") == "text"
        )
    return content if isinstance(content, str) else ""
