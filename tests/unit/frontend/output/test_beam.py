"""Beam search against transformers, on one tiny model; and best_of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.errors import EngineDead, RequestError
from ferrule.interfaces.sampler import LogitsProcessor
from ferrule.interfaces.service import Generate, Output, Prompt
from ferrule.sampling_params import Beam, SamplingParams
from ferrule.types import EngineRequest, FinishReason, RequestDelta, TokenLogprobs
from ferrule_testkit.checkpoints import tiny_model
from tests.fakes.engine import FakeEngine, echo, fake_info
from tests.fakes.frontend import FakePlugins, answers, drained, model_folder, serving, until

VOCAB = 300
STOPS = list(range(40, 75))
PROMPT = (5, 100, 60, 200, 31)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


@lru_cache(maxsize=1)
def model() -> Any:
    torch.manual_seed(0)
    return tiny_model("llama")


@cache
def next_logprobs(ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return model()(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)


def run_model(request: EngineRequest) -> Iterator[RequestDelta]:
    """Yield one token of the tiny model, as the engine does for a beam's step."""
    values, ids = next_logprobs(request.prompt_ids).topk(request.work.logprobs or 1)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    prompt = tuple(TokenLogprobs(token, -1.0, 1) for token in request.prompt_ids[1:])
    yield RequestDelta(
        id=request.id,
        token_ids=(top[0][0],),
        logprobs=(TokenLogprobs(*top[0], 1, top),),
        prompt_logprobs=prompt if request.work.prompt_logprobs is not None else (),
        finish=FinishReason.LENGTH,
        cached=0 if len(request.prompt_ids) == len(PROMPT) else 4,
    )


def engine() -> FakeEngine:
    return FakeEngine(run_model, fake_info(vocab_size=VOCAB))


def ask(beam: Beam, count: int = 1, **params: Any) -> Generate:
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "stop_token_ids": STOPS}
    return Generate(prompts=(Prompt(ids=PROMPT),) * count, params=SamplingParams(**{**values, **params}), beam=beam)


def score(answer: Output, penalty: float) -> float:
    return sum(entry.logprob for entry in answer.logprobs) / len(answer.token_ids) ** penalty


@pytest.mark.parametrize("stops", [STOPS, []])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("width", [2, 5])
async def test_the_beams_are_those_of_transformers(
    folder: Path, width: int, penalty: float, early: bool, stops: list[int]
) -> None:
    theirs = model().generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=12,
        length_penalty=penalty,
        early_stopping=early,
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=299,
        return_dict_in_generate=True,
        output_scores=True,
    )
    async with serving(folder, engine()) as service:
        beam = Beam(width=width, length_penalty=penalty, early_stopping=early)
        ours = await answers(service, ask(beam, n=width, logprobs=0, stop_token_ids=stops))
    expected = [tuple(row[len(PROMPT) :]) for row in theirs.sequences.tolist()]
    assert [answer.token_ids + (299,) * (len(expected[0]) - len(answer.token_ids)) for answer in ours] == expected
    assert [score(answer, penalty) for answer in ours] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
    assert all((answer.token_ids[-1] in stops) == (answer.finish is FinishReason.STOP) for answer in ours)


# ------------------------------------------------------------------------------------------- around the search


async def test_a_step_is_a_request_for_each_beam(folder: Path) -> None:
    runs = engine()
    async with serving(folder, runs) as service:
        (answer,) = await answers(service, ask(Beam(width=3), max_tokens=4, stop_token_ids=[], seed=5))
    assert (answer.index, len(answer.token_ids), answer.finish, answer.logprobs) == (0, 4, FinishReason.LENGTH, ())
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (5, 4, 0)
    assert [len(request.prompt_ids) for request in runs.requests] == [5, 6, 6, 6, 7, 7, 7, 8, 8, 8]
    assert all(request.prompt_ids[:5] == PROMPT for request in runs.requests)
    assert {(r.work.max_tokens, r.work.temperature, r.work.logprobs) for r in runs.requests} == {(1, 0.0, 3)}
    assert len({request.id for request in runs.requests}) == 10
    assert runs.cancels == []


