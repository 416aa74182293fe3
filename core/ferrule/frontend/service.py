"""The `Service`: validate → render → tokenize → engine → detokenize → stop → parse; the one way to the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ferrule import log
from ferrule.api_keys import BACKGROUND, CALLER
from ferrule.assembly.vocabulary import format_tokens, read_vocabulary, special_ids
from ferrule.client.base import EngineClient
from ferrule.config import FrontendConfig, LimitsConfig, Resolved
from ferrule.errors import ConfigError, EngineDead, FerruleError, RequestError, UnavailableError
from ferrule.frontend.adapters.registry import Adapters
from ferrule.frontend.adapters.tokenizers import adapter_tokenizer
from ferrule.frontend.admission.admit import Prepared, PromptReader, check_request, read_rules
from ferrule.frontend.admission.ledger import Account, Ledger, Reservation
from ferrule.frontend.admission.prompt_adapters import open_prompt_adapters
from ferrule.frontend.admission.validate import AdmissionRules, Checked, Seeds, check_prompt_cells, check_task, scoped
from ferrule.frontend.guided.compiler import GrammarCompiler
from ferrule.frontend.inputs import Inputs, open_inputs
from ferrule.frontend.model_tokens import AllTokens, ModelTokens
from ferrule.frontend.output.beam import BestOf, search_beams
from ferrule.frontend.output.choice import Choice, OutputStream
from ferrule.frontend.output.reading import OutputReading
from ferrule.frontend.stat_loggers import Loggers, open_loggers
from ferrule.frontend.template_fit import warn_of_misfit
from ferrule.frontend.text.render import Encoder, Renderer
from ferrule.frontend.vectors import Vectors
from ferrule.hooks import HEADERS, HookRunner, open_hooks
from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule.interfaces.hooks import Arrival
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import Admitted, ChatPrompt, Generate, Outputs, Prompt, ReadPrompt, Tokens
from ferrule.interfaces.tokenizer import ChatTokenizer, Tokenizer
from ferrule.types import Adapter, EngineRequest

_LATER = 100  # added to the priority of a request that the server sends itself
_TURN = 16  # prompts that may be prepared before others get a turn of the event loop
_logger = log.get("frontend")


class Planned(Struct, frozen=True):
    """The plan for one prompt: how its answers are read, and the engine's request for each of them, without id and
    seed.
    """

    prompt: Prepared
    reading: OutputReading
    request: EngineRequest


class FrontendService(Vectors):
    """A service of one API process, made by `build_service`. One event loop owns it; `close` ends its children, threads
    and tasks.
    """

    def __init__(
        self,
        config: Resolved,
        client: EngineClient,
        tokens: AllTokens,
        compiler: GrammarCompiler,
        loggers: Loggers,
        adapters: Adapters,
    ) -> None:
        self.model = client.info
        self.tokenizer = tokens.reader.tokenizer
        self.names = config.model.served_model_name
        self._config = config
        self._client = client
        self._adapters = adapters
        self._tokens = tokens
        self._compiler = compiler
        self._clock: Callable[[], float] = time.monotonic
        self._seeds = Seeds(config.model.seed)
        self.ledger = Ledger(config.limits, loggers, self._clock, client.board)
        self.ledger.logs_requests = not config.frontend.disable_log_requests
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---------------------------------------------------------------------------------------- the protocol's side

    def enforces_strict_tools(self) -> bool:
        return self._tokens.own.output.enforces_strict()

    async def resolve(self, model: str | None) -> str:
        served = await self._adapters.find(model)
        return served.name if served is not None else model or self.names[0]

    def sampling_defaults(self) -> dict[str, Any]:
        return dict(self._tokens.reader.rules.defaults)

    async def tokenize(self, prompt: Prompt | ChatPrompt) -> list[int]:
        return await self._tokens.own.tokenize(prompt)

    async def read(self, prompt: Prompt | ChatPrompt) -> ReadPrompt:
        return await self._tokens.own.read(prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._tokens.own.detokenize(ids)

    def token_text(self, token_id: int) -> str:
        return self._tokens.own.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens.own.token_bytes(token_id)

    def text_offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return self._tokens.own.text_offsets(ids, text)

    async def tokens(self, model: str | None) -> Tokens:
        return await self._tokens.of(await self._adapters.find(model))

    async def admit(self, request: Generate) -> Admitted:
        arrival = self._clock()
        try:
            with self._telling_refusals(request.model or self.names[0], arrival):
                return await self._admit(request, arrival)
        except RequestError as error:
            raise error.about(request.spelt(error.param)) from error

    # ---------------------------------------------------------------------------------------- the server's side

    @property
    def child_pids(self) -> frozenset[int]:
        return self._tokens.reader.renderer.pids | self._compiler.pids

    def start(self) -> None:
        """Start to report the engine's figures once a second, and start a child for templates. Call it once, on the
        loop.
        """
        for work in (self._report(), self._warm()):
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def use(self, reader: PromptReader) -> None:
        """Use another tokenizer for prompts and outputs from now on. Raises RequestError while requests run."""
        if self.ledger.open:
            raise RequestError(f"{self.ledger.open} requests are running: wait for their end.")
        former, self._tokens = self._tokens.reader, self._tokens.use(reader)
        self.tokenizer = reader.tokenizer
        await former.close()

    def take_limits(self, limits: LimitsConfig) -> None:
        """Apply other limits to the requests from now on."""
        self._config = dataclasses.replace(self._config, limits=limits)
        self.ledger.limits = limits
        self._tokens.take_limits(limits)

    async def close(self) -> None:
        """End children, threads and tasks. The caller closes the client."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._adapters.close()
        await self._compiler.close()
        await self._tokens.reader.close()

    async def _report(self) -> None:
        while True:
            stats = self._client.stats()
            self.ledger.engine(stats)
            if self.ledger.board.leads:
                self.ledger.loggers.hooks.step_stats(stats, 0)
            await asyncio.sleep(1.0)

    async def _warm(self) -> None:
        try:
            report = await self._tokens.reader.renderer.inspect()
        except FerruleError as error:
            _logger.warning("the chat template cannot be used: %s", error)
            return
        if report:
            self.template_reads, self.template_keys = frozenset(report["reads"]), frozenset(report["keys"])
            _logger.info("chat template", content_format=report["content"])
        elif isinstance(self.tokenizer, ChatTokenizer):
            self.template_reads = self.tokenizer.reads
        if self.ledger.board.leads:
            await warn_of_misfit(self._config.frontend, self._tokens.reader, self._tokens.own.output.parsers)

    # ---------------------------------------------------------------------------------------- admission

    async def _admit(self, request: Generate, arrival: float) -> Admitted:
        served = await self._adapters.find(request.model)
        adapter, virtual = (None, None) if served is None else (served.adapter, served.prompt)
        tokens = await self._tokens.of(served)
        self._check_available()
        check_task("generate", self.model)
        checked = await check_request(request, tokens.reader.rules, self._client.remote)
        checked = await tokens.reader.with_adapter(checked, request.prompt_adapter or virtual)
        with self.ledger.reserve(len(request.prompts) * checked.width) as reservation:
            if checked.bad_words:
                checked = await tokens.reader.with_bad_words(checked)
            read_from = self._clock()
            prompts = await self._read(request, checked, reservation, tokens.reader)
            read = self._clock()
            pairs = zip(request.prompts, prompts, strict=True)
            plans = [await self._plan(request, checked, *pair, arrival, tokens) for pair in pairs]
            self._check_available()
            submitted = self._clock()
            requests, outputs = self._submit(request, checked, plans, reservation, adapter)
            told = Arrival(
                at=arrival,
                headers=HEADERS.get(),
                answer_id=request.answer_id,
                chat=isinstance(request.prompts[0], ChatPrompt),
                constrained=plans[0].request.grammar is not None,
                num_prompts=len(prompts),
                num_choices=len(requests),
                read_from=read_from,
                rendered=prompts[-1].read.rendered_at,
                read=read,
                submitted=submitted,
            )
            model = request.model or self.names[0]
            for one in requests:
                length = len(one.prompt_ids) - checked.num_virtual
                self.ledger.loggers.hooks.request_admitted(one.id, model, length, request.params, told)
        title = self.names[0] if served is None else served.name
        return Admitted(model=title, prompts=tuple(prompt.read for prompt in prompts), stream=outputs, tokens=tokens)

    async def _read(
        self, request: Generate, checked: Checked, reservation: Reservation, reader: PromptReader
    ) -> list[Prepared]:
        """Render and tokenize the prompts, and reserve their room in the queue."""
        prompts: list[Prepared] = []
        num_tokens = 0
        for number, prompt in enumerate(request.prompts, 1):
            if number % _TURN == 0:
                await asyncio.sleep(0)
            prompts.append(await reader.prepare(prompt, checked))
            num_tokens += len(prompts[-1].read.ids)
            if checked.base.prompt_logprobs is not None:
                check_prompt_cells(num_tokens, checked, self._config.limits)
            reservation.add_tokens(prompts[-1].weight * checked.width)
        return prompts

    async def _plan(
        self,
        request: Generate,
        checked: Checked,
        asked: Prompt | ChatPrompt,
        prompt: Prepared,
        arrival: float,
        tokens: ModelTokens,
    ) -> Planned:
        """Decide the engine's request and how its answers are read. `asked` is the prompt as the client sent it."""
        reading, caller = tokens.output.reading(request, asked, prompt, checked), CALLER.get()
        sampling, grammar = replace(prompt.sampling, thoughts=reading.thoughts), None
        if reading.constraint is not None:  # such an output ends where its form does, with ignore_eos too
            grammar = await self._compiler.compile(reading.constraint, reading.param)
            ends = (*sampling.stop_token_ids, *tokens.reader.rules.eos_ids)
            sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys(ends)))
        engine_request = EngineRequest(
            id="",
            prompt_ids=prompt.ids,
            media=prompt.media,
            work=sampling,
            grammar=grammar,
            arrival=arrival,
            priority=checked.priority + _LATER * BACKGROUND.get(),
            cache_salt=scoped(checked.cache_salt, caller, self._config.cache.cache_scope),
            targets=request.targets,
            key_name="" if caller is None else caller.name,
        )
        return Planned(prompt, reading, engine_request)

    def _submit(
        self,
        request: Generate,
        checked: Checked,
        plans: Sequence[Planned],
        reservation: Reservation,
        adapter: Adapter | None,
    ) -> tuple[Sequence[EngineRequest], Outputs]:
        """Hand the choices to the engine. Return them, and their outputs."""
        requests, choices = list[EngineRequest](), list[Choice]()
        for plan in plans:
            group: list[Account] = []
            blamed = None if plan.reading.constraint is None else request.spelt(plan.reading.param)
            for number, seed in enumerate(self._seeds.draw(checked)):
                sampling = replace(plan.request.work, seed=seed)
                one = replace(plan.request, id=secrets.token_hex(16), work=sampling, adapter=adapter)
                account = Account(
                    arrival=one.arrival,
                    prompt=len(one.prompt_ids) - checked.num_virtual,
                    max_tokens=sampling.max_tokens,
                    n=checked.n,
                    weight=plan.prompt.weight,
                    id=one.id,
                    streamed=request.streamed,
                    caller=CALLER.get(),
                    group=group,
                    num_virtual=checked.num_virtual,
                )
                requests.append(one)
                group.append(account)
                choices.append(Choice(len(choices), number, account, plan.reading, blamed))
        try:
            if request.beam is None:
                patient = not request.streamed and checked.stops is None  # only the whole answer is used
                streams, cancel = [self._client.generate(one, patient) for one in requests], self._client.cancel
            else:
                readings = [plan.reading for plan in plans]
                streams, cancel = search_beams(self._client, request.beam, requests, readings, self._tasks)
        except EngineDead:
            raise UnavailableError("The engine is not running.") from None
        for choice in choices:
            reservation.turn(choice.account)
        if not self._config.frontend.disable_log_requests:
            _log_requests(self._config.frontend, plans, requests[:: checked.best_of], checked.best_of)
        outputs = OutputStream(cancel, self.ledger, choices, streams, self._tasks)
        return requests, BestOf(outputs, checked) if checked.best_of > checked.n else outputs


