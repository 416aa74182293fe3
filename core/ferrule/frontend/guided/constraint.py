"""What the output of one choice must look like: the request's format, the calls that it enforces, and the thoughts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ferrule.errors import RequestError
from ferrule.frontend.admission.admit import Prepared
from ferrule.frontend.admission.validate import Rules
from ferrule.frontend.guided.calls import CallList, NamedCall
from ferrule.frontend.guided.compiler import GrammarCompiler
from ferrule.interfaces.parsers import ChoiceContext, ReasoningParser, ToolParser
from ferrule.interfaces.service import Generate
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import CompiledGrammar, GrammarSpec, OneOf, ThoughtLimit, TokenSampling

ToolParsers = Callable[[Sequence[dict[str, Any]]], ToolParser]


@dataclass(frozen=True)
class Parsers:
    """How to make the parsers of a choice, None for none, and what logs call them."""

    reasoning: Callable[[], ReasoningParser] | None = None
    tools: ToolParsers | None = None
    reasoning_title: str = "reasoning_parser"
    tools_title: str = "tool_parser"


def enforces(choice: str | dict[str, Any] | None) -> bool:
    """Whether a tool choice demands a call."""
    return choice == "required" or isinstance(choice, dict)


def tool_parser(
    make: ToolParsers | None, tools: Sequence[dict[str, Any]] | None, context: ChoiceContext
) -> tuple[ToolParser, GrammarSpec | None] | None:
    """The parser of a choice's calls, begun, and the constraint that enforces them. None when calls are not read.

    `tool_choice` may demand a call. Where the server has no tool parser, or its parser has no constraint for that
    choice, the call is written and read as JSON instead.
    """
    choice = context.tool_choice or "auto"
    if not tools or choice == "none":
        return None
    if make is not None:
        parser = make(tools)
        parser.begin(context)
        spec = parser.constraint(choice)
        if spec is not None or not enforces(choice):
            return parser, spec
    if not enforces(choice):
        return None
    parser = (NamedCall if isinstance(choice, dict) else CallList)(tools)
    parser.begin(context)
    return parser, parser.constraint(choice)


def told_of_calls(
    context: ChoiceContext, tools: Sequence[dict[str, Any]] | None, parser: ToolParser | None
) -> ChoiceContext:
    """What a reasoning parser is told where this parser reads the calls."""
    if parser is None or not parser.call_tags:
        return context

    def new(told: ChoiceContext = context) -> ToolParser:
        made = type(parser)(tools or ())
        made.begin(told)
        return made

    return replace(context, new_tool_parser=new)


def told_of_thoughts(context: ChoiceContext, parser: ReasoningParser) -> ChoiceContext:
    """What a tool parser is told where this parser reads the thoughts."""
    tags = parser.thoughts()
    return replace(context, dropped_tags=parser.dropped_tags, closing_tags=tags.closes if tags else ())


def enforces_strict(make: ToolParsers | None, tokenizer: Tokenizer | None) -> bool:
    """Whether a parser's constraint covers strict functions where the model chooses whether to call."""
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}},)
    found = tool_parser(make, tools, ChoiceContext(tools=tools, tool_choice="auto", tokenizer=tokenizer))
    return found is not None and found[1] is not None


def check_strict(parser: ToolParser, tools: Sequence[dict[str, Any]], context: ChoiceContext) -> None:
    """Raise RequestError that names the function because of which strict functions are not enforced."""
    for number, tool in enumerate(tools):
        function = tool.get("function") or {}
        if not function.get("strict"):
            function = {**function, "strict": True, "parameters": {"type": "object"}}
        found = tool_parser(type(parser), ({**tool, "function": function},), replace(context, tool_choice="auto"))
        if found is not None and found[1] is None:
            raise RequestError(
                f"The calls of function {function.get('name')!r:.80} cannot be enforced in this model's format, so no "
                "function of the request can be strict.",
                f"tools[{number}].function",
            )


def constraint_param(request: Generate) -> str:
    """Return the field that a constraint of this request comes from."""
    if enforces(request.tool_choice):
        return "tool_choice"
    return "structured_outputs" if request.grammar or request.params.grammar else "tools"