async def test_logprobs_are_shown_as_asked(folder: Path) -> None:
    async with serving(folder, engine(), model={"max_logprobs": 2}) as service:
        (answer,) = await answers(service, ask(Beam(width=4), max_tokens=3, logprobs=2, prompt_logprobs=1))
        with pytest.raises(RequestError, match="logprobs"):
            await service.admit(ask(Beam(width=4), logprobs=3))
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    for place, entry in enumerate(answer.logprobs):
        values = next_logprobs(PROMPT + answer.token_ids[:place])
        assert entry.logprob == pytest.approx(values[entry.token_id].item())
        assert entry.rank == 1 + (values > values[entry.token_id]).sum().item()
        assert [token for token, _ in entry.top] == values.topk(2).indices.tolist()
    assert answer.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in answer.prompt_logprobs] == [None, *PROMPT[1:]]


async def test_each_prompt_has_its_own_search(folder: Path) -> None:
    other = (9, 8, 7)
    async with serving(folder, engine()) as service:
        request = ask(Beam(width=3), n=2, max_tokens=6)
        alone = [await answers(service, Generate(**{**_fields(request), "prompts": (Prompt(ids=ids),)}))
                 for ids in (PROMPT, other)]  # fmt: skip
        both = await answers(
            service, Generate(**{**_fields(request), "prompts": (Prompt(ids=PROMPT), Prompt(ids=other))})
        )
    assert [a.index for a in both] == [0, 1, 2, 3]
    assert [a.token_ids for a in both] == [a.token_ids for pair in alone for a in pair]


def _fields(request: Generate) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def spells(words: dict[str, float]) -> FakeEngine:
    """Return an engine that knows whole texts: the next character of each has that text's probability, others have
    none.
    """

    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        done = bytes(request.prompt_ids[1:]).decode()
        nexts: dict[int, float] = {}
        for word, logprob in words.items():
            if word.startswith(done) and word != done:
                token = ord(word[len(done)])
                nexts[token] = max(nexts.get(token, -1e9), logprob if not done else -0.01)
        fill = [(token, -50.0 - token) for token in range(100, 100 + (request.work.logprobs or 0))]
        top = tuple(sorted(nexts.items(), key=lambda item: -item[1]) + fill)[: request.work.logprobs or 0]
        yield RequestDelta(
            id=request.id,
            token_ids=(top[0][0],),
            logprobs=(TokenLogprobs(*top[0], 1, top),),
            finish=FinishReason.LENGTH,
        )

    return FakeEngine(script)


def spell(beam: Beam, **params: Any) -> Generate:
    values: dict[str, Any] = {"temperature": 1.0, "max_tokens": 5, "ignore_eos": True, **params}
    return Generate(prompts=(Prompt(ids=(33,)),), params=SamplingParams(**values), beam=beam)


@pytest.mark.parametrize(
    ("include", "min_tokens", "texts"),
    [(False, 0, ["", "BXYCD"]), (True, 0, ["AXY", "BXYCD"]), (False, 3, ["AXYEF", "BXYCD"])],
)
async def test_stop_strings_end_beams(folder: Path, include: bool, min_tokens: int, texts: list[str]) -> None:
    """Rank the text of a stop that ended early higher per token; where the stop is barred both run to the end."""
    async with serving(folder, spells({"AXYEF": -1.0, "BXYCD": -1.5})) as service:
        request = spell(
            Beam(width=2, length_penalty=0.0), n=2, stop=["XYE", "AXY"], min_tokens=min_tokens,
            include_stop_str_in_output=include,
        )  # fmt: skip
        found = await answers(service, request)
    assert [answer.text for answer in found] == texts
    assert found[1].finish is FinishReason.LENGTH
    if min_tokens == 0:
        assert (found[0].finish, found[0].stop_reason, found[0].token_ids) == (FinishReason.STOP, "AXY", (65, 88, 89))
        assert found[0].usage.completion_tokens == 3
    else:
        assert found[0].finish is FinishReason.LENGTH


async def test_a_stop_token_named_by_the_request_is_the_reason(folder: Path) -> None:
    async with serving(folder, spells({"AB": -1.0, "CD": -1.2})) as service:
        request = spell(Beam(width=2, early_stopping=True), n=2, stop_token_ids=[66, 68])
        first, second = await answers(service, request)
        assert [(a.text, a.stop_reason, a.token_ids) for a in (first, second)] == [
            ("A", 66, (65, 66)),
            ("C", 68, (67, 68)),
        ]
        request = spell(Beam(width=1), stop_token_ids=[66], min_tokens=2, max_tokens=3)
        (barred,) = await answers(service, request)
        assert 66 not in barred.token_ids[:2]
        assert len(barred.token_ids) == 3


