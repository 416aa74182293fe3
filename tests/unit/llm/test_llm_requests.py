"""Requests under ids of their caller: what each kind of output has, and how requests end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ferrule.errors import EngineDead, RequestError, RequestFailed
from ferrule.interfaces.service import Generate, Prompt
from ferrule.llm.outputs import RequestOutput
from ferrule.llm.requests import News, Requests, Running
from ferrule.sampling_params import RequestOutputKind, SamplingParams
from ferrule_testkit.service import ScriptedService


class Caller:
    """A caller that starts requests, whose prompts are echoed, and keeps their news."""

    def __init__(self) -> None:
        self.service = ScriptedService()
        self.requests = Requests(self.service)
        self.news: list[News] = []
        self.over = asyncio.Event()

    async def start(self, name: str = "a", text: str = "abc", **params: Any) -> Running:
        request = Generate(prompts=(Prompt(text=text),), params=SamplingParams(**params))
        running = Running(name, request, self.take)
        await self.requests.start(running)
        return running

    def take(self, news: News) -> None:
        self.news.append(news)
        if isinstance(news, Exception) or news.finished:
            self.over.set()

    async def outputs(self, **params: Any) -> list[RequestOutput]:
        await self.start(**params)
        await self.over.wait()
        return [news for news in self.news if isinstance(news, RequestOutput)]


async def test_cumulative_is_the_default() -> None:
    seen = await Caller().outputs(n=2)
    texts = [[choice.text for choice in output.outputs] for output in seen]
    assert len(seen) > 2
    assert all(later[i].startswith(sooner[i]) for sooner, later in zip(texts, texts[1:], strict=False) for i in (0, 1))
    assert texts[-1][0] == "abc"
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert {output.request_id for output in seen} == {"a"}
    assert seen[0].prompt == "abc"
    assert len(seen[0].prompt_token_ids) == 3


async def test_deltas_add_up_to_the_whole() -> None:
    whole = (await Caller().outputs())[-1].outputs[0]
    deltas = await Caller().outputs(output_kind=RequestOutputKind.DELTA)
    assert all(len(output.outputs) == 1 for output in deltas)
    assert "".join(output.outputs[0].text for output in deltas) == whole.text
    assert [token for output in deltas for token in output.outputs[0].token_ids] == whole.token_ids
    assert len(deltas) > 1


async def test_one_output_at_the_end() -> None:
    whole = (await Caller().outputs())[-1]
    assert await Caller().outputs(output_kind=RequestOutputKind.FINAL_ONLY) == [whole]


async def test_an_id_is_used_once_at_a_time() -> None:
    caller = Caller()
    await caller.start()
    with pytest.raises(RequestError, match="'a' is in use"):
        await caller.start()
    await caller.over.wait()
    caller.over.clear()
    await caller.start()
    await caller.over.wait()
    assert [news.finished for news in caller.news if isinstance(news, RequestOutput)].count(True) == 2


@pytest.mark.parametrize("begun", [False, True])
async def test_an_aborted_request_says_so_and_frees_its_place(begun: bool) -> None:
    caller = Caller()
    caller.service.pace = asyncio.Event().wait
    running = await caller.start(output_kind=RequestOutputKind.FINAL_ONLY)
    if begun:
        await asyncio.sleep(0)
    caller.requests.abort(["other", "a"])
    await asyncio.gather(*filter(None, [running.task]), return_exceptions=True)
    (last,) = caller.news
    assert isinstance(last, RequestOutput)
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert caller.service.open == 0


async def test_a_dropped_request_is_silent() -> None:
    caller = Caller()
    caller.service.pace = asyncio.Event().wait
    running = await caller.start()
    await asyncio.sleep(0)
    caller.requests.drop(running)
    await asyncio.gather(*filter(None, [running.task]), return_exceptions=True)
    assert (caller.news, caller.service.open) == ([], 0)


async def test_close_ends_what_runs() -> None:
    caller = Caller()
    caller.service.pace = asyncio.Event().wait
    await caller.start()
    await asyncio.sleep(0)
    await caller.requests.close()
    assert [type(news) for news in caller.news] == [EngineDead]
    assert caller.service.open == 0


async def test_a_failure_reaches_the_caller_of_that_request() -> None:
    caller = Caller()
    caller.service.failure = RequestFailed("broken")
    await caller.start()
    await caller.over.wait()
    assert [str(news) for news in caller.news if isinstance(news, Exception)] == ["broken"]
    caller.service.refusal = RequestError("no")
    with pytest.raises(RequestError, match="no"):
        await caller.start("b")
    caller.service.refusal = None
    await caller.start("b")