def build_service(
    config: Resolved,
    plugins: Plugins,
    client: EngineClient,
    folder: Path | None = None,
    hooks: HookRunner | None = None,
    inputs: Inputs | None = None,
) -> FrontendService:
    """Return the service for a client that is ready.

    `folder` is the model's, by default ``config.model.model``. `hooks` and `inputs` are those of this process, and by
    default are opened here. Call it on the event loop that owns the client; `start` and `close` of the service begin
    and end its work. Raises StartupError.
    """
    folder = folder or Path(config.model.model)
    inputs = inputs or open_inputs(config, plugins)
    reader = open_reader(config, plugins, client, inputs, folder)
    hooks = hooks or open_hooks(plugins, config)
    hooks.register_metrics()
    loggers = Loggers(open_loggers(config, plugins, client), hooks, config.observability.disable_log_stats)
    written, tokenizer = format_tokens(config, plugins), inputs.tokenizer
    vocabulary = None if tokenizer is None else partial(_vocabulary, tokenizer, reader.rules, written)
    compiler = GrammarCompiler(plugins, config.decoding, vocabulary, client.expect)
    open_added = partial(adapter_tokenizer, config, plugins, client.info.vocab_size)
    tokens = AllTokens(reader, inputs.parsers, client.info.own_len, open_added, config.lora.max_cpu_loras)
    adapters = Adapters(config, plugins, client, tokens.of)
    _check_first(adapters, tokens)
    return FrontendService(config, client, tokens, compiler, loggers, adapters)


