"""`Service`: the one way from a protocol to the engine. Routers and the offline `LLM` use nothing else.

Every method that takes client data validates it and raises `RequestError` that names the field.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ferrule.config import PromptAdapter
from ferrule.errors import NotFoundError, RequestError, RequestFailed
from ferrule.forms import GrammarSpec
from ferrule.interfaces.parsers import CallArguments, CallStart, Content, Event, Reasoning, join
from ferrule.interfaces.stats import HttpStats
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import FinishReason, Guesses, ModelInfo, RequestTimes, Targets, TokenLogprobs

if TYPE_CHECKING:
    from ferrule.sampling_params import Beam, SamplingParams


class Prompt(Struct, frozen=True, kw_only=True):
    """A prompt: text, ids or embeddings, exactly one of which is set. `add_special_tokens` applies to text.

    With `suffix`, the text stands before the answer and the suffix behind it. `embeds` is a tensor [tokens, hidden] as
    clients send it, base64 of a file: it goes through the one tensor decoder.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    embeds: str | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatPrompt(Struct, frozen=True, kw_only=True):
    """A conversation to render. `messages` are OpenAI message objects, not yet validated."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    documents: tuple[dict[str, Any], ...] | None = None
    chat_template: str | None = None  # of the request: refused unless the server trusts it
    content_format: str | None = None  # auto, string or openai; None: the server's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


class ReadPrompt(Struct, frozen=True):
    """The ids of a prompt, its text if it has one, and notes on the parts of a conversation that the text does not
    show.

    Each embedding of a prompt has the id 0.
    """

    ids: tuple[int, ...]
    text: str | None = None
    notes: tuple[str, ...] = ()
    rendered_at: float = 0.0  # when a conversation was a text, in seconds on the monotonic clock; 0.0: it never was


class Generate(Struct, frozen=True, kw_only=True):
    """One request to generate, of any protocol. There are len(prompts) x params.n choices, prompt-major.

    Choices that are ranked, of a beam search or with best_of > n, come when the last of their prompt has ended.
    """

    prompts: tuple[Prompt | ChatPrompt, ...]
    params: SamplingParams
    model: str | None = None  # one of the served names, or of an adapter; None or "": the first
    prompt_adapter: PromptAdapter | None = None  # given by the caller; those of the server go by `model`
    priority: int = 0
    targets: Targets = Targets()
    cache_salt: str | None = None
    grammar: GrammarSpec | None = None
    logits_processors: tuple[str | dict[str, Any], ...] = ()  # names, or {"qualname", "args", "kwargs"}
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    beam: Beam | None = None  # the params.n best of `width` beams, best first
    raw: bool = False  # True: all text is content as the model wrote it; no parser runs
    thought_tokens: bool = True  # False: outputs have no ids and logprobs of thoughts and of the markup around them
    stop_in_reasoning: bool = False  # True: stop strings end the output within thoughts, too
    streamed: bool = True  # False: the outputs are folded before anybody sees one
    answer_id: str = ""  # the answer's name, as the client sees it: for hooks
    names: Mapping[str, str] = {}  # fields that the protocol spells in another way than this class and its params

    def spelt(self, param: str | None) -> str | None:
        """Return the name that the protocol has for a field."""
        return None if param is None else self.names.get(param, param)


class Usage(Struct, frozen=True, kw_only=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of thoughts and the markup around them; exact with the last output

    @classmethod
    def total(cls, choices: Sequence[Usage], num_prompts: int) -> Usage:
        """Return the sum over a request's choices, prompt-major; a prompt counts once, however many choices it has."""
        firsts = choices[:: max(1, len(choices) // num_prompts)]
        return cls(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in choices),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in choices),
        )


class ToolCall(Struct, frozen=True, gc=False):
    """A call of a tool as the model wrote it."""

    id: str
    name: str
    arguments: str  # JSON text