async def test_a_search_that_fails_ends_every_answer(folder: Path) -> None:
    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        if len(request.prompt_ids) == 7:
            return iter([RequestDelta(id=request.id, finish=FinishReason.ERROR, error="non-finite logits")])
        return run_model(request)

    runs = FakeEngine(script, fake_info(vocab_size=VOCAB))
    async with serving(folder, runs) as service:
        first, second = await answers(service, ask(Beam(width=2), n=2))
        assert (first.finish, first.error, second.error) == (
            FinishReason.ERROR,
            "non-finite logits",
            "non-finite logits",
        )
        assert len(runs.cancels) == 2
        await drained(service)
        runs.script = lambda request: iter([RequestDelta(id=request.id, finish=FinishReason.LENGTH)])
        (broken,) = await answers(service, ask(Beam(width=2)))
        assert (broken.finish, broken.error) == (FinishReason.ERROR, "This request failed on the server.")


@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_cancels_what_runs(folder: Path, n: int) -> None:
    runs = engine()
    async with serving(folder, runs) as service:
        before = asyncio.all_tasks()
        runs.running.clear()
        unread = (await service.admit(ask(Beam(width=2), count=2, n=n))).outputs()
        await until(lambda: len(runs.requests) == 2)
        await unread.aclose()
        reader = asyncio.create_task(answers(service, ask(Beam(width=2), n=n)))
        await until(lambda: len(runs.requests) == 3)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until(lambda: asyncio.all_tasks() == before)
        assert {id for id, _ in runs.cancels} == {request.id for request in runs.requests}
        assert (service.ledger.open, service.ledger.waiting, service.ledger.waiting_tokens) == (0, 0, 0)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_dead_engine_is_told(folder: Path, n: int) -> None:
    runs = engine()
    async with serving(folder, runs) as service:
        runs.running.clear()
        stream = (await service.admit(ask(Beam(width=2), n=n))).outputs()
        await until(lambda: runs.requests)
        runs.die()
        with pytest.raises(EngineDead):
            await anext(stream)
        await drained(service)


