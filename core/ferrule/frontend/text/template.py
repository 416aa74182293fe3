"""Chat templates: what one reads, and how it renders. Runs in a child process (`children`), whoever wrote the template.

The environment is what templates of published models expect: Jinja with trimmed blocks, loop controls, a plain
`tojson`, `raise_exception`, `strftime_now`, and ``{% generation %}`` without effect.
https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct, convert

from ferrule.errors import RequestError

_MAX_MESSAGE = 500  # characters of a template's own error message


class RenderJob(Struct, frozen=True, kw_only=True):
    """One rendering. `content_format`: auto, string or openai. `marker`: the rendering ends where this text stands."""

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]  # what every template gets: tools, documents, special tokens …
    extra: dict[str, Any]  # chat_template_kwargs
    content_format: str
    max_characters: int
    marker: str = ""


class Compiled(Struct, frozen=True):
    """`content`: what messages' content must look like: "string", "openai" (parts), or "given" (either)."""

    template: Template
    reads: frozenset[str]
    keys: frozenset[str]  # names that it looks up in messages and other values
    content: str


class _TemplateRefusal(TemplateError):
    """The template called `raise_exception`."""


def work(request: Any) -> Any:
    """Entry point in the child: render a `RenderJob`, or describe the template of ``{"inspect": template}``.

    A description has `content` (its form), `reads` (names of variables) and `keys` (see `Compiled`).
    """
    if "inspect" in request:
        compiled = compile_template(request["inspect"])
        return {"content": compiled.content, "reads": sorted(compiled.reads), "keys": sorted(compiled.keys)}
    return render(convert(request, RenderJob))


def render(job: RenderJob) -> str:
    """The text of a conversation. Raises RequestError."""
    compiled = compile_template(job.template)
    shape = compiled.content if job.content_format == "auto" else job.content_format
    context = {name: value for name, value in job.extra.items() if name in compiled.reads} | job.variables
    context["messages"] = [{**message, "content": _shaped(message["content"], shape)} for message in job.messages]
    if job.marker:
        _mark(context["messages"][-1], job.marker)
    parts: list[str] = []
    length = 0
    try:
        for part in compiled.template.generate(context):
            parts.append(part)
            length += len(part)
            if length > job.max_characters + len(job.marker):
                raise RequestError(
                    f"The rendered conversation is longer than {job.max_characters} characters, which no context "
                    "of this model holds.",
                    "messages",
                )
    except _TemplateRefusal as refusal:
        said = str(refusal.message)[:_MAX_MESSAGE]
        raise RequestError(f"The chat template refuses this conversation: {said}", "messages") from None
    except (MemoryError, RecursionError, RequestError):
        raise
    except Exception as error:  # a template can raise anything; its class says enough
        kind = type(error).__name__
        raise RequestError(f"The chat template cannot render this conversation ({kind}).", "messages") from None
    return _up_to_marker("".join(parts), job.marker) if job.marker else "".join(parts)


@lru_cache(maxsize=4)
def compile_template(text: str) -> Compiled:
    """Raises RequestError for a template that cannot be parsed. Computes nothing that the template says."""
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
    return Compiled(template, frozenset(reads) - environment.globals.keys(), _keys(tree), content_shape(tree))


def _check_modifiers(tree: nodes.Template) -> None:
    """Refuse ``{% autoescape EXPRESSION %}``: its value is computed where the template is compiled."""
    for modifier in tree.find_all(nodes.EvalContextModifier):
        if not all(isinstance(option.value, nodes.Const) for option in modifier.options):
            raise TemplateSyntaxError("autoescape needs true or false", modifier.lineno)


class _Unfolded(CodeGenerator):
    """Constant expressions are computed when the template runs, under the limits of a child, not when it is compiled."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.optimizer = None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Names(_Unfolded, TrackingCodeGenerator):
    """Finds the names that a template uses and does not set, as `jinja2.meta` does."""


def _keys(tree: nodes.Template) -> frozenset[str]:
    """Attributes, and texts that may be keys of ``message[…]``, ``message.get(…)`` or ``… in message``."""
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
    """``{% generation %}`` marks what the model said, for training; here its body is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ------------------------------------------------------------------------------------------------ content


def content_shape(tree: nodes.Template) -> str:
    """What a template expects as a message's content: "openai" when it loops over parts, "string" when it does not,
    "given" when it loops but also asks whether the content is a string.
    """
    names = {"content"}
    for _ in range(3):  # a name that was set from a name that was set from …
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    if not loops:
        return "string"
    return "given" if tests else "openai"


def _is_content(node: nodes.Node | None, names: Iterable[str]) -> bool:
    """True for ``message.content``, ``message['content']``, names set from it, and these behind filters or slices."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == "content")
        return isinstance(node.arg, nodes.Slice) and _is_content(node.node, names)
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    return isinstance(node, nodes.Name) and node.name in names


def _shaped(content: Any, shape: str) -> Any:
    if shape == "string" and isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    if shape == "openai" and isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _mark(message: dict[str, Any], marker: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + marker
    elif content:
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + marker}]
    else:
        message["content"] = [{"type": "text", "text": marker}]


def _up_to_marker(text: str, marker: str) -> str:
    place = text.rfind(marker)
    if place < 0:
        raise RequestError(
            "continue_final_message: the chat template does not show the final message's content.",
            "continue_final_message",
        )
    return text[:place].replace(marker, "")