class Output(Struct, frozen=True, kw_only=True, gc=False):
    """News of one choice. Text comes as events of the parse chain; ids and logprobs are those of the new tokens.

    `finish` is set on a choice's last output. With finish ERROR, `error` is the reason, and `invalid` tells whether the
    request is to blame (400) or the server (500).
    """

    index: int  # choice: prompt index x n + number
    first: bool = False  # whether it is the choice's first output
    events: tuple[Event, ...] = ()
    called_tools: bool = False  # whether the choice has called a tool so far
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_offsets: tuple[int, ...] = ()  # characters of the choice's text before each new token
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # whole, first is None; with the first output
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # stop token id or stop string
    error: str | None = None
    usage: Usage = Usage()  # of this choice so far
    times: RequestTimes | None = None  # with `finish`: of the engine, or as this process has seen it
    guesses: Guesses | None = None  # of next tokens so far, where there were some
    invalid: bool = False
    param: str | None = None  # with `invalid`: the field to blame, as the protocol spells it

    @property
    def text(self) -> str:
        """The content, without thoughts and calls."""
        return "".join(event.text for event in self.events if isinstance(event, Content))

    @property
    def reasoning(self) -> str:
        """The text of thoughts."""
        return "".join(event.text for event in self.events if isinstance(event, Reasoning))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that begin in these events, with the arguments that these events have; whole in an `Answer`."""
        starts = [event for event in self.events if isinstance(event, CallStart)]
        if not starts:
            return ()
        arguments = {start.index: list[str]() for start in starts}
        for event in self.events:
            if isinstance(event, CallArguments) and event.index in arguments:
                arguments[event.index].append(event.fragment)
        return tuple(ToolCall(start.id, start.name, "".join(arguments[start.index])) for start in starts)

    def failure(self) -> RequestError | RequestFailed:
        """Return the exception to raise when `finish` is ERROR."""
        message = self.error or "The request failed."
        return RequestError(message, self.param) if self.invalid else RequestFailed(message)


class Outputs(AsyncIterator[Output], ABC):
    """The outputs of one request, each choice's in order and choices interleaved. Raises EngineDead."""

    @abstractmethod
    async def aclose(self) -> None:
        """Cancel the choices that still run. Idempotent."""


def add_up(outputs: Sequence[Output]) -> Output:
    """Return one output with the meaning of these outputs of one choice, in their order. There is at least one."""
    if len(outputs) == 1:
        return outputs[0]
    prompt_logprobs = next((one.prompt_logprobs for one in outputs if one.prompt_logprobs is not None), None)
    return replace(
        outputs[-1],
        first=any(one.first for one in outputs),
        events=tuple(join(chain.from_iterable(one.events for one in outputs))),
        token_ids=tuple(chain.from_iterable(one.token_ids for one in outputs)),
        logprobs=tuple(chain.from_iterable(one.logprobs for one in outputs)),
        token_offsets=tuple(chain.from_iterable(one.token_offsets for one in outputs)),
        prompt_logprobs=prompt_logprobs,
    )


class Answer(Struct, frozen=True, kw_only=True):
    """The whole answer to a request: each choice as one output, in the order of their index, and the usage of all."""

    choices: tuple[Output, ...]
    usage: Usage


class Admitted(Struct, frozen=True, kw_only=True):
    """A request that was checked, read and submitted to the engine. Whoever admits it reads its outputs or closes
    them.
    """

    model: str  # what answers call the model, whichever of its names was asked for; an adapter's own name
    prompts: tuple[ReadPrompt, ...]  # as they were given to the engine: truncated
    stream: Outputs
    tokens: Tokens | None = None  # by which its ids are shown; None: the service's own

    def outputs(self) -> Outputs:
        """Return the outputs of the request: the same iterator at every call."""
        return self.stream

    async def answer(self) -> Answer:
        """Read all outputs, and return them as one answer.

        Raises RequestError or RequestFailed when a choice has failed, and EngineDead. Choices that still run then, or
        when the caller is cancelled, are cancelled.
        """
        found: dict[int, list[Output]] = {}
        async with aclosing(self.stream) as outputs:
            async for output in outputs:
                if output.finish is FinishReason.ERROR:
                    raise output.failure()
                found.setdefault(output.index, []).append(output)
        if not found:
            raise RequestFailed("The request ended without an output.")
        choices = tuple(add_up(found[index]) for index in sorted(found))
        return Answer(choices=choices, usage=Usage.total([one.usage for one in choices], len(self.prompts)))


class Pool(Struct, frozen=True, kw_only=True):
    """One request for vectors, of any protocol: one vector for each prompt. `normalize` None: the model's default."""

    prompts: tuple[Prompt | ChatPrompt, ...]
    normalize: bool | None = None
    model: str | None = None  # one of the served names, or of an adapter; None or "": the first
    priority: int = 0
    cache_salt: str | None = None


class Pooled(Struct, frozen=True, kw_only=True):
    """The vector of one prompt."""

    vector: tuple[float, ...]
    prompt_ids: tuple[int, ...]
    cached_tokens: int = 0


class Health(Struct, frozen=True, kw_only=True):
    """The state of a server: `state` is one of starting, ready, draining, dead, stalled."""

    state: str
    detail: str = ""


class ServedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that requests may name as their model. `parent` is a name of the base model, `path` a folder.

    Each prompt has `num_virtual` tokens before it, which are those of a prompt adapter.
    """

    name: str
    parent: str
    path: str
    max_model_len: int = 0  # tokens of the longest text; 0: as many as without it
    num_virtual: int = 0


class Tokens(ABC):
    """The conversion of text to ids and back, by the served model's tokenizer."""

    tokenizer: Tokenizer | None  # None with --skip-tokenizer-init

    @abstractmethod
    async def tokenize(self, prompt: Prompt | ChatPrompt) -> list[int]:
        """Return the ids of a prompt, off the event loop, under the limits. Raises RequestError."""

    async def read(self, prompt: Prompt | ChatPrompt) -> ReadPrompt:
        """Read a prompt as `tokenize` does, and return its text and notes, too. Raises RequestError."""
        return ReadPrompt(tuple(await self.tokenize(prompt)))

    @abstractmethod
    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids; an id out of range is a RequestError."""

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """Return the text by which logprobs show a token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; part of a character where its text is U+FFFD."""
        return self.token_text(token_id).encode()

    def text_offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the start of each token of a prompt in its text, in characters. By default each is as long as its own
        text.
        """
        lengths = accumulate((len(self.token_text(token_id)) for token_id in ids), initial=0)
        return [min(offset, len(text)) for offset, _ in zip(lengths, ids, strict=False)]

    @property
    def max_model_len(self) -> int:
        """The most tokens of a text, output included; 0: not known."""
        return 0

    @property
    def vocab_size(self) -> int:
        """The number of ids, from 0 on, that a text may have; 0: not known."""
        return 0


class Administration(ABC):
    """The part of a service that operators and the HTTP server use."""

    @abstractmethod
    def health(self) -> Health:
        """Return the state now, without waiting."""

    @abstractmethod
    async def call(self, name: str, *args: Any) -> Any:
        """Make an administrative call on the engine, such as ``reset_prefix_cache``."""

    def adapters(self) -> Sequence[ServedAdapter]:
        """Return the adapters that are loaded."""
        return ()

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> None:
        """Read and check an adapter, and serve it under this name; with `in_place`, in the place of one of this name.

        Raises RequestError, which names lora_name or lora_path. Nothing has changed then.
        """
        raise RequestError("This server has no adapters.")

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that use it go on. Raises NotFoundError."""
        raise NotFoundError("This server has no adapters.", "lora_name")

    def answered(self, stats: HttpStats) -> None:
        """Count an HTTP call that was answered."""

    def check_room(self, ahead: int = 0) -> None:
        """Raise OverloadedError while the queue is full, or will be with the `ahead` requests in front of this one."""

    def stalled(self, seconds: float) -> None:
        """Count a stall of the event loop."""

    def report(self) -> None:
        """Report the newest figures of the engine to the stat loggers now, which otherwise happens once a second."""

    @abstractmethod
    def exposition(self) -> tuple[str, str]:
        """Return (media type, text) of the metrics."""


class Service(Tokens, Administration):
    """A service of generation and vectors, with the two other roles. Code that needs one role can use that type in its
    hints.
    """

    model: ModelInfo
    names: tuple[str, ...]  # served model names; responses carry the first
    template_reads: frozenset[str] | None = None  # variables that the server's chat template uses; None: not known
    template_keys: frozenset[str] | None = None  # names that it looks up in messages and other values; None: not known

    @property
    def max_model_len(self) -> int:
        return self.model.own_len or self.model.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    async def tokens(self, model: str | None) -> Tokens:
        """Return the conversion for the name `model` in a request: an adapter may have tokens and limits of its own.
        Raises what `resolve` raises.
        """
        return self

    def enforces_strict_tools(self) -> bool:
        """Return whether calls that the model chooses to make fit the schemas of strict functions."""
        return False

    @abstractmethod
    async def resolve(self, model: str | None) -> str:
        """Return the served name, or that of an adapter, for the name `model` in a request. An adapter that is not
        loaded is looked for.

        Raises NotFoundError that lists the valid names, RequestError for an adapter that cannot be loaded.
        """

    @abstractmethod
    def sampling_defaults(self) -> dict[str, Any]:
        """Return the default sampling values of the model's generation config, by field name of `SamplingParams`."""

    @abstractmethod
    async def admit(self, request: Generate) -> Admitted:
        """Check a request, read its prompts, and submit it to the engine.

        Raises RequestError, which names fields as the protocol does, or UnavailableError. Nothing was generated then.
        """

    @abstractmethod
    async def pool(self, request: Pool) -> list[Pooled]:
        """Return the vectors of the prompts, in their order.

        Raises RequestError, also where the model has none, UnavailableError, RequestFailed and EngineDead. A cancelled
        call cancels the prompts that still run.
        """
