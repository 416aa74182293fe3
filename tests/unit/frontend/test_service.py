"""The service from a client's request to its outputs, on a fake engine."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ferrule.api_keys import BACKGROUND, Callers
from ferrule.config import Config, DecodingConfig, FrontendConfig, LimitsConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import (
    EngineDead,
    ForbiddenError,
    NotFoundError,
    OverloadedError,
    RequestError,
    RequestFailed,
    StartupError,
    UnavailableError,
)
from ferrule.forms import GrammarSpec, Regex
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.frontend.service import build_service
from ferrule.interfaces.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChoiceContext,
    Content,
    Event,
    Reasoning,
    ReasoningParser,
    TextDelta,
    ToolParser,
)
from ferrule.interfaces.service import ChatPrompt, Generate, Output, Prompt, ReadPrompt, ToolCall
from ferrule.interfaces.stats import HttpStats, RequestStats, StatLogger
from ferrule.plugin import discover
from ferrule.sampling_params import Beam, SamplingParams
from ferrule.types import EngineRequest, EngineStats, FinishReason, Guesses, RequestDelta, Targets, TokenLogprobs
from ferrule_testkit.tokenizers import ByteTokenizer, ByteTokenizers
from tests.fakes.engine import FakeEngine, Script, echo, fake_info, says, tokens
from tests.fakes.frontend import (
    FakePlugins,
    answers,
    drained,
    fold,
    model_folder,
    outputs,
    serving,
    until,
)


class Recorder(StatLogger):
    """A logger that keeps what it was told; shared through `seen`, because the service makes its own instance."""

    seen: list[Any]

    def on_engine(self, stats: EngineStats, engine: int) -> None:
        self.seen.append(("engine", stats))

    def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
        self.seen.append(("tokens", first, num_tokens))

    def on_finish(self, stats: RequestStats) -> None:
        self.seen.append(("finish", stats))

    def on_http(self, stats: HttpStats) -> None:
        self.seen.append(("http", stats))

    def exposition(self) -> tuple[str, str] | None:
        return ("text/plain", f"events {len(self.seen)}")


def ask(text: str | Sequence[int], count: int = 1, **params: Any) -> Generate:
    prompt = Prompt(text=text, add_special_tokens=False) if isinstance(text, str) else Prompt(ids=tuple(text))
    return Generate(prompts=(prompt,) * count, params=SamplingParams(**{"max_tokens": 50, **params}))


def one(**fields: Any) -> Generate:
    return Generate(prompts=(Prompt(text="x"),), params=SamplingParams(), **fields)


def talk(*messages: dict[str, Any], **fields: Any) -> Generate:
    return Generate(prompts=(ChatPrompt(messages=messages, **fields),), params=SamplingParams())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


def text_script(text: str) -> Script:
    return says(list(text.encode()))


# ------------------------------------------------------------------------------------------- the way through


async def test_a_text_goes_through_the_house(folder: Path) -> None:
    engine = FakeEngine(text_script("héllo"))
    async with serving(folder, engine) as service:
        admitted = await service.admit(replace(ask("Hi", seed=7, temperature=0.3), model="alias"))
        assert admitted.outputs() is admitted.outputs()
        seen = [output async for output in admitted.outputs()]
        (answer,) = fold(seen)
        (request,) = engine.requests
    assert answer.text == "héllo"
    assert answer.finish is FinishReason.LENGTH
    assert admitted.model == "m"
    assert admitted.prompts == (ReadPrompt((72, 105), "Hi"),)
    assert answer.token_ids == tuple("héllo".encode())
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 6
    assert [output.token_ids for output in seen] == [(byte,) for byte in "héllo".encode()]
    assert not any("\ufffd" in event.text for o in seen for event in o.events if isinstance(event, Content))
    assert request.work.seed == 7
    assert request.work.stop_token_ids == (257, 1, 2, 3)
    assert re.fullmatch(r"[0-9a-f]{32}", request.id)
    assert request.arrival > 0


async def test_a_conversation_is_rendered(folder: Path) -> None:
    engine = FakeEngine(text_script("ok"))
    async with serving(folder, engine) as service:
        chat = ChatPrompt(messages=({"role": "user", "content": "Hi"},))
        admitted = await service.admit(Generate(prompts=(chat,), params=SamplingParams(max_tokens=None)))
        (answer,) = fold([output async for output in admitted.outputs()])
        assert await service.tokenize(chat) == list(b"<user>Hi<assistant>")
        assert service.child_pids
    (prompt,) = admitted.prompts
    assert prompt == ReadPrompt(tuple(b"<user>Hi<assistant>"), "<user>Hi<assistant>", rendered_at=prompt.rendered_at)
    assert 0 < prompt.rendered_at <= time.monotonic()
    assert answer.text == "ok"
    assert engine.requests[0].work.max_tokens == 256 - len("<user>Hi<assistant>")


async def test_what_a_template_does_not_show_is_told_with_the_ids(folder: Path) -> None:
    chat = ChatPrompt(messages=({"role": "user", "content": "Hi"}, {"role": "tool", "content": "no"}))
    only_users = {"chat_template": "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}"}
    note = "messages[1].content: the chat template does not show it to the model."
    async with serving(folder, FakeEngine(), frontend=only_users) as service:
        read = await service.read(chat)
        assert (bytes(read.ids), read.text, read.notes) == (b"<Hi>", "<Hi>", (note,))
        admitted = await service.admit(Generate(prompts=(chat,), params=SamplingParams(max_tokens=1)))
        assert [(prompt.ids, prompt.notes) for prompt in admitted.prompts] == [(read.ids, read.notes)]
        await admitted.outputs().aclose()
    async with serving(folder, FakeEngine(), frontend=only_users | {"strict_requests": True}) as service:
        with pytest.raises(RequestError, match=re.escape(note)):
            await service.tokenize(chat)


async def test_refusals_name_fields_as_the_protocol_does(folder: Path) -> None:
    names = {"max_tokens": "most", "structured_outputs": "format"}
    async with serving(folder, FakeEngine()) as service:
        for request, param in (
            (ask("x" * 40, max_tokens=240), "most"),
            (replace(ask("Hi"), grammar=GrammarSpec(form=Regex("a"), backend="none")), "guided_decoding_backend"),
            (replace(ask("Hi", n=2), grammar=GrammarSpec(form=Regex("a")), beam=Beam(width=2)), "format"),
            (ask("Hi", n=1000), "n"),
        ):
            with pytest.raises(RequestError) as caught:
                await service.admit(replace(request, names=names))
            assert caught.value.param == param


async def test_ids_need_no_text(folder: Path) -> None:
    async with serving(folder, FakeEngine(), model={"skip_tokenizer_init": True}) as service:
        (answer,) = await answers(service, ask([5, 6], max_tokens=3))
        assert answer.token_ids == (5, 6, 5)
        assert answer.text == ""
        with pytest.raises(RequestError, match="without a tokenizer"):
            await service.admit(ask("text"))
        with pytest.raises(RequestError, match="without a tokenizer"):
            await service.detokenize([5])


async def test_choices_are_requests_with_their_own_seeds(folder: Path) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        seen = await outputs(service, ask("abc", count=2, n=3, seed=10, max_tokens=7))
        found = fold(seen)
    assert [request.work.seed for request in engine.requests] == [10, 11, 12, 10, 11, 12]
    assert len({request.id for request in engine.requests}) == 6
    assert [answer.index for answer in found] == list(range(6))
    assert {answer.text for answer in found} == {"abcabca"}
    order = [output.index for output in seen]
    assert order != sorted(order)  # interleaved


async def test_seeds_are_drawn_when_none_is_given(folder: Path) -> None:
    async def seeds(**model: Any) -> list[int]:
        engine = FakeEngine()
        async with serving(folder, engine, model=model) as service:
            for _ in range(2):
                await outputs(service, ask("a", max_tokens=1))
        return [request.work.seed for request in engine.requests]

    first, second = await seeds(), await seeds()
    assert len({*first, *second}) == 4
    assert await seeds(seed=3) == await seeds(seed=3)


# ------------------------------------------------------------------------------------------- ends


async def test_end_of_sequence_ends_without_a_reason(folder: Path) -> None:
    async with serving(folder, FakeEngine(says([104, 105, 257, 99]))) as service:
        (answer,) = await answers(service, ask("x"))
        assert (answer.text, answer.finish, answer.stop_reason) == ("hi", FinishReason.STOP, None)
        assert answer.token_ids == (104, 105, 257)
        (answer,) = await answers(service, ask("x", ignore_eos=True))
        assert (answer.text, answer.finish) == ("hic", FinishReason.LENGTH)


async def test_a_stop_token_is_the_reason_and_not_in_the_text(folder: Path) -> None:
    async with serving(folder, FakeEngine(says([104, 105, 99]))) as service:
        (answer,) = await answers(service, ask("x", stop_token_ids=[105]))
        assert (answer.text, answer.stop_reason) == ("h", 105)
        (answer,) = await answers(service, ask("x", stop_token_ids=[105], include_stop_str_in_output=True))
        assert (answer.text, answer.stop_reason) == ("hi", 105)
        (answer,) = await answers(service, ask("x", stop_token_ids=[257], max_tokens=5))
        assert answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")], ids=["left out", "included"])
async def test_a_stop_string_cancels_the_engine(folder: Path, include: bool, text: str) -> None:
    recorder = type("R", (Recorder,), {"seen": []})
    engine = FakeEngine(text_script("one STOP and a lot more"))
    async with serving(folder, engine, FakePlugins(stat_logger={"r": recorder})) as service:
        (answer,) = await answers(service, ask("x", stop=["nope", "STOP"], include_stop_str_in_output=include))
        assert (answer.text, answer.finish, answer.stop_reason) == (text, FinishReason.STOP, "STOP")
        assert answer.usage.completion_tokens == 8 == len(answer.token_ids)
        assert engine.cancels == [(engine.requests[0].id, FinishReason.STOP)]
        await drained(service)
    (finish,) = [entry[1] for entry in recorder.seen if entry[0] == "finish"]
    assert finish.finish is FinishReason.STOP
    assert finish.prefill_time > 0  # the engine's times came after the client's end


async def test_stop_strings_of_several_choices_end_each_alone(folder: Path) -> None:
    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        return tokens(request, list(b"ab!cdefgh" if request.work.seed == 5 else b"abcd!"))

    engine = FakeEngine(script)
    async with serving(folder, engine) as service:
        first, second = await answers(service, ask("x", n=2, seed=5, stop="!"))
        assert (first.text, second.text) == ("ab", "abcd")
        await drained(service)
        assert service.ledger.open == 0


async def test_tokens_after_a_stop_string_in_one_delta_are_dropped(folder: Path) -> None:
    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        yield RequestDelta(id=request.id, token_ids=tuple(b"ab!cd"))
        yield RequestDelta(id=request.id, token_ids=tuple(b"ef"), finish=FinishReason.LENGTH)

    async with serving(folder, FakeEngine(script)) as service:
        (answer,) = await answers(service, ask("x", stop="b!"))
        assert (answer.text, answer.token_ids, answer.usage.completion_tokens) == ("a", tuple(b"ab!"), 3)


async def test_stop_strings_wait_for_min_tokens(folder: Path) -> None:
    async with serving(folder, FakeEngine(text_script("a!b!c!"))) as service:
        (answer,) = await answers(service, ask("x", stop="!", min_tokens=3))
        assert answer.text == "a!b"


async def test_held_back_text_comes_with_the_end(folder: Path) -> None:
    async with serving(folder, FakeEngine(text_script("abc\n\nUs"))) as service:
        (answer,) = await answers(service, ask("x", stop="\n\nUser"))
        assert (answer.text, answer.finish) == ("abc\n\nUs", FinishReason.LENGTH)
    async with serving(folder, FakeEngine(says(list("é".encode())[:1]))) as service:
        (answer,) = await answers(service, ask("x", stop="q"))
        assert answer.text == "\ufffd"


@settings(max_examples=40, deadline=None)
@given(content=st.text(alphabet="ab!é🙂", max_size=20), data=st.data())
def test_any_cut_into_deltas_folds_to_one_answer(content: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    ids = list(content.encode()) or [97]
    cuts = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))

    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        rest = list(ids)
        for size in cuts:
            head, rest = rest[:size], rest[size:]
            yield RequestDelta(id=request.id, token_ids=tuple(head), finish=None if rest else FinishReason.LENGTH)
            if not rest:
                return

    async def run(how: Script) -> Output:
        folder = tmp_path_factory.mktemp("cut")
        (folder / "config.json").write_text('{"architectures": ["F"]}')
        async with serving(folder, FakeEngine(how)) as service:
            (answer,) = await answers(service, ask("x", stop=["b!", "é"]))
            assert answer.times is not None
            return replace(answer, times=None)

    async def both() -> None:
        assert await run(script) == await run(says(ids))

    asyncio.run(both())


# ------------------------------------------------------------------------------------------- logprobs


async def test_logprobs_come_with_their_tokens(folder: Path) -> None:
    async with serving(folder, FakeEngine(text_script("né!x"))) as service:
        (answer,) = await answers(service, ask("abc", logprobs=2, prompt_logprobs=1, stop="!"))
        assert [entry.token_id for entry in answer.logprobs] == list("né!".encode()) == list(answer.token_ids)
        assert answer.token_offsets == (0, 1, 1, 2)
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        assert [entry.token_id for entry in answer.prompt_logprobs[1:] if entry] == [98, 99]
        assert service.token_text(110) == "n"
        assert service.token_text(0xC3) == "\ufffd"
        assert service.token_bytes(0xC3) == b"\xc3"


async def test_prompt_logprobs_of_several_steps_are_whole(folder: Path) -> None:
    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        (whole,) = tokens(request, [65])
        for entry in whole.prompt_logprobs:
            yield RequestDelta(id=request.id, prompt_logprobs=(entry,))
        yield RequestDelta(id=request.id, token_ids=(65,), cached=2, finish=FinishReason.LENGTH)

    async with serving(folder, FakeEngine(script)) as service:
        seen = await outputs(service, ask("abcd", prompt_logprobs=0))
    (output,) = seen  # deltas without tokens bring no output
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 4
    assert output.usage.cached_tokens == 2


# ------------------------------------------------------------------------------------------- API keys


async def test_what_is_generated_for_a_key_is_counted_for_it(folder: Path) -> None:
    recorder = type("Seeing", (Recorder,), {"seen": []})
    callers = Callers(Config(frontend=FrontendConfig(api_key=("a", "b")), limits=LimitsConfig(key_tokens_per_minute=9)))
    caller = callers.find(b"b")
    async with serving(folder, FakeEngine(), FakePlugins(stat_logger={"r": recorder})) as service:
        with callers.visit(caller):
            stream = (await service.admit(ask("hello", max_tokens=5))).outputs()
        async for _ in stream:  # the visit is over, and yet these are its tokens
            pass
        await outputs(service, ask("hello"))
    assert [stats.key_name for kind, stats, *_ in recorder.seen if kind == "finish"] == ["key-2", ""]
    with pytest.raises(OverloadedError, match="10 of its 9"), callers.visit(caller):
        pass


@pytest.mark.advisory("CVE-2025-46570")
@pytest.mark.parametrize(
    ("scope", "others", "apart"),
    [("global", True, False), ("key", True, True), ("auto", True, True), ("auto", False, False)],
)
async def test_caches_of_keys_are_apart(folder: Path, scope: str, others: bool, apart: bool) -> None:
    front, engine = FrontendConfig(api_key=("a", "b") if others else ("a",)), FakeEngine()
    callers = Callers(Config(frontend=front))
    async with serving(folder, engine, cache={"cache_scope": scope}, frontend={"api_key": front.api_key}) as service:
        for key, salt in (("a", None), ("b", None), ("a", None), ("a", "s"), ("b", "s")):
            key = key if others else "a"
            with callers.visit(callers.find(key.encode())):
                await outputs(service, one(cache_salt=salt))
    salts = [request.cache_salt for request in engine.requests]
    assert salts[0] == salts[2]
    assert len(set(salts)) == (4 if apart else 2)


async def test_what_users_wish_of_waits_reaches_the_engine(folder: Path) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        await outputs(service, one(targets=Targets(1.5, 0.08), priority=-2))
    assert [(each.targets, each.priority) for each in engine.requests] == [(Targets(1.5, 0.08), -2)]


async def test_requests_of_the_server_itself_come_after_those_of_clients(folder: Path) -> None:
    """Let them have half of the queue, and a lower priority; let one of any size in while nothing waits."""
    engine = FakeEngine()
    async with serving(folder, engine, limits={"max_waiting_requests": 4}) as service:
        engine.running.clear()
        token = BACKGROUND.set(True)
        try:
            own = [await service.admit(one(priority=3)) for _ in range(2)]
            with pytest.raises(OverloadedError):
                await service.admit(one())
            with pytest.raises(OverloadedError):
                service.check_room(0)
        finally:
            BACKGROUND.reset(token)
        service.check_room(0)
        theirs = [await service.admit(one(priority=3)) for _ in range(2)]
        assert engine.requests[0].priority > 3 == engine.requests[2].priority
        for admitted in own + theirs:
            await admitted.outputs().aclose()


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.advisory("CVE-2024-8768", "CVE-2026-116173")
@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (ask("x", top_k=1 << 20), RequestError, "top_k"),
        (ask("", max_tokens=1), RequestError, "prompt"),
        (ask("x" * 5000), RequestError, "prompt"),
        (ask("x" * 300), RequestError, "prompt"),
        (ask("\ud800"), RequestError, "prompt"),
        (ask([2048]), RequestError, "prompt"),
        (ask([-1]), RequestError, "prompt"),
        (ask([]), RequestError, "prompt"),
        (ask("x" * 8, max_tokens=249), RequestError, "max_tokens"),
        (Generate(prompts=(), params=SamplingParams()), RequestError, "prompt"),
        (Generate(prompts=(Prompt(),), params=SamplingParams()), RequestError, "prompt"),
        (Generate(prompts=(Prompt(text="a", ids=(1,)),), params=SamplingParams()), RequestError, "prompt"),
        (one(model="other"), NotFoundError, "model"),
        (one(cache_salt="\n"), RequestError, "cache_salt"),
        (one(logits_processors=("os.system",)), RequestError, "logits_processors"),
        (talk(), RequestError, "messages"),
        (talk({"role": "user", "content": "x"}, chat_template="{{ 1 }}"), ForbiddenError, "chat_template"),
        (ask("x", count=1025), RequestError, "prompt"),
        (ask("x", count=100, n=11), RequestError, "n"),
        (ask("x", n=129), RequestError, "n"),
    ],
)  # fmt: skip
async def test_nothing_wrong_reaches_the_engine(
    folder: Path, request_: Generate, error: type[RequestError], param: str
) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        with pytest.raises(RequestError) as caught:
            await service.admit(request_)
        assert type(caught.value) is error
        assert caught.value.param == param
        assert service.ledger.open == 0
        assert await outputs(service, ask("still", max_tokens=2))
    assert len(engine.requests) == 1


@pytest.mark.advisory("CVE-2026-44222")
async def test_nul_and_special_tokens_in_text_are_fine(folder: Path) -> None:
    async with serving(folder, FakeEngine()) as service:
        (answer,) = await answers(service, ask("a\0<s>b", max_tokens=4))
        assert await service.tokenize(Prompt(text="a\0<s>b", add_special_tokens=False)) == [97, 0, 256, 98]
        assert answer.text == "a\0b"
        (answer,) = await answers(service, ask("a<s>b", max_tokens=3, skip_special_tokens=False))
        assert answer.text == "a<s>b"


async def test_bad_words_become_id_sequences(folder: Path) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        await outputs(service, ask("x", bad_words=["no", " go"], max_tokens=1))
    assert engine.requests[0].work.bad_words == (tuple(b"no"), tuple(b" no"), tuple(b"go"), tuple(b" go"))


async def test_a_request_that_the_cache_can_never_hold_is_refused(folder: Path) -> None:
    async with serving(folder, FakeEngine(num_blocks=4)) as service:  # 3 blocks of 16
        with pytest.raises(RequestError, match="holds 49"):
            await service.admit(ask("x" * 40, max_tokens=20))
        (answer,) = await answers(service, ask("x" * 40, max_tokens=None))
        assert answer.usage.completion_tokens == 9


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (ask([65] * 2040, 98, max_tokens=1, n=10, prompt_logprobs=20, logprobs=20), "prompt_logprobs"),
        (ask("x", n=128, best_of=128, logprobs=20, max_tokens=1500), "logprobs"),
    ],
)
async def test_a_small_request_cannot_ask_for_gigabytes_of_logprobs(
    folder: Path, request_: Generate, param: str
) -> None:
    engine = FakeEngine(info=fake_info(max_model_len=4096))
    async with serving(folder, engine, model={"generation_config": "vllm"}) as service:
        with pytest.raises(RequestError) as caught:
            await service.admit(replace(request_, streamed=False))
        assert (caught.value.param, engine.requests, service.ledger.open) == (param, [], 0)


@pytest.mark.parametrize("fields", [{}, {"streamed": True}])
async def test_what_is_kept_for_an_answer_is_counted(folder: Path, fields: dict[str, Any]) -> None:
    entries = (TokenLogprobs(1, -0.5, 1, ((1, -0.5),) * 20),) * 10

    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        yield RequestDelta(id=request.id, token_ids=(65,), prompt_logprobs=entries)
        yield RequestDelta(id=request.id, token_ids=(65,), finish=FinishReason.LENGTH)

    async with serving(folder, FakeEngine(script)) as service:
        stream = (await service.admit(replace(ask("x" * 11, prompt_logprobs=20), **fields))).outputs()
        await anext(stream)
        assert service.ledger.buffers.used > 10 * 20 * 80
        await stream.aclose()
        await until(lambda: not service.ledger.open)
        assert service.ledger.buffers.used == 0


async def test_tools_of_the_service(folder: Path) -> None:
    async with serving(folder, FakeEngine()) as service:
        assert service.names == ("m", "alias")
        assert [await service.resolve(name) for name in (None, "", "m", "alias")] == ["m", "m", "m", "alias"]
        with pytest.raises(NotFoundError, match="m, alias"):
            await service.resolve("x" * 1000)
        assert service.sampling_defaults() == {"temperature": 0.5, "top_k": 40, "max_tokens": 250}
        assert await service.tokenize(Prompt(text="é")) == [256, 0xC3, 0xA9]
        assert await service.detokenize([0xC3, 0xA9, 257]) == "é</s>"
        assert await service.detokenize(list(b"ab") * 2000) == "ab" * 2000
        for ids in ([-1], [2048], ["1"], [0] * 5000):
            with pytest.raises(RequestError):
                await service.detokenize(ids)
        assert await service.call("reset_prefix_cache") is True
        with pytest.raises(RequestFailed):
            await service.call("nothing")
    async with serving(
        folder, FakeEngine(), model={"generation_config": "vllm", "override_generation_config": {"top_p": 0.5}}
    ) as service:
        assert service.sampling_defaults() == {"top_p": 0.5}  # fmt: skip


async def test_max_new_tokens_caps_every_request(folder: Path) -> None:
    engine = FakeEngine()
    override = {"max_new_tokens": 5}
    async with serving(folder, engine, model={"override_generation_config": override}) as service:
        assert service.sampling_defaults()["max_tokens"] == 5
        for most in (None, 3, 5, 9, 1000):
            await answers(service, ask("abc", max_tokens=most))
        await answers(service, ask("x" * 253, max_tokens=5))  # 256 hold three more
        with pytest.raises(RequestError, match="min_tokens is 6, but at most 5"):
            await service.admit(ask("abc", min_tokens=6))
    assert [request.work.max_tokens for request in engine.requests] == [5, 3, 5, 5, 5, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"override_generation_config": {"temprature": 0.5}}, "'temprature'. Did you mean 'temperature'"),
        ({"override_generation_config": {"temperature": -1}}, "temperature must be"),
        ({"override_generation_config": {"top_k": 10**9}}, "top_k must be"),
        ({"override_generation_config": {"top_p": "0.5"}}, "'top_p' must be a number"),
        ({"generation_config": "/nowhere"}, "/nowhere has no generation_config.json"),
    ],
)
def test_a_generation_config_that_cannot_be_used_stops_the_start(
    folder: Path, options: dict[str, Any], words: str
) -> None:
    config = resolve(Config(model=ModelConfig(model=str(folder), **options)))
    with pytest.raises(StartupError, match=re.escape(words)):
        build_service(config, FakePlugins(), FakeEngine())


async def test_the_engine_hears_of_a_backend_that_a_request_will_need(tiny_llama: Path) -> None:
    engine = FakeEngine(says([1]))
    decoding = DecodingConfig(guided_decoding_backend="guidance")
    config = resolve(Config(model=ModelConfig(model=str(tiny_llama)), decoding=decoding))
    service = build_service(config, discover(), engine)
    prompt, grammar = Prompt(text="x"), GrammarSpec(form=Regex("a+"))
    try:
        await outputs(service, Generate(prompts=(prompt,), params=SamplingParams(), grammar=grammar))
    finally:
        await service.close()
    assert engine.expected == ["guidance"]


async def test_the_generation_config_of_another_folder(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.25, "eos_token_id": 9}')
    engine = FakeEngine()
    async with serving(folder, engine, model={"generation_config": str(other)}) as service:
        assert service.sampling_defaults() == {"top_p": 0.25}
        await answers(service, ask("abc"))
    assert engine.requests[0].work.stop_token_ids == (257, 1, 9)
    changed = {"generation_config": "vllm", "override_generation_config": {"max_new_tokens": 7}}
    async with serving(folder, FakeEngine(), model=changed) as service:
        assert service.sampling_defaults() == {"max_tokens": 7}


async def test_a_trusted_request_may_name_a_template(folder: Path) -> None:
    plugins = FakePlugins(tokenizer={"auto": type("Source", (ByteTokenizers,), {"open": _with_templates})})
    chat = {"messages": ({"role": "user", "content": "x"},), "add_generation_prompt": False}
    limits = {"trust_request_chat_template": True}
    async with serving(folder, FakeEngine(), plugins, frontend={"chat_template": None}, limits=limits) as service:
        for fields, text in (
            ({}, "d"),
            ({"tools": ({"type": "function", "function": {"name": "f"}},)}, "t"),
            ({"chat_template": "rag", "documents": ({"title": "a", "text": "b"},)}, "rb"),
            ({"chat_template": "rag {{ 1 }}"}, "rag 1"),
        ):
            assert await service.detokenize(await service.tokenize(ChatPrompt(**chat, **fields))) == text  # type: ignore[arg-type]
    async with serving(folder, FakeEngine(), plugins, frontend={"chat_template": None}) as service:
        with pytest.raises(ForbiddenError):
            await service.tokenize(ChatPrompt(**chat, chat_template="rag"))  # type: ignore[arg-type]
    async with serving(folder, FakeEngine(), plugins, frontend={"chat_template": "rag"}) as service:
        assert await service.detokenize(await service.tokenize(ChatPrompt(**chat))) == "r"  # type: ignore[arg-type]


def _with_templates(self: Any, folder: Path, options: dict[str, Any]) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    rag = "r{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    tokenizer.chat_template = {"default": "d", "tool_use": "t", "rag": rag}
    return tokenizer


class Infills(ByteTokenizer):
    """A tokenizer of bytes, and of the tokens of one way to fill in."""

    def __init__(self, marks: Sequence[str]) -> None:
        super().__init__()
        self.marks = {mark: 300 + number for number, mark in enumerate(marks)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for mark, token in self.marks.items():
            before, found, after = text.partition(mark)
            if found:
                return [*self.encode(before), token, *self.encode(after, add_special_tokens=False)]
        return list(text.encode())

    def token(self, token_id: int) -> str | None:
        return next((mark for mark, token in self.marks.items() if token == token_id), super().token(token_id))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], [300, *b"a{0}", 301, *b"b}", 302]),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], [300, *b"a{0}", 301, *b"b}", 302]),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], [300, *b"a{0}", 301, *b"b}", 302]),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], [300, *b"a{0}", 301, *b"b}", 302]),
        (["[SUFFIX]", "[PREFIX]"], [300, *b"b}", 301, *b"a{0}"]),
        (["<fim_prefix>", "<fim_suffix>"], None),
        ([], None),
    ],
)
async def test_a_suffix_needs_a_model_that_fills_in(folder: Path, marks: list[str], expected: list[int] | None) -> None:
    source = type("Source", (ByteTokenizers,), {"open": lambda self, folder, options: Infills(marks)})
    async with serving(folder, FakeEngine(), FakePlugins(tokenizer={"auto": source})) as service:
        prompt = Prompt(text="a{0}", suffix="b}", add_special_tokens=False)
        if expected is None:
            with pytest.raises(RequestError, match="suffix") as caught:
                await service.tokenize(prompt)
            assert caught.value.param == "suffix"
        else:
            assert await service.tokenize(prompt) == expected
        assert await service.tokenize(Prompt(text="a", suffix="", add_special_tokens=False)) == [97]
        with pytest.raises(RequestError, match="suffix"):
            await service.tokenize(Prompt(text="a", suffix="\ud800"))
        with pytest.raises(RequestError, match="suffix"):
            await service.tokenize(Prompt(ids=(1,), suffix="b"))


# ------------------------------------------------------------------------------------------- leaving


@pytest.mark.advisory("CVE-2026-9540")
async def test_closing_the_stream_cancels_what_runs(folder: Path) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        for count in (1, 3):
            stream = (await service.admit(ask("abc", n=count))).outputs()
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            await drained(service)
            assert [output async for output in stream] == []
        stream = (await service.admit(ask("abc"))).outputs()
        await stream.aclose()  # never read at all
        assert service.ledger.waiting == service.ledger.waiting_tokens == 0  # at once
        await drained(service)
    assert {reason for _, reason in engine.cancels} == {FinishReason.ABORT}
    assert {id for id, _ in engine.cancels} == {request.id for request in engine.requests}


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelling_the_reader_cancels_what_runs(folder: Path, count: int) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        engine.running.clear()
        reader = asyncio.create_task(outputs(service, ask("abc", n=count)))
        await until(lambda: len(engine.requests) == count)
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
        assert len(engine.cancels) == count
        await drained(service)


async def test_cancelling_during_admission_reserves_nothing(folder: Path) -> None:
    engine = FakeEngine()
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    async with serving(folder, engine, frontend={"chat_template": endless}) as service:
        chat = ChatPrompt(messages=({"role": "user", "content": "Hi"},))
        task = asyncio.create_task(service.admit(Generate(prompts=(chat,), params=SamplingParams(n=4))))
        while not service.child_pids:
            await asyncio.sleep(0.01)
        assert service.ledger.open == 4
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert service.ledger.open == 0
        pids = service.child_pids
    assert engine.requests == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.advisory("CVE-2026-9540")
async def test_tasks_and_streams_are_not_left_behind(folder: Path) -> None:
    async with serving(folder, FakeEngine(text_script("ab!cdef"))) as service:
        before = asyncio.all_tasks()
        await asyncio.gather(*(answers(service, ask("x", n=2, stop="!")) for _ in range(20)))
        await drained(service)
        await until(lambda: asyncio.all_tasks() == before)
        gc.collect()
        assert not [o for o in gc.get_objects() if type(o).__name__ == "OutputStream"]


# ------------------------------------------------------------------------------------------- limits and states


async def test_the_queue_has_a_limit(folder: Path) -> None:
    engine = FakeEngine()
    async with serving(folder, engine, limits={"max_waiting_requests": 3}) as service:
        engine.running.clear()
        streams = [(await service.admit(ask("abc", n=n))).outputs() for n in (1, 2)]
        with pytest.raises(OverloadedError) as caught:
            await service.admit(ask("abc"))
        assert caught.value.retry_after > 0
        with pytest.raises(RequestError, match="the queue takes 3"):
            await service.admit(ask("abc", n=4))
        engine.resume()
        await anext(streams[0])  # has its first token: no longer waits
        async for _ in (await service.admit(ask("abc", max_tokens=1))).outputs():
            pass
        for stream in streams:
            async for _ in stream:
                pass
        assert service.ledger.open == 0


async def test_the_queue_s_tokens_have_a_limit(folder: Path) -> None:
    engine = FakeEngine()
    async with serving(folder, engine, limits={"max_waiting_tokens": 100}) as service:
        engine.running.clear()
        with pytest.raises(RequestError, match="120 tokens"):
            await service.admit(ask("x" * 60, n=2))
        stream = (await service.admit(ask("x" * 60))).outputs()
        with pytest.raises(OverloadedError):
            await service.admit(ask("x" * 60))
        await stream.aclose()
        stream = (await service.admit(ask("x" * 60))).outputs()
        await stream.aclose()


@pytest.mark.parametrize("state", ["starting", "stalled", "dead"])
async def test_an_engine_that_is_not_ready_takes_nothing(folder: Path, state: str) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        engine.state = state
        assert service.health().state == state
        with pytest.raises(UnavailableError, match=state):
            await service.admit(ask("abc"))


@pytest.mark.parametrize("count", [1, 3])
async def test_engine_death_reaches_every_reader(folder: Path, count: int) -> None:
    engine = FakeEngine()
    async with serving(folder, engine) as service:
        stream = (await service.admit(ask("abc", n=count))).outputs()
        await anext(stream)
        engine.die()
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        await drained(service)
        engine.state = "ready"  # not noticed yet
        with pytest.raises(UnavailableError):
            await service.admit(ask("abc", n=count))
        with pytest.raises(UnavailableError):
            await service.call("reset_prefix_cache")
        assert service.ledger.open == 0


async def test_an_engine_error_ends_its_choice_only(folder: Path) -> None:
    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        if request.work.seed == 1:
            yield RequestDelta(id=request.id, finish=FinishReason.ERROR, error="non-finite logits")
        else:
            yield from echo(request)

    async with serving(folder, FakeEngine(script)) as service:
        first, second = await answers(service, ask("abc", n=2, seed=1, max_tokens=3))
        assert (first.finish, first.error) == (FinishReason.ERROR, "non-finite logits")
        assert second.text == "abc"


async def test_an_exception_in_a_parser_ends_its_choice_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Angry(ReasoningParser):
        def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
            if delta.text == "x":
                raise RuntimeError("secret /path 0x1234")
            return [Content(delta.text)]

        def finish(self) -> Sequence[Reasoning | Content]:
            return []

    def script(request: EngineRequest) -> Iterable[RequestDelta]:
        return tokens(request, list(b"axbc" if request.work.seed == 1 else b"abc"))

    engine = FakeEngine(script)
    plugins = FakePlugins(reasoning_parser={"angry": Angry})
    caplog.set_level("ERROR")
    async with serving(folder, engine, plugins, frontend={"reasoning_parser": "angry"}) as service:
        first, second = await answers(service, ask("q", n=2, seed=1))
        assert first.finish is FinishReason.ERROR
        assert first.error is not None
        assert "secret" not in first.error
        assert (second.text, second.finish) == ("abc", FinishReason.LENGTH)
        assert (engine.requests[0].id, FinishReason.ABORT) in engine.cancels
        await drained(service)
    (fault,) = caplog.records
    assert fault.getMessage() == "plugin reasoning_parser:angry of fake 1.0 raised in feed"
    assert fault.exc_info is not None


# ------------------------------------------------------------------------------------------- parsers


class Thinks(ReasoningParser):
    """A parser by which text up to "|" is reasoning."""

    def __init__(self) -> None:
        self.over = False

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        if self.over:
            return [Content(delta.text)]
        thought, bar, said = delta.text.partition("|")
        self.over = bool(bar)
        return [Reasoning(thought), Content(said)]

    def finish(self) -> Sequence[Reasoning | Content]:
        return [] if self.over else [Reasoning("…")]


class Calls(ToolParser):
    """A parser by which text between "{" and "}" is a call of the first tool."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self.open = False
        self.ids: list[int] = []

    def constraint(self, choice: Any) -> None:
        return None

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self.ids += delta.token_ids
        events: list[Event] = []
        for character in delta.text:
            if character == "{":
                self.open = True
                events.append(CallStart(0, "c1", self.tools[0]["function"]["name"]))
            if self.open:
                events.append(CallArguments(0, character))
            else:
                events.append(Content(character))
            if character == "}":
                self.open = False
                events.append(CallEnd(0))
        return events

    def finish(self) -> Sequence[Event]:
        return [CallEnd(0)] if self.open else []


