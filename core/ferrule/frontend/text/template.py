"""Chat templates: what one reads, and how it renders. Runs in a child process (`children`), whoever wrote the template.

The environment is what templates of published models expect: Jinja with trimmed blocks, loop controls, a plain
`tojson`, `raise_exception`, `strftime_now`, and ``{% generation %}`` without effect.
https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct, convert, to_builtins

from ferrule.errors import RequestError
from ferrule.frontend.text.content import Fit, find_fit, find_lost, shaped

_MAX_MESSAGE = 500  # characters of a template's own error message
_PROBE = 1 << 20  # more characters of a text that only is looked at
_LONE = re.compile("[\ud800-\udfff]")
_DEVELOPER = "developer"
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time in a city", "parameters": _PARAMETERS},
}


class RenderJob(Struct, frozen=True, kw_only=True):
    """One rendering. `content_format`: auto, string or openai. `marker`: the rendering ends where this text stands."""

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]  # what every template gets: tools, documents, special tokens …
    extra: dict[str, Any]  # chat_template_kwargs
    content_format: str
    max_characters: int
    marker: str = ""


class Rendering(Struct, frozen=True):
    """A rendered text. `lost`: what of the messages the text does not show, as ``messages[1].content``."""

    text: str
    lost: tuple[str, ...] = ()


class Compiled(Struct, frozen=True):
    template: Template
    reads: frozenset[str]
    keys: frozenset[str]  # names that it looks up in messages and other values


class _TemplateRefusal(TemplateError):
    """The template called `raise_exception`."""


def work(request: Any) -> Any:
    """Render a `RenderJob`, or describe the template of ``{"inspect": template}``: the entry point of the child.

    A description has `content` (the form of user messages), `reads` (names of variables) and `keys` (see `Compiled`). A
    job comes as JSON, which has all numbers and characters that messages may hold.
    """
    if "inspect" in request:
        compiled = compile_template(request["inspect"])
        fit = _fit(request["inspect"], tuple(request["special_tokens"].items()))
        return {"content": fit.form("user"), "reads": sorted(compiled.reads), "keys": sorted(compiled.keys)}
    return to_builtins(render(convert(json.loads(request["job"]), RenderJob)))


def render(job: RenderJob) -> Rendering:
    """Return the text of a conversation. Raises RequestError."""
    compiled = compile_template(job.template)
    fit = _fit(job.template, tuple(sorted((name, value) for name, value in job.variables.items() if _is_token(name))))
    if job.content_format != "auto":
        fit = fit.of_all(job.content_format)
    context = {name: value for name, value in job.extra.items() if name in compiled.reads} | job.variables
    messages = [_adapted(message, compiled, fit) for message in job.messages]
    limit = job.max_characters
    asked = [*messages[:-1], _marked(messages[-1], job.marker)] if job.marker else messages
    try:
        text = _run(compiled, {**context, "messages": asked}, limit + len(job.marker))
    except _TemplateRefusal as refusal:
        said = str(refusal.message)[:_MAX_MESSAGE]
        raise RequestError(f"The chat template refuses this conversation: {said}", "messages") from None
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a template can raise anything; its class says enough
        kind = type(error).__name__
        raise RequestError(f"The chat template cannot render this conversation ({kind}).", "messages") from None
    if text is None:
        raise RequestError(
            f"The rendered conversation is longer than {limit} characters, which no context of this model holds.",
            "messages",
        )
    lost = find_lost(partial(_try, compiled, context, limit), messages, text)
    text = _up_to_marker(text, job.marker) if job.marker else text
    return Rendering(_escaped(text, job.messages), tuple(lost))


def _run(compiled: Compiled, context: Mapping[str, Any], limit: int) -> str | None:
    """Return the text, or None when it is longer than `limit`. Raises whatever the template raises."""
    parts: list[str] = []
    length = 0
    for part in compiled.template.generate(context):
        parts.append(part)
        length += len(part)
        if length > limit:
            return None
    return "".join(parts)


def _try(compiled: Compiled, context: Mapping[str, Any], limit: int, messages: Sequence[Any]) -> str | None:
    """Return the text of other messages; None where the template fails on them."""
    try:
        return _run(compiled, {**context, "messages": messages}, limit + _PROBE)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # what a template raises for messages that nobody sent says only that it cannot render them
        return None


@lru_cache(maxsize=4)
def _fit(text: str, special_tokens: tuple[tuple[str, str], ...]) -> Fit:
    """Return how a template reads content, with the variables that every template gets and one tool."""
    compiled = compile_template(text)
    context = {**dict(special_tokens), "tools": [_TOOL], "documents": None, "add_generation_prompt": False}
    return find_fit(partial(_try, compiled, context, 0), compiled.keys & {_DEVELOPER})


def _is_token(name: str) -> bool:
    return name.endswith("_token")


def _adapted(message: Mapping[str, Any], compiled: Compiled, fit: Fit) -> dict[str, Any]:
    """Return the message with content in the form that the template reads for its role. A developer's message becomes
    the system's where the template knows no such role.
    """
    role, content = message["role"], message["content"]
    if role == _DEVELOPER and role not in compiled.keys:
        role = "system"
    if content is None and not (fit.null and message.get("tool_calls")):
        content = ""
    return {**message, "role": role, "content": shaped(content, fit.form(role))}


def _escaped(text: str, messages: Sequence[Any]) -> str:
    r"""Return the text with the messages' lone surrogates, which arguments of calls may hold, written as in JSON:
    \ud800.

    Surrogates that the template writes itself stay, and make the text one that cannot be sent.
    """
    lone = set(_LONE.findall(text))
    if lone and lone <= set(_LONE.findall(json.dumps(messages, ensure_ascii=False))):
        return text.encode("utf-8", "backslashreplace").decode()
    return text


@lru_cache(maxsize=4)
def compile_template(text: str) -> Compiled:
    """Compile a template without running it. Raises RequestError for a template that cannot be parsed."""
    environment = make_environment()
    try:
        tree = environment.parse(text)
        _check_modifiers(tree)
        names = _Names(environment)
        names.visit(tree)
        reads = names.undeclared_identifiers
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise RequestError(f"The chat template has a syntax error in line {error.lineno}.", "chat_template") from None
    except TemplateError as error:
        raise RequestError(f"The chat template cannot be used ({type(error).__name__}).", "chat_template") from None
    except (RecursionError, SyntaxError, ValueError) as error:  # Python's, for what the template was translated to
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid ({error!s:.80})"
        raise RequestError(f"The chat template {what}.", "chat_template") from None
    return Compiled(template, frozenset(reads) - environment.globals.keys(), _keys(tree))


def _check_modifiers(tree: nodes.Template) -> None:
    """Refuse ``{% autoescape EXPRESSION %}``: its value is computed where the template is compiled."""
    for modifier in tree.find_all(nodes.EvalContextModifier):
        if not all(isinstance(option.value, nodes.Const) for option in modifier.options):
            raise TemplateSyntaxError("autoescape needs true or false", modifier.lineno)


class _Unfolded(CodeGenerator):
    """A compiler that leaves constant expressions to the run of the template, under the limits of a child."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.optimizer = None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Names(_Unfolded, TrackingCodeGenerator):
    """A visitor that finds the names that a template uses and does not set, as `jinja2.meta` does."""


def _keys(tree: nodes.Template) -> frozenset[str]:
    """Return attributes, and texts that may be keys of ``message[…]``, ``message.get(…)`` or ``… in message``."""
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(texts | {node.attr for node in tree.find_all(nodes.Getattr)})


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.code_generator_class = _Unfolded
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any = "") -> NoReturn:
    raise _TemplateRefusal(str(message))


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks what the model said, for training; here its body is rendered as it
    stands.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ------------------------------------------------------------------------------------------------ continuing


def _marked(message: Mapping[str, Any], marker: str) -> dict[str, Any]:
    content = message["content"]
    if content is None or isinstance(content, str):
        content = (content or "") + marker
    elif content:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + marker}]
    else:
        content = [{"type": "text", "text": marker}]
    return {**message, "content": content}


def _up_to_marker(text: str, marker: str) -> str:
    place = text.rfind(marker)
    if place < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the final message's content.",
            "continue_final_message",
        )
    return text[:place].replace(marker, "")