@pytest.mark.parametrize(
    ("beam", "params", "param"),
    [
        ({"width": 1}, {"n": 2}, "n"),
        ({"width": 129}, {}, "n"),
        ({"width": "2"}, {}, "width"),
        ({"width": 20}, {"stop_token_ids": list(range(40))}, "n"),
        ({"width": 2, "length_penalty": float("nan")}, {}, "length_penalty"),
        ({"width": 2, "length_penalty": 11.0}, {}, "length_penalty"),
        ({"width": 2, "early_stopping": "never"}, {}, "early_stopping"),
        ({"width": 2}, {"temperature": 0.7}, "temperature"),
        ({"width": 2}, {"top_p": 0.9}, "top_p"),
        ({"width": 2}, {"top_k": 5}, "top_k"),
        ({"width": 2}, {"min_p": 0.1}, "min_p"),
        ({"width": 2}, {"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"width": 2}, {"presence_penalty": 0.1}, "presence_penalty"),
        ({"width": 2}, {"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"width": 2}, {"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"width": 2}, {"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"width": 2}, {"bad_words": ["x"]}, "bad_words"),
    ],
)
async def test_what_a_beam_search_cannot_do_is_refused(
    folder: Path, beam: dict[str, Any], params: dict[str, Any], param: str
) -> None:
    runs = FakeEngine(run_model, fake_info(vocab_size=50))
    async with serving(folder, runs) as service:
        sampling = SamplingParams(**{"temperature": 0, **params})
        with pytest.raises(RequestError) as caught:
            await service.admit(Generate(prompts=(Prompt(ids=(5,)),), params=sampling, beam=Beam(**beam)))
        assert service.ledger.open == 0
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
    assert runs.requests == []


async def test_neutral_values_and_the_server_s_own_defaults_pass(folder: Path) -> None:
    runs = engine()
    async with serving(folder, runs) as service:
        defaults = service.sampling_defaults()
        assert defaults["temperature"] == 0.5
        assert defaults["top_k"] == 40
        for params in (defaults, {"temperature": 1.0, "top_k": 0, "top_p": 1, "min_p": 0}):
            await answers(service, ask(Beam(width=2), **{**params, "max_tokens": 1}))


async def test_logits_processors_have_no_place_in_a_beam_search(folder: Path) -> None:
    class Nothing(LogitsProcessor):
        def __init__(self) -> None:
            """Take no arguments."""

        def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
            return logits

    plugins = FakePlugins(logits_processor={"p": Nothing})
    async with serving(folder, engine(), plugins, model={"logits_processor_pattern": "p"}) as service:
        request = Generate(**{**_fields(ask(Beam(width=2))), "logits_processors": ({"qualname": "p"},)})
        with pytest.raises(RequestError, match="logits_processors"):
            await service.admit(request)


async def test_beams_count_against_the_limits(folder: Path) -> None:
    async with serving(folder, engine(), limits={"max_prompts": 8, "max_waiting_tokens": 30}) as service:
        with pytest.raises(RequestError, match="more than 8"):
            await service.admit(ask(Beam(width=3), count=3, n=1))
        with pytest.raises(RequestError, match="35 tokens"):
            await service.admit(ask(Beam(width=7)))


# ------------------------------------------------------------------------------------------- best_of


def drawn(request: EngineRequest) -> Iterator[RequestDelta]:
    """Yield some tokens; the seed says how likely they are, and how many there are."""
    number = request.work.seed % 10
    for place in range(1, number + 2):
        yield RequestDelta(
            id=request.id,
            token_ids=(65 + number,),
            logprobs=(TokenLogprobs(65 + number, -abs(number - 2.2), 1, ()),)
            if request.work.logprobs is not None
            else (),
            finish=FinishReason.LENGTH if place == number + 1 else None,
        )


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_best_samples_are_returned(folder: Path, logprobs: int | None) -> None:
    runs = FakeEngine(drawn)
    async with serving(folder, runs) as service:
        request = Generate(
            prompts=(Prompt(ids=(1,)), Prompt(ids=(1, 2))),
            params=SamplingParams(n=2, best_of=4, seed=0, max_tokens=8, logprobs=logprobs),
        )
        stream = (await service.admit(request)).outputs()
        found = [output async for output in stream]
        await drained(service)
    assert [request.work.seed for request in runs.requests] == [0, 1, 2, 3] * 2
    assert {request.work.logprobs for request in runs.requests} == {0}
    by_index = {index: [o for o in found if o.index == index] for index in range(4)}
    texts = {index: bytes(t for o in some for t in o.token_ids) for index, some in by_index.items()}
    assert texts == {0: b"CCC", 1: b"A", 2: b"CCC", 3: b"A"}  # sums -0.6 and -2.2; B has -2.4, D -3.2
    assert all(bool(o.logprobs) == (logprobs is not None) for o in found)
    assert [some[-1].usage.completion_tokens for some in by_index.values()] == [3 + 2 + 4, 1, 3 + 2 + 4, 1]
    assert [some[-1].usage.prompt_tokens for some in by_index.values()] == [1, 1, 2, 2]
    assert all(some[-1].finish is FinishReason.LENGTH for some in by_index.values())


async def test_a_sample_that_failed_is_the_worst(folder: Path) -> None:
    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        if request.work.seed == 2:
            return iter([RequestDelta(id=request.id, finish=FinishReason.ERROR, error="no")])
        return drawn(request)

    async with serving(folder, FakeEngine(script)) as service:
        found = await answers(service, Generate(prompts=(Prompt(ids=(1,)),), params=SamplingParams(best_of=3, seed=0)))
    assert [(a.token_ids, a.error) for a in found] == [((65,), None)]


async def test_leaving_a_ranked_request_cancels_its_samples(folder: Path) -> None:
    runs = FakeEngine(echo)
    async with serving(folder, runs) as service:
        runs.running.clear()
        stream = (
            await service.admit(Generate(prompts=(Prompt(ids=(1,)),), params=SamplingParams(n=1, best_of=3)))
        ).outputs()
        await until(lambda: len(runs.requests) == 3)
        await stream.aclose()
        assert len(runs.cancels) == 3
        await drained(service)
        with pytest.raises(RequestError, match="best_of"):
            await service.admit(Generate(prompts=(Prompt(ids=(1,)),), params=SamplingParams(n=3, best_of=2)))