class Constraints:
    """From requests to what the engine takes. `parsers` are the server's."""

    def __init__(self, parsers: Parsers, compiler: GrammarCompiler) -> None:
        self.parsers = parsers
        self._compiler = compiler

    async def enforce(
        self, request: Generate, rules: Rules, prompt: Prepared, context: ChoiceContext
    ) -> tuple[TokenSampling, CompiledGrammar | None]:
        """How the choices of one prompt are sampled, and their constraint. Raises RequestError.

        Constrained output ends where its form does, with ignore_eos too.
        """
        sampling = replace(prompt.sampling, thoughts=self.thought_limit(request, context))
        grammar = await self.compile(request, context)
        if grammar is not None:
            ends = (*sampling.stop_token_ids, *rules.eos_ids)
            sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys(ends)))
        return sampling, grammar

    async def compile(self, request: Generate, context: ChoiceContext) -> CompiledGrammar | None:
        """The constraint of the choices of one prompt, None without one.

        Raises RequestError for a constraint that is wrong or cannot be enforced, and for two that exclude each other.
        """
        spec = self._spec(request, context)
        if spec is None:
            return None
        param = constraint_param(request)
        if request.beam is not None:
            raise RequestError("A beam search cannot be constrained.", param)
        return await self._compiler.compile(spec, param)

    def thought_limit(self, request: Generate, context: ChoiceContext) -> ThoughtLimit | None:
        """The limit on the thoughts of the choices of one prompt. Raises RequestError where there cannot be one."""
        param, most = "thinking_token_budget", request.params.thinking_token_budget
        if most is None or most < 0:
            return None
        if request.beam is not None:
            raise RequestError(f"A beam search cannot have a {param}.", param)
        if self.parsers.reasoning is None or context.tokenizer is None:
            raise RequestError(f"{param} needs a server that was started with --reasoning-parser.", param)
        parser = self.parsers.reasoning()
        calls = None if request.raw else tool_parser(self.parsers.tools, request.tools, context)
        parser.begin(told_of_calls(context, request.tools, calls and calls[0]))
        tags = parser.thoughts()
        if tags is None:
            raise RequestError(f"The reasoning parser of this server does not support {param}.", param)
        if not (tags.inside or tags.opens):
            return None
        return ThoughtLimit(
            tokens=most,
            inside=tags.inside,
            opens=tags.opens,
            closes=tags.closes,
            end_ids=tuple(context.tokenizer.encode(tags.end, add_special_tokens=False)),
            again=tags.again,
        )

    def _enforces_strict(self, request: Generate, context: ChoiceContext) -> bool:
        """Whether some function is strict, and the parser enforces such functions where it can."""
        strict = any((tool.get("function") or {}).get("strict") for tool in request.tools or ())
        return strict and enforces_strict(self.parsers.tools, context.tokenizer)

    def _spec(self, request: Generate, context: ChoiceContext) -> GrammarSpec | None:
        asked = request.grammar or request.params.grammar
        calls = None if request.raw else tool_parser(self.parsers.tools, request.tools, context)
        if calls is not None and calls[1] is None and self._enforces_strict(request, context):
            check_strict(calls[0], request.tools or (), context)
        spec = asked if calls is None else _joined(asked, request.tool_choice, *calls)
        if spec is None or self.parsers.reasoning is None:
            return spec
        parser = self.parsers.reasoning()
        parser.begin(told_of_calls(context, request.tools, calls and calls[0]))
        tags = parser.thoughts()
        if not context.templated and tags is not None and not tags.inside:
            return spec  # only a template, or the end of the prompt, begins thoughts
        return replace(spec, form=parser.constrain(spec.form))


def _joined(
    asked: GrammarSpec | None, choice: str | dict[str, Any] | None, parser: ToolParser, calls: GrammarSpec | None
) -> GrammarSpec | None:
    """With a format and tools that may be called, the output has the format or is calls."""
    if asked is None:
        return calls
    if enforces(choice):
        raise RequestError("A format of the output and an enforced call exclude each other.", "tool_choice")
    every = parser.constraint("required")
    return asked if every is None else replace(asked, form=OneOf((asked.form, every.form)))