TOOLS = ({"type": "function", "function": {"name": "f"}},)


async def test_parsers_are_made_once_for_each_choice(folder: Path) -> None:
    made: list[str] = []

    class Thinking(Thinks):
        def begin(self, context: ChoiceContext) -> None:
            made.append("thoughts")

    class Calling(Calls):
        def begin(self, context: ChoiceContext) -> None:
            made.append("calls")

    plugins = FakePlugins(reasoning_parser={"thinks": Thinking}, tool_parser={"calls": Calling})
    options = {"reasoning_parser": "thinks", "tool_call_parser": "calls", "enable_auto_tool_choice": True}
    async with serving(folder, FakeEngine(text_script("a|b{}")), plugins, frontend=options) as service:
        chat = ChatPrompt(messages=({"role": "user", "content": "Hi"},), tools=TOOLS)
        request = Generate(prompts=(chat,), params=SamplingParams(n=3), tools=TOOLS, tool_choice="auto")
        found = await answers(service, request)
    assert [answer.calls for answer in found] == [(ToolCall("c1", "f", "{}"),)] * 3
    assert made == ["thoughts", "calls"] * 3


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_chain_folds_the_same_for_every_cut(size: int) -> None:
    chain = ParseChain(Parsers(Thinks, Calls), TOOLS)
    text = 'why|so {"a": 1} then'
    events: list[Event] = []
    for start in range(0, len(text), size):
        events += chain.feed(text[start : start + size], (start,))
    events += chain.finish()
    (answer,) = fold([Output(index=0, events=tuple(events))])
    assert answer.reasoning == "why"
    assert answer.text == "so  then"
    assert answer.calls == (ToolCall("c1", "f", '{"a": 1}'),)


