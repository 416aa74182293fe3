"""The demands on an output and the way in which it is read: its format, its calls, and the thoughts before them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ferrule.assembly.vocabulary import special_ids
from ferrule.errors import RequestError
from ferrule.forms import GrammarSpec, OneOf
from ferrule.frontend.admission.admit import Prepared
from ferrule.frontend.admission.validate import Checked
from ferrule.frontend.output.parse import ParseChain, Parsers, enforces
from ferrule.frontend.text.detokenize import Detokenizer, decode, open_detokenizer
from ferrule.frontend.text.stops import StopMatcher
from ferrule.interfaces.parsers import ChoiceContext
from ferrule.interfaces.service import ChatPrompt, Generate, Prompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import ThoughtLimit

_TAIL = 32  # last ids of a prompt without text, which are decoded for the parsers
_BUDGET = "thinking_token_budget"
_STRICT = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}


class OutputReading(Struct, frozen=True, kw_only=True):
    """The constraint of the choices of one prompt, and the way in which they are read. Each choice has a chain of its
    own, and copies of `detokenizer` and `stops`.
    """

    checked: Checked
    chains: tuple[ParseChain, ...]
    detokenizer: Detokenizer | None  # None: ids only
    stops: StopMatcher | None  # for all text; those for the answer alone are in the chains
    thoughts: ThoughtLimit | None
    constraint: GrammarSpec | None
    param: str  # the field that the constraint comes from
    hides_thoughts: bool  # outputs have no ids and logprobs of thoughts


class OutputReader:
    """A maker of readings, with the parsers and the tokenizer of the server. Without a `tokenizer`, outputs are ids
    only.
    """

    def __init__(self, parsers: Parsers, tokenizer: Tokenizer | None) -> None:
        self.parsers = parsers
        self._tokenizer = tokenizer
        self._special_ids = lru_cache(maxsize=8)(special_ids)

    def reading(
        self, request: Generate, asked: Prompt | ChatPrompt, prompt: Prepared, checked: Checked
    ) -> OutputReading:
        """Decide how the choices of one of the request's prompts, `asked`, are constrained and read.

        The text of a raw request is not parsed: its parsers only find the end of the thoughts, if the request demands
        something of the text behind them. Raises RequestError for a constraint or a limit that cannot be kept, or that
        excludes another.
        """
        raw, reasons = request.raw, self.parsers.reasoning is not None
        demands = not raw or _form_of(request) is not None or request.params.thinking_token_budget is not None
        context = self._context(request, asked, prompt) if demands else ChoiceContext()
        stops = None if checked.stops is None else StopMatcher(checked.stops, checked.include_stop)
        in_answer = reasons and not raw and checked.detokenize and not request.stop_in_reasoning
        new_chain = partial(ParseChain, self.parsers, request.tools, context, stops if in_answer else None)
        if raw:
            new_chain = partial(ParseChain, Parsers())
        chains = tuple(new_chain() for _ in range(checked.best_of))
        first = ParseChain(self.parsers, None, context) if raw and demands else chains[0]
        thoughts = self.thought_limit(request, first)
        constraint, param = self.constraint(request, first, context)
        return OutputReading(
            checked=checked,
            chains=chains,
            detokenizer=self._detokenizer(prompt, checked, chains[0]),
            stops=None if in_answer else stops,
            thoughts=thoughts,
            constraint=constraint,
            param=param,
            hides_thoughts=not request.thought_tokens,
        )

    def thought_limit(self, request: Generate, chain: ParseChain) -> ThoughtLimit | None:
        """Return the limit on the thoughts of the choices of one prompt. Raises RequestError."""
        most = request.params.thinking_token_budget
        if most is None or most < 0:
            return None
        if request.beam is not None:
            raise RequestError(f"A beam search cannot have a {_BUDGET}.", _BUDGET)
        if chain.reasoning is None or self._tokenizer is None:
            raise RequestError(f"{_BUDGET} needs a server that was started with --reasoning-parser.", _BUDGET)
        tags = chain.reasoning.thoughts()
        if tags is None:
            raise RequestError(f"The reasoning parser of this server does not support {_BUDGET}.", _BUDGET)
        if not (tags.inside or tags.opens):
            return None
        return ThoughtLimit(
            tokens=most,
            inside=tags.inside,
            opens=tags.opens,
            closes=tags.closes,
            end_ids=tuple(self._tokenizer.encode(tags.end, add_special_tokens=False)),
            again=tags.again,
        )

    def constraint(
        self, request: Generate, chain: ParseChain, context: ChoiceContext
    ) -> tuple[GrammarSpec | None, str]:
        """Join the request's demands on its output, with the thoughts in front, and name the field that demands them.

        Raises RequestError for demands that exclude each other, or that cannot be enforced.
        """
        form, spec, param = _form_of(request), chain.constraint, "tools"
        if enforces(request.tool_choice):
            param = "tool_choice"
        elif form is not None:
            param = "structured_outputs"
        if chain.tools is None:
            spec = form
        elif spec is None:
            self._check_strict(request, context)
        if chain.tools is not None and form is not None:
            if enforces(request.tool_choice):
                raise RequestError("A format of the output and an enforced call exclude each other.", param)
            calls = chain.tools.constraint("required")  # the output has the format, or is calls
            spec = form if calls is None else replace(form, form=OneOf((form.form, calls.form)))
        if spec is None:
            return None, param
        if request.beam is not None:
            raise RequestError("A beam search cannot be constrained.", param)
        if chain.reasoning is None:
            return spec, param
        tags = chain.reasoning.thoughts()
        if not context.templated and tags is not None and not tags.inside:
            return spec, param  # only a template, or the end of the prompt, begins thoughts
        return replace(spec, form=chain.reasoning.constrain(spec.form)), param

    def enforces_strict(self) -> bool:
        """Tell whether the tool parser enforces strict functions where the model chooses whether to call."""
        return self._enforces(_STRICT, ChoiceContext(tools=(_STRICT,), tokenizer=self._tokenizer))

    def _context(self, request: Generate, asked: Prompt | ChatPrompt, prompt: Prepared) -> ChoiceContext:
        text, chat = prompt.read.text, asked if isinstance(asked, ChatPrompt) else None
        if text is None and self._tokenizer is not None:
            text = decode(self._tokenizer, prompt.read.ids[-_TAIL:], skip_special_tokens=False)
        continued = chat.messages[-1].get("content") if chat and chat.continue_final_message else None
        return ChoiceContext(
            prompt=text or "",
            prompt_ids=prompt.read.ids,
            continued=continued if isinstance(continued, str) else "",
            tools=request.tools or (),
            tool_choice=request.tool_choice,
            template_kwargs=(chat and chat.chat_template_kwargs) or {},
            parallel_tool_calls=request.parallel_tool_calls,
            templated=chat is not None,
            streamed=request.streamed,
            tokenizer=self._tokenizer,
        )

    def _detokenizer(self, prompt: Prepared, checked: Checked, chain: ParseChain) -> Detokenizer | None:
        """Open a detokenizer that leaves in the text the special tokens that the parsers read."""
        if self._tokenizer is None or not checked.detokenize:
            return None
        return open_detokenizer(
            self._tokenizer,
            prompt.read.ids,
            skip_special_tokens=checked.skip_special_tokens and not chain.wants_special_tokens,
            kept=self._special_ids(self._tokenizer, chain.special_tokens),
            spaces_between_special_tokens=checked.spaces_between_special_tokens,
        )

    def _check_strict(self, request: Generate, context: ChoiceContext) -> None:
        """Raise RequestError that names the function whose calls cannot be enforced, where strict functions are asked
        for.
        """
        tools = request.tools or ()
        if not any((tool.get("function") or {}).get("strict") for tool in tools) or not self.enforces_strict():
            return
        for number, tool in enumerate(tools):
            function = tool.get("function") or {}
            if not function.get("strict"):
                function = {**function, "strict": True, "parameters": {"type": "object"}}
            if not self._enforces({**tool, "function": function}, context):
                raise RequestError(
                    f"The calls of function {function.get('name')!r:.80} cannot be enforced in this model's format, so "
                    "no function of the request can be strict.",
                    f"tools[{number}].function",
                )

    def _enforces(self, tool: dict[str, Any], context: ChoiceContext) -> bool:
        """Tell whether the tool parser has a constraint for calls of one strict function."""
        parsers = Parsers(tools=self.parsers.tools, tools_title=self.parsers.tools_title)
        return ParseChain(parsers, (tool,), replace(context, tool_choice="auto")).constraint is not None


def _form_of(request: Generate) -> GrammarSpec | None:
    """Return the format of the output that the request asks for; offline callers put it into the sampling
    parameters.
    """
    return request.grammar or request.params.grammar
