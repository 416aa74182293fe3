"""The request side of both OpenAI routes: checks, parameters for the service, and notes on fields without effect, each
with the reason. None is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferrule.config import RouterSettings
from ferrule.errors import RequestError
from ferrule.interfaces.router import RouterContext
from ferrule.interfaces.service import Service
from ferrule.sampling_params import Beam
from ferrule.schema import check_marks
from ferrule.structured_outputs import constraint_of, grammar_of
from ferrule.types import Targets
from ferrule_plugins.router.openai.schema import ChatBody, CompletionBody, GenerateBody
from ferrule_protocol import MAX_NOTES, Notes, unread_by_template

_READS_ARGUMENTS = frozenset({"sampler", "scheduler", "executor"})  # kinds that are given requests
EFFORT = ("reasoning_effort", "enable_thinking")  # variables of templates that `reasoning_effort` sets


def check(body: GenerateBody, config: RouterSettings) -> None:
    """Refuse fields that do not go together, or that this server cannot serve."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed.", "prompt_logprobs")
    if body.priority and config.scheduler.scheduling_policy == "fcfs":
        raise RequestError("priority needs a server started with --scheduling-policy priority.", "priority")
    for name in ("target_first_token_ms", "target_inter_token_ms"):
        if getattr(body, name) is not None and getattr(config.scheduler, name) is None:
            raise RequestError(f"{name} needs a server started with --{name.replace('_', '-')}.", name)
    if body.use_beam_search and (field := constraint_of(body)):
        raise RequestError(f"{field} cannot be combined with use_beam_search.", field)


def common(body: GenerateBody) -> dict[str, Any]:
    """Return those fields of a `Generate` that both routes fill alike.

    A beam search has `n` beams, or `best_of` beams of which the `n` best are returned.
    """
    given: dict[str, Any] = {}
    if body.logits_processors:  # each is a qualified name, or {qualname, args, kwargs}
        items = body.logits_processors
        named = (item if isinstance(item, str) else item.model_dump(exclude_none=True) for item in items)
        given["logits_processors"] = tuple(named)
    if body.use_beam_search:
        width = body.n if body.best_of is None else body.best_of
        given["beam"] = Beam(width=width, length_penalty=body.length_penalty, early_stopping=body.early_stopping)
    return {
        "model": body.model,
        "priority": body.priority,
        "targets": Targets((body.target_first_token_ms or 0) / 1000, (body.target_inter_token_ms or 0) / 1000),
        "cache_salt": body.cache_salt,
        "grammar": grammar_of(body),
        "streamed": body.stream,
        **given,
    }


def review(body: GenerateBody, unknown_fields: Sequence[str], ctx: RouterContext) -> Notes:
    """Return notes on all fields of a generate request that have no effect.

    Raises RequestError for a feature that is not implemented, and on a strict server for any such field.
    """
    config, service = ctx.config, ctx.service
    notes = Notes.of(unknown_fields, type(body))
    notes.known += check_marks(body)
    if body.vllm_xargs and not _read_by_plugins(ctx):
        notes.known.append(("vllm_xargs", "no sampler, scheduler, executor or hook of a plugin runs here to read it."))
    notes.known += _common(body)
    if isinstance(body, ChatBody):
        notes.known += _chat(body, config, service)
        effort = {"reasoning_effort": EFFORT} if body.reasoning_effort is not None else {}
        shows_tools = body.tool_choice != "none"
        notes.known += unread_by_template(body.messages, body, service, shows_tools, effort)
    elif isinstance(body, CompletionBody) and body.add_special_tokens is not None and _only_ids(body.prompt):
        notes.known.append(("add_special_tokens", "nothing is added to token ids."))
    notes.settle(config.frontend.strict_requests)
    return notes


def _read_by_plugins(ctx: RouterContext) -> bool:
    """Return whether a plugin was chosen that may read extra arguments. No built-in one reads them."""
    chosen = [each for each in ctx.config.chosen if each[0] in _READS_ARGUMENTS]
    chosen += [("hooks", name) for name in ctx.plugins.names("hooks")]
    return not all(ctx.plugins.is_builtin(*each) for each in chosen)


def _common(body: GenerateBody) -> list[tuple[str, str]]:
    notes = []
    if body.use_beam_search:
        if body.seed is not None:
            notes.append(("seed", "beam search draws nothing."))
    else:
        if body.length_penalty != 1:
            notes.append(("length_penalty", "has an effect with use_beam_search only."))
        if body.early_stopping:
            notes.append(("early_stopping", "has an effect with use_beam_search only."))
    if not constraint_of(body):
        notes += [
            (name, "has an effect with a form of the output only, such as response_format.")
            for name in ("guided_decoding_backend", "guided_whitespace_pattern")
            if getattr(body, name) is not None
        ]
    if body.skip_special_tokens and not body.spaces_between_special_tokens:
        notes.append(("spaces_between_special_tokens", "has an effect with skip_special_tokens false only."))
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        notes.append(("stream_options", "continuous_usage_stats needs include_usage."))
    shown = getattr(body, "logprobs", None) not in (None, False) or body.prompt_logprobs is not None
    if body.return_tokens_as_token_ids and not shown:
        notes.append(("return_tokens_as_token_ids", "has an effect with logprobs only."))
    return notes


def _chat(body: ChatBody, config: RouterSettings, service: Service) -> list[tuple[str, str]]:
    notes = []
    if body.parallel_tool_calls is not None and not body.tools:
        notes.append(("parallel_tool_calls", "has an effect with tools only."))
    strict = [number for number, tool in enumerate(body.tools or ()) if tool["function"].get("strict")]
    if strict and body.tool_choice in (None, "auto") and not service.enforces_strict_tools():
        for number in strict:
            why = "the tool parser of this server cannot enforce the arguments of calls that the model chooses to make."
            notes.append((f"tools[{number}].function.strict", why))
    if not body.include_reasoning and not config.frontend.reasoning_parser:
        notes.append(("include_reasoning", "no reasoning parser runs here, so reasoning is part of the content."))
    if body.echo and not echo_of(body, role_of(body, config.frontend.response_role)):
        notes.append(("echo", "the last message is not a text of the role that answers."))
    return notes[:MAX_NOTES]


def _only_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


def role_of(body: ChatBody, response_role: str) -> str:
    """Return the role of the answer, which without a generation prompt is the role of the last message."""
    return response_role if body.begins_message else str(body.messages[-1]["role"])


def echo_of(body: ChatBody, role: str) -> str:
    """Return the text of the last message when the request asks for it before the answer, else ""."""
    last: Mapping[str, Any] = body.messages[-1]
    if not body.echo or last["role"] != role:
        return ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part["text"] for part in content)