def test_the_chain_joins_events_and_drops_empty_ones() -> None:
    chain = ParseChain(Parsers(Thinks, Calls), TOOLS)
    assert chain.feed("ab|cd", (1,)) == (Reasoning("ab"), Content("cd"))
    assert chain.feed("", (2,)) == ()
    unfinished = ParseChain(Parsers(Thinks), None)
    assert unfinished.feed("ab") == (Reasoning("ab"),)
    assert unfinished.finish() == (Reasoning("…"),)
    assert ParseChain(Parsers(None, Calls), None).feed("{}") == (Content("{}"),)  # no tools, no calls
    assert ParseChain(Parsers(), TOOLS).feed("") == ()


async def test_a_reasoning_parser_is_chosen_by_name(folder: Path) -> None:
    plugins = FakePlugins(reasoning_parser={"thinks": Thinks})
    async with serving(
        folder, FakeEngine(text_script("why|so")), plugins, frontend={"reasoning_parser": "thinks"}
    ) as service:
        (answer,) = await answers(service, ask("q"))
        assert (answer.reasoning, answer.text) == ("why", "so")


# ------------------------------------------------------------------------------------------- figures


async def test_stat_loggers_hear_of_everything(folder: Path) -> None:
    recorder = type("R", (Recorder,), {"seen": []})
    plugins = FakePlugins(stat_logger={"r": recorder})
    engine = FakeEngine()
    engine.figures = EngineStats(running=3)
    async with serving(folder, engine, plugins) as service:
        await outputs(service, ask("abc", n=2, max_tokens=4))
        stream = (await service.admit(ask("abc"))).outputs()
        await stream.aclose()
        await drained(service)
        media_type, text = service.exposition()
    assert (media_type, text[:6]) == ("text/plain", "events")
    assert recorder.seen.count(("tokens", True, 1)) == 2
    assert recorder.seen.count(("tokens", False, 1)) == 6
    finished = [entry[1] for entry in recorder.seen if entry[0] == "finish"]
    assert [stats.finish for stats in finished] == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ABORT]
    assert finished[0].generation_tokens == 4
    assert finished[0].prompt_tokens == 3
    assert finished[0].n == 2
    assert 0 < finished[0].time_to_first_token <= finished[0].end_to_end
    assert [stats.longest for stats in finished] == [None, 4, 0]
    assert {stats.called_tools for stats in finished} == {None}
    counted = replace(engine.figures, choice_prompt_tokens=6, choice_generation_tokens=8)
    assert ("engine", counted) in recorder.seen
    recorder.seen.clear()
    call = HttpStats(route="/x", method="GET", status=200, seconds=0.1, received=0, sent=2)
    async with serving(folder, engine, plugins, observability={"disable_log_stats": True}) as service:
        await outputs(service, ask("abc", max_tokens=4))
        service.answered(call)
        assert service.exposition()[1] == "events 1"
    assert recorder.seen == [("http", call)]


