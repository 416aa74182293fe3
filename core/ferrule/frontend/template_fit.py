"""Whether the chat template and the tool parser of a server fit: a call that the template writes must be read back."""

from __future__ import annotations

import json
from os.path import commonprefix
from typing import Any

from msgspec.structs import replace

from ferrule import log
from ferrule.assembly.vocabulary import special_ids
from ferrule.config import FrontendConfig
from ferrule.errors import FerruleError, OverloadedError, RequestError, UnavailableError
from ferrule.frontend.admission.admit import PromptReader
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.frontend.text.builtin import fitting
from ferrule.frontend.text.detokenize import decode
from ferrule.frontend.text.render import Renderer
from ferrule.interfaces.parsers import CallArguments, CallStart, ChoiceContext
from ferrule.interfaces.service import ChatPrompt
from ferrule.interfaces.tokenizer import Tokenizer

_NAME = "get_forecast"
_ARGUMENTS = {"city": "Lisbon", "days": 3}
_PROPERTIES = {"city": {"type": "string", "description": "A city"}, "days": {"type": "integer", "description": "Days"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "The weather of the next days",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city", "days"]},
    },
}
_QUESTION = {"role": "user", "content": "What will the weather be in Lisbon?"}
_WORDS = "Sunny throughout."
_SAYS = {"role": "assistant", "content": _WORDS}
_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [  # Mistral's templates want ids of nine letters and digits
        {"id": "a1b2c3d4e", "type": "function", "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}}
    ],
}

_logger = log.get("frontend")


async def warn_of_misfit(frontend: FrontendConfig, reader: PromptReader, parsers: Parsers) -> None:
    """Log a warning where tool calls cannot work with this template. Does nothing without a tool parser."""
    name, option = frontend.tool_call_parser, frontend.chat_template
    if parsers.tools is None or not reader.renderer.templates:
        return
    try:
        misfit = await find_misfit(reader.renderer, parsers, reader.tokenizer)
    except (OverloadedError, UnavailableError) as error:  # which says nothing about the template
        _logger.warning("the chat template was not checked against the tool parser: %s", error)
        return
    if misfit is None:
        return
    given = option is not None and len(option) < 100 and "{" not in option
    template = f"--chat-template {option}" if given else "--chat-template" if option else "the model's chat template"
    names = fitting(name or "")
    advice = "No built-in template does."
    if names:
        advice = f"Templates that do: --chat-template {' or '.join(names)}. `ferrule templates` lists them."
    _logger.warning("%s does not fit --tool-call-parser %s: %s. %s", template, name, misfit, advice)


async def find_misfit(renderer: Renderer, parsers: Parsers, tokenizer: Tokenizer | None) -> str | None:
    """Return how the default template and the tool parser do not fit together; None where they fit.

    An answer with a call is rendered as a part of the history, and what the model would have generated of it is parsed.
    Raises OverloadedError and UnavailableError.
    """
    asked = ChatPrompt(messages=(_QUESTION,), tools=(_TOOL,))
    closed = replace(asked, add_generation_prompt=False)
    try:
        prompt = await renderer.render(asked)
        if prompt == await renderer.render(replace(asked, tools=None)):
            return "it does not show tools to the model"
        history = await renderer.render(closed)
        called = await renderer.render(replace(closed, messages=(_QUESTION, _CALLS)))
        said = await renderer.render(replace(closed, messages=(_QUESTION, _SAYS)))
    except OverloadedError:
        raise
    except RequestError as error:
        return f"it cannot render a conversation with a tool call ({error.message.rstrip('.')})"
    texts = generated(prompt, history, called, said.rpartition(_WORDS)[2])
    without_thoughts = Parsers(tools=parsers.tools, tools_title=parsers.tools_title)
    chains = (without_thoughts, parsers) if parsers.reasoning else (without_thoughts,)
    if any(_reads(chain, text, prompt, tokenizer) for text in texts for chain in chains):
        return None
    return "a call in the history is written in a form that the parser does not read"


def generated(prompt: str, history: str, whole: str, end: str) -> tuple[str, ...]:
    """Return texts that a model may have generated for the last message of `whole`; the likeliest text comes first.

    `prompt` and `history` are the conversation before that message, with and without the beginning of an answer; `end`
    is the text after an answer. A template may begin an answer in another way than it shows an earlier one.
    """
    if whole.startswith(prompt):
        texts = [whole[len(prompt) :]]
    else:
        starts = [len(commonprefix([prompt, whole]))]
        if whole.startswith(history):
            starts.append(len(history))
        texts = [whole[start:] for start in starts]
    return tuple(text.removesuffix(end) for text in texts)


def _reads(parsers: Parsers, text: str, prompt: str, tokenizer: Tokenizer | None) -> bool:
    """Return whether the parsers find the call, and no other, in a text that comes from the engine."""
    context = ChoiceContext(prompt=prompt, tools=(_TOOL,), tool_choice="auto", streamed=False, tokenizer=tokenizer)
    try:
        chain = ParseChain(parsers, (_TOOL,), context)
        ids: list[int] = []
        if tokenizer is not None:
            ids = tokenizer.encode(text, add_special_tokens=False)
            kept = special_ids(tokenizer, chain.special_tokens)
            text = decode(tokenizer, ids, skip_special_tokens=not chain.wants_special_tokens, kept=kept)
        events = [*chain.feed(text, tuple(ids)), *chain.finish()]
    except FerruleError:  # the fault of a plugin, which was logged
        return False
    names = [event.name for event in events if isinstance(event, CallStart)]
    fragments = [event.fragment for event in events if isinstance(event, CallArguments)]
    return names == [_NAME] and _json("".join(fragments)) == _ARGUMENTS


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