def _check_first(adapters: Adapters, tokens: AllTokens) -> None:
    """Open the tokenizers of the adapters that are served from the start. Raises ConfigError."""
    for served in adapters.all():
        try:
            tokens.check(served)
        except RequestError as error:
            raise ConfigError(f"--lora-modules: {error.message}") from None


def open_reader(config: Resolved, plugins: Plugins, client: EngineClient, inputs: Inputs, folder: Path) -> PromptReader:
    """Return a reader of prompts with the tokenizer and the templates of `inputs`. Raises StartupError."""
    tokenizer = inputs.tokenizer
    rules = read_rules(config, plugins, client, tokenizer, folder)
    specials = tokenizer.special_tokens if tokenizer else {}
    renderer = Renderer(config.frontend, config.limits, inputs.templates, specials, rules.max_model_len)
    adapters = open_prompt_adapters(config.prompt_adapter, client.info)
    return PromptReader(rules, Encoder(tokenizer) if tokenizer is not None else None, renderer, adapters)


def _log_requests(
    front: FrontendConfig, plans: Sequence[Planned], firsts: Sequence[EngineRequest], num_choices: int
) -> None:
    """Log one line for each prompt, with at most --max-log-len characters or ids of it, or none."""
    for plan, one in zip(plans, firsts, strict=True):
        ids, text = plan.prompt.read.ids, plan.prompt.read.text
        told: dict[str, Any] = {"key": one.key_name} if one.key_name else {}
        told |= {} if one.adapter is None else {"adapter": one.adapter.title}
        if front.enable_log_requests and front.max_log_len != 0:
            told["prompt"] = (ids if text is None else text)[: front.max_log_len]
        length, most = len(ids), one.work.max_tokens
        _logger.info("request", id=one.id, n=num_choices, prompt_tokens=length, max_tokens=most, **told)


def _vocabulary(tokenizer: Tokenizer, rules: AdmissionRules, written: tuple[str, ...]) -> Vocabulary:
    return read_vocabulary(tokenizer, rules.vocab_size, rules.eos_ids, special_ids(tokenizer, written))
