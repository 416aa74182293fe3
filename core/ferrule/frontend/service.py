"""The `Service`: validate → render → tokenize → engine → detokenize → stop → parse; the one way to the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ferrule import log
from ferrule.assembly.vocabulary import format_tokens, read_vocabulary, special_ids
from ferrule.callers import CALLER, Visit
from ferrule.client.base import EngineClient
from ferrule.config import LimitsConfig, Resolved
from ferrule.errors import EngineDead, FerruleError, NotFoundError, RequestError, UnavailableError
from ferrule.frontend.admission.admit import Prepared, PromptReader, read_rules
from ferrule.frontend.admission.ledger import Account, Ledger, Loggers, Reservation
from ferrule.frontend.admission.processors import Processors, check_functions, check_processors
from ferrule.frontend.admission.validate import (
    Checked,
    Rules,
    Seeds,
    check_beam,
    check_count,
    check_output_cells,
    check_params,
    check_priority,
    check_prompt_cells,
    check_salt,
    check_task,
    scoped,
    wrap_seed,
)
from ferrule.frontend.guided.compiler import GrammarCompiler
from ferrule.frontend.guided.constraint import Constraints, Parsers, constraint_param, enforces_strict
from ferrule.frontend.inputs import Inputs, open_inputs
from ferrule.frontend.output.answer_tokens import AnswerTokens
from ferrule.frontend.output.beam import BestOf, search_beams
from ferrule.frontend.output.choice import Choice, OutputStream
from ferrule.frontend.output.parse import ParseChain, choice_context, open_chain
from ferrule.frontend.output.stops import StopMatcher
from ferrule.frontend.stat_loggers import open_loggers
from ferrule.frontend.template_fit import warn_of_misfit
from ferrule.frontend.text.detokenize import Detokenizer, offsets, open_detokenizer
from ferrule.frontend.text.render import Renderer
from ferrule.frontend.text.tokenize import Encoder
from ferrule.frontend.vectors import Vectors
from ferrule.hooks import HookRunner, open_hooks
from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule.interfaces.parsers import ChoiceContext
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import ChatPrompt, Generate, Output, Prompt, ReadPrompt
from ferrule.interfaces.tokenizer import ChatTokenizer, Tokenizer
from ferrule.types import EngineRequest

_TURN = 16  # prompts that may be prepared before others get a turn of the event loop
_logger = log.get("frontend")


class FrontendService(Vectors):
    """Built by `build_service`. One event loop owns it; `close` ends its children, threads and tasks."""

    def __init__(
        self,
        config: Resolved,
        client: EngineClient,
        reader: PromptReader,
        parsers: Parsers,
        compiler: GrammarCompiler,
        loggers: Loggers,
    ) -> None:
        self.model = client.info
        self.tokenizer = reader.tokenizer
        self._special_ids = lru_cache(maxsize=8)(special_ids)
        self.names = config.model.served_model_name
        self._config = config
        self._client = client
        self._reader = reader
        self._compiler = compiler
        self._constraints = Constraints(parsers, compiler)
        self._clock: Callable[[], float] = time.monotonic
        self._seeds = Seeds(config.model.seed)
        self.ledger = Ledger(config.limits, loggers, self._clock, client.board)
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---------------------------------------------------------------------------------------- the protocol's side

    def enforces_strict_tools(self) -> bool:
        return enforces_strict(self._constraints.parsers.tools, self.tokenizer)

    def resolve(self, model: str | None) -> str:
        if not model or model in self.names:
            return model or self.names[0]
        raise NotFoundError(f"The model {model!r:.120} does not exist. Valid names: {', '.join(self.names)}.", "model")

    def sampling_defaults(self) -> dict[str, Any]:
        return dict(self._reader.rules.defaults)

    async def tokenize(self, prompt: Prompt | ChatPrompt) -> list[int]:
        return list((await self.read(prompt)).ids)

    async def read(self, prompt: Prompt | ChatPrompt) -> ReadPrompt:
        return await self._reader.read(prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._reader.detokenize(ids)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if self.tokenizer is None:
            return f"token_id:{token_id}".encode()
        piece = self.tokenizer.piece(token_id, False)
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode() if piece is None else piece

    def text_offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return [0] * len(ids) if self.tokenizer is None else offsets(self.tokenizer, ids, text)

    async def generate(self, request: Generate) -> AsyncIterator[Output]:
        arrival = self._clock()
        self._check_available()
        check_task("generate", self.model)
        self.resolve(request.model)
        checked = check_params(request.params, self._reader.rules)
        priority, salt = check_priority(request.priority), check_salt(request.cache_salt)
        processors = await _processors(request, self._reader.rules, self._client.remote)
        count = checked.best_of
        if request.beam is not None:
            checked, count = check_beam(request.beam, request, checked, self._reader.rules), request.beam.width
            if checked.stops is not None and self._constraints.parsers.reasoning and not request.raw:
                _check_beam_stops(request)
        limits, num_tokens = self._config.limits, 0
        check_count(len(request.prompts), count, limits.max_prompts)
        check_output_cells(len(request.prompts), count, checked, self._reader.rules, request.streamed)
        with self.ledger.reserve(len(request.prompts) * count) as reservation:
            words = await self._reader.bad_words(checked.bad_words)
            prompts = []
            for number, prompt in enumerate(request.prompts, 1):
                if number % _TURN == 0:
                    await asyncio.sleep(0)
                prompts.append(await self._reader.prepare(prompt, checked))
                num_tokens += len(prompts[-1].ids)
                check_prompt_cells(num_tokens, count, checked, limits)
                reservation.add_tokens(prompts[-1].weight * count)
            read = [
                (prompt, choice_context(request, asked, prompt, self.tokenizer))
                for asked, prompt in zip(request.prompts, prompts, strict=True)
            ]
            rules = self._reader.rules
            enforced = [await self._constraints.enforce(request, rules, *one) for one in read]
            self._check_available()
            caller = CALLER.get()
            salt = scoped(salt, caller, self._config.cache.cache_scope)
            shared: dict[str, Any] = {"key_name": "" if caller is None else caller.name}
            shared |= {"arrival": arrival, "priority": priority, "cache_salt": salt, "targets": request.targets}
            requests = []
            for prepared, (sampling, grammar) in zip(prompts, enforced, strict=True):
                sampling = replace(sampling, bad_words=words, processors=processors)
                seeded = [replace(sampling, seed=seed) for seed in _draw_seeds(self._seeds, checked)]
                requests += [_engine_request(prepared, work=one, grammar=grammar, **shared) for one in seeded]
            return self._submit(request, checked, read, requests, reservation)

    # ---------------------------------------------------------------------------------------- the server's side

    @property
    def child_pids(self) -> frozenset[int]:
        return self._reader.renderer.pids | self._compiler.pids

    def start(self) -> None:
        """Begin to report the engine's figures once a second, and start a child for templates. Once, on the loop."""
        for work in (self._report(), self._warm()):
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def use(self, reader: PromptReader) -> None:
        """Read prompts, and show tokens, by another tokenizer from now on. Raises RequestError while requests run."""
        if self.ledger.open:
            raise RequestError(f"{self.ledger.open} requests are running: wait for their end.")
        former, self._reader = self._reader, reader
        self.tokenizer = reader.tokenizer
        self._special_ids.cache_clear()
        await former.close()

    def take_limits(self, limits: LimitsConfig) -> None:
        """Other limits, for the requests from now on."""
        self._config = dataclasses.replace(self._config, limits=limits)
        self.ledger.limits = limits
        self._reader.rules = replace(self._reader.rules, limits=limits)

    async def close(self) -> None:
        """End children, threads and tasks. The client is the caller's to close."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._compiler.close()
        await self._reader.close()

    async def _report(self) -> None:
        while True:
            stats = self._client.stats()
            self.ledger.engine(stats)
            if self.ledger.board.leads:
                self.ledger.loggers.hooks.step_stats(stats, 0)
            await asyncio.sleep(1.0)

    async def _warm(self) -> None:
        try:
            report = await self._reader.renderer.inspect()
        except FerruleError as error:
            _logger.warning("the chat template cannot be used: %s", error)
            return
        if report:
            self.template_reads, self.template_keys = frozenset(report["reads"]), frozenset(report["keys"])
            _logger.info("chat template", content_format=report["content"])
        elif isinstance(self.tokenizer, ChatTokenizer):
            self.template_reads = self.tokenizer.reads
        if self.ledger.board.leads:
            await warn_of_misfit(self._config.frontend, self._reader, self._constraints.parsers)

    # ---------------------------------------------------------------------------------------- admission

    def _submit(
        self,
        request: Generate,
        checked: Checked,
        read: Sequence[tuple[Prepared, ChoiceContext]],
        requests: Sequence[EngineRequest],
        reservation: Reservation,
    ) -> AsyncIterator[Output]:
        choices: list[Choice] = []
        try:
            for index, one in enumerate(requests):
                choices.append(self._choice(request, checked, read[index // checked.best_of], one, index, reservation))
                choices[-1].account.streamed = request.streamed
            for first in range(0, len(choices), checked.best_of):
                group = [choice.account for choice in choices[first : first + checked.best_of]]
                for account in group:
                    account.group = group
            if request.beam is None:
                patient = not request.streamed and checked.stops is None  # only the whole answer is used
                streams, cancel = [self._client.generate(one, patient) for one in requests], self._client.cancel
            else:
                streams, cancel = search_beams(self._client, request.beam, choices, checked.n, self._tasks)
        except BaseException as error:
            for choice in choices:
                self.ledger.drop(choice.account)
            if isinstance(error, EngineDead):
                raise UnavailableError("The engine is not running.") from None
            raise
        model, caller = self.resolve(request.model), CALLER.get()
        for one, choice in zip(requests, choices, strict=True):
            choice.account.id = one.id
            self.ledger.loggers.hooks.request_admitted(one.id, model, len(one.prompt_ids), request.params)
        if not self._config.frontend.disable_log_requests:
            prompts = [prompt for prompt, _ in read]
            front = self._config.frontend
            _log_requests(
                requests, prompts, checked.best_of, front.max_log_len if front.enable_log_requests else 0, caller
            )
        outputs = OutputStream(cancel, self.ledger, choices, streams, self._tasks)
        return BestOf(outputs, checked) if checked.best_of > checked.n else outputs

    def _choice(
        self,
        request: Generate,
        checked: Checked,
        read: tuple[Prepared, ChoiceContext],
        engine_request: EngineRequest,
        index: int,
        reservation: Reservation,
    ) -> Choice:
        prompt, context = read
        parse = open_chain(self._constraints.parsers, request, context)
        detokenizer = None
        if checked.detokenize and self.tokenizer is not None:
            kept = self._special_ids(self.tokenizer, parse.special_tokens)
            detokenizer = _detokenizer(self.tokenizer, prompt.ids, checked, parse, kept)
        stops = StopMatcher(checked.stops, checked.include_stop) if checked.stops is not None else None
        parted = parse.parts_thoughts and detokenizer is not None
        if parted and not request.stop_in_reasoning:
            parse.stops, stops = stops, None
        account = Account(engine_request.arrival, len(prompt.ids), prompt.sampling.max_tokens, checked.n, prompt.weight)
        account.caller = CALLER.get()
        reservation.turn(account)
        choice = Choice(index, engine_request, account, parse, detokenizer, stops)
        choice.constraint = constraint_param(request) if engine_request.grammar is not None else None
        choice.prompt_text, choice.prompt_notes = prompt.text, prompt.notes
        choice.named_stop_ids = checked.named_stop_ids
        choice.show_stop_token = checked.include_stop
        choice.answer_tokens = AnswerTokens() if parted else None
        choice.hides_thoughts = not request.thought_tokens
        return choice


def build_service(
    config: Resolved,
    plugins: Plugins,
    client: EngineClient,
    folder: Path | None = None,
    hooks: HookRunner | None = None,
    inputs: Inputs | None = None,
) -> FrontendService:
    """The service of a client that is ready. `folder` is the model's; by default what ``config.model.model`` names.
    `hooks` and `inputs` are those of this process; by default they are opened here.

    Raises StartupError. To be called on the event loop that owns the client; `start` and `close` frame the life of what
    it returns.
    """
    folder = folder or Path(config.model.model)
    inputs = inputs or open_inputs(config, plugins)
    reader = open_reader(config, plugins, client, inputs, folder)
    hooks = hooks or open_hooks(plugins)
    hooks.register_metrics()
    loggers = Loggers(open_loggers(config, plugins, client), hooks, config.observability.disable_log_stats)
    written, tokenizer = format_tokens(config, plugins), inputs.tokenizer
    vocabulary = None if tokenizer is None else partial(_vocabulary, tokenizer, reader.rules, written)
    compiler = GrammarCompiler(plugins, config.decoding, vocabulary, client.expect)
    return FrontendService(config, client, reader, inputs.parsers, compiler, loggers)


def open_reader(config: Resolved, plugins: Plugins, client: EngineClient, inputs: Inputs, folder: Path) -> PromptReader:
    """What reads prompts with the tokenizer and the templates of `inputs`. Raises StartupError."""
    tokenizer = inputs.tokenizer
    rules = read_rules(config, plugins, client, tokenizer, folder)
    specials = tokenizer.special_tokens if tokenizer else {}
    renderer = Renderer(config.frontend, config.limits, inputs.templates, specials, rules.max_model_len)
    return PromptReader(rules, Encoder(tokenizer) if tokenizer is not None else None, renderer)


async def _processors(request: Generate, rules: Rules, remote: bool) -> Processors:
    """On a thread, where modules that the client names have to be imported."""
    found = check_functions(request.params.logits_processors or (), rules, remote)
    if request.logits_processors:
        found += await asyncio.to_thread(check_processors, request.logits_processors, rules)
    return found


def _engine_request(prompt: Prepared, **fields: Any) -> EngineRequest:
    return EngineRequest(
        id=secrets.token_hex(16), prompt_ids=prompt.ids, embeds=prompt.embeds, media_hash=prompt.digest, **fields
    )


def _check_beam_stops(request: Generate) -> None:
    """A beam is watched for stop strings before anybody knows which of its text is thoughts. Raises RequestError."""
    if not request.stop_in_reasoning:
        raise RequestError(
            "stop needs stop_in_reasoning to be true in a beam search: stop strings are looked for in thoughts too.",
            "stop",
        )


def _detokenizer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], checked: Checked, parse: ParseChain, kept: frozenset[int]
) -> Detokenizer:
    """`kept`: special tokens that a parser reads, which stay in the text."""
    return open_detokenizer(
        tokenizer,
        prompt_ids,
        skip_special_tokens=checked.skip_special_tokens and not parse.wants_special_tokens,
        kept=kept,
        spaces_between_special_tokens=checked.spaces_between_special_tokens,
    )


def _draw_seeds(seeds: Seeds, checked: Checked) -> list[int]:
    seed = seeds.draw() if checked.seed is None else checked.seed
    return [wrap_seed(seed, number) for number in range(checked.best_of)]


def _vocabulary(tokenizer: Tokenizer, rules: Rules, written: tuple[str, ...]) -> Vocabulary:
    return read_vocabulary(tokenizer, rules.vocab_size, rules.eos_ids, special_ids(tokenizer, written))


def _log_requests(
    requests: Sequence[EngineRequest],
    prompts: Sequence[Prepared],
    num_choices: int,
    max_length: int | None,
    caller: Visit | None,
) -> None:
    """One line for each prompt, of which at most `max_length` characters or ids are shown; 0: its length alone."""
    named = {"key": caller.name} if caller else {}
    for number, prompt in enumerate(prompts):
        request = requests[number * num_choices]
        shown = prompt.ids[:max_length] if prompt.text is None else prompt.text[:max_length]
        told = {"prompt": shown} if max_length != 0 else {}
        _logger.info(
            "request",
            id=request.id,
            **named,
            n=num_choices,
            prompt_tokens=len(prompt.ids),
            max_tokens=prompt.sampling.max_tokens,
            **told,
        )