@pytest.mark.parametrize(
    ("others", "text"),
    [(("text/plain", "more 2\n"), "some 1\nmore 2\n"), (("application/json", "{}"), "some 1\n"), (None, "some 1\n")],
)
async def test_the_metrics_of_all_loggers_of_one_media_type_are_joined(folder: Path, others: Any, text: str) -> None:
    loggers = {
        name: type("L", (Recorder,), {"seen": [], "exposition": lambda self, shown=shown: shown})
        for name, shown in {"one": ("text/plain; version=1", "some 1\n"), "two": others}.items()
    }
    async with serving(folder, FakeEngine(), FakePlugins(stat_logger=loggers)) as service:
        assert service.exposition() == ("text/plain; version=1", text)


async def test_a_stat_logger_that_raises_is_disabled_after_three_times(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raises(Recorder):
        seen: list[Any] = []

        def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
            self.seen.append(first)
            raise RuntimeError("no room")

    async with serving(folder, FakeEngine(), FakePlugins(stat_logger={"r": Raises})) as service:
        assert len(await outputs(service, ask("abc", max_tokens=10))) == 10
    assert len(Raises.seen) == 3
    told = [record for record in caplog.records if record.name == "ferrule.plugin"]
    assert [record.getMessage() for record in told] == [
        "plugin stat_logger:r of fake 1.0 raised in on_tokens (1 of 3)",
        "plugin stat_logger:r of fake 1.0 raised in on_tokens (2 of 3)",
        "plugin stat_logger:r of fake 1.0 raised in on_tokens (3 of 3)",
        "plugin stat_logger:r of fake 1.0 is disabled after 3 faults",
    ]
    assert all("no room" in str(record.exc_info) for record in told[:3])


async def test_the_background_work_reports_and_warms_up(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = type("R", (Recorder,), {"seen": []})
    async with serving(folder, FakeEngine(), FakePlugins(stat_logger={"r": recorder})) as service:
        service.start()
        while not (recorder.seen and service.child_pids):
            await asyncio.sleep(0.01)


async def test_a_broken_template_of_a_checkpoint_fails_conversations_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fail conversations only; a broken template of --chat-template stops the start instead."""

    class Broken(ByteTokenizers):
        def open(self, folder: Path, options: dict[str, Any]) -> ByteTokenizer:
            return ByteTokenizer("{% for %}")

    plugins = FakePlugins(tokenizer={"auto": Broken})
    async with serving(folder, FakeEngine(), plugins, frontend={"chat_template": None}) as service:
        service.start()
        await until(lambda: "the chat template cannot be used" in caplog.text)
        with pytest.raises(RequestError, match="syntax error"):
            await service.tokenize(ChatPrompt(messages=({"role": "user", "content": "Hi"},)))


async def test_requests_are_logged_unless_told_otherwise(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ferrule")

    def logged() -> list[dict[str, Any]]:
        return [record.ferrule_fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]

    async with serving(folder, FakeEngine()) as service:
        await outputs(service, ask("abc", max_tokens=1))
    (entry,) = logged()
    assert (entry["prompt_tokens"], "prompt" in entry) == (3, False)
    caplog.clear()
    async with serving(folder, FakeEngine(), frontend={"max_log_len": 2, "enable_log_requests": True}) as service:
        await outputs(service, ask("abc", max_tokens=1))
        await outputs(service, ask([65, 66, 67], max_tokens=1))
    assert [entry["prompt"] for entry in logged()] == ["ab", (65, 66)]
    async with serving(folder, FakeEngine(), frontend={"disable_log_requests": True}) as service:
        await outputs(service, ask("abc", max_tokens=1))
    assert len(logged()) == 2


async def test_guesses_of_a_request_are_logged_at_its_end(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ferrule")

    def script(request: EngineRequest) -> Iterator[RequestDelta]:
        for number, delta in enumerate(echo(request)):
            yield replace(delta, guesses=Guesses(number, 3 * number, (number, 1)) if number else None)

    for quiet in (False, True):
        async with serving(folder, FakeEngine(script), frontend={"disable_log_requests": quiet}) as service:
            found = await outputs(service, ask("abc", max_tokens=4))
            await outputs(service, ask("abc", max_tokens=1))  # without guesses
    assert found[-1].guesses == Guesses(3, 9, (3, 1))
    told = [each.ferrule_fields for each in caplog.records if each.getMessage() == "guesses of a request"]  # type: ignore[attr-defined]
    assert [{name: each[name] for name in ("output_tokens", "guesses", "held")} for each in told] == [
        {"output_tokens": 4, "guesses": 9, "held": 4}
    ]


async def test_64_streams_at_once(folder: Path) -> None:
    async with serving(folder, FakeEngine(info=fake_info(max_model_len=256))) as service:
        prompts = [f"prompt {number} é🙂 " for number in range(64)]
        found = await asyncio.gather(*(answers(service, ask(prompt, max_tokens=100)) for prompt in prompts))
        assert [answer.text for (answer,) in found] == [
            ByteTokenizer().decode((list(prompt.encode()) * 20)[:100]) for prompt in prompts
        ]
        assert service.ledger.open == 0
