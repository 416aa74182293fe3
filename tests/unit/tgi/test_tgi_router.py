"""TGI's routes over a scripted service: the kit, fields, answers, streams, failures; and Hugging Face's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from ferrule.config import LimitsConfig
from ferrule.errors import OverloadedError, RequestError, RequestFailed, UnavailableError
from ferrule.interfaces.service import Content, Generate, Output, Usage
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_testkit import server as servers
from ferrule_testkit.kits import RouterKit
from ferrule_tgi.router import Tgi
from ferrule_tgi.schema import Parameters
from tests.fakes.http import Site
from tests.unit.plugins.router.test_openai import WRONG

ASK: dict[str, Any] = {"inputs": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class TestKit(RouterKit):
    plugin = Tgi
    calls = (
        ("POST", "/generate", {"inputs": "hello", "parameters": {"details": True, "decoder_input_details": True}}),
        ("POST", "/generate_stream", {"inputs": "hello", "parameters": {"details": True}}),
        ("POST", "/", {"inputs": "hello", "stream": True}),
        ("GET", "/info", None),
    )


def site(**options: Any) -> Site:
    return Site(routers=("+tgi",), **options)


async def send(at: Site, path: str = "/generate", **parameters: Any) -> httpx.Response:
    return await at.http.post(path, json=ASK | {"parameters": parameters})


def error_of(response: httpx.Response, status: int = 400, kind: str = "validation") -> str:
    """Return the error of an answer that must be one, in TGI's form."""
    found = response.json()
    assert response.status_code == status, response.text
    assert (set(found), found["error_type"]) == ({"error", "error_type"}, kind)
    return str(found["error"])


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.removeprefix("data: ")) for block in response.text.strip().split("\n\n")]


@pytest.mark.parametrize("field", sorted(Parameters.model_fields))
async def test_no_value_of_any_parameter_is_our_fault(field: str) -> None:
    at = site()
    grammars = [{"type": "json", "value": 5}, {"type": "regex", "value": "(" * 100}, {"type": "json_schema"}]
    for value in [*WRONG, "a" * 20_000, *grammars, {"type": "json_schema", "value": {"schema": []}}]:
        for path in ("/generate", "/generate_stream", "/"):
            response = await send(at, path, **{field: value})
            if response.status_code != 200:
                unknown = field == "adapter_id" and response.status_code == 404
                assert "aaaaaaaa" not in error_of(response, 404 if unknown else 400)
    assert (await send(at, **{field: None})).status_code == 200


async def test_parameters_reach_the_service() -> None:
    at = site()
    at.service.defaults = {"temperature": 0.7, "top_k": 3}
    for asked, temperature, top_k in (
        ({}, 0, 3),
        ({"do_sample": True}, 0.7, 3),
        ({"temperature": 0.5}, 0.5, 3),
        ({"temperature": 1.0}, 0, 3),
        ({"temperature": 0, "do_sample": True}, 0, 3),
        ({"top_k": 5}, 0.7, 5),
        ({"top_p": 0.5, "temperature": 2}, 2, 3),
    ):
        await send(at, **asked)
        assert (at.last.params.temperature, at.last.params.top_k) == (temperature, top_k), asked
    assert (at.last.params.max_tokens, at.last.raw, at.last.params.logprobs) == (100, True, None)
    await send(at, stop=["x"], truncate=3, seed=4, repetition_penalty=1.5, max_new_tokens=7, details=True)
    params = at.last.params
    assert (params.stop, params.include_stop_str_in_output, params.truncate_prompt_tokens) == (["x"], True, 3)
    assert (params.seed, params.repetition_penalty, params.max_tokens, params.logprobs) == (4, 1.5, 7, 0)
    for grammar in (
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}},
    ):
        await send(at, grammar=grammar)
        assert at.last.grammar is not None
        assert at.last.grammar.form.schema == SCHEMA  # type: ignore[union-attr]
    await send(at, grammar={"type": "regex", "value": "[a-z]+"})
    assert at.last.grammar is not None
    assert at.last.grammar.form.pattern == "[a-z]+"  # type: ignore[union-attr]


async def test_what_is_refused_and_what_is_told() -> None:
    at = site()
    assert "watermarks" in error_of(await send(at, watermark=True))
    assert "no such model" in error_of(await send(at, adapter_id="a"), 404)
    await at.service.load_adapter("a", "/a")
    assert (await send(at, adapter_id="a")).status_code == 200
    assert at.last.model == "a"
    assert "do_sample" in error_of(await send(at, best_of=2))
    for field in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True, "details": True}):
        assert "cannot be streamed" in error_of(await send(at, "/generate_stream", **field))
    error_of(await at.http.post("/generate", json={"inputs": ""}))
    error_of(await at.http.post("/generate", content=b"{"))
    told = await at.http.post("/generate", json=ASK | {"colour": 1, "parameters": {"typical_p": 0.5}})
    assert told.headers["x-ferrule-ignored-fields"] == "parameters.typical_p, colour"
    assert len(told.json()["ferrule"]["warnings"]) == 2
    assert "typical" in error_of(await send(site(strict_requests=True), typical_p=0.5))


async def test_whole_answers() -> None:
    at = site()
    assert (await send(at)).json() == {"generated_text": "hello"}
    assert (await send(at, return_full_text=True)).json() == {"generated_text": "hellohello"}
    assert (await send(at, "/")).json() == [{"generated_text": "hello"}]
    details = (await send(at, details=True, max_new_tokens=2, top_n_tokens=1, seed=3)).json()["details"]
    first = {"id": 104, "text": "h", "logprob": -0.5, "special": False}
    assert details["tokens"][0] == first
    assert details["top_tokens"][0] == [{"id": 65, "text": "A", "logprob": -1.0, "special": False}]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 2, 3)
    assert details["prefill"] == []


async def test_the_likeliest_of_several_comes_first() -> None:
    def script(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
        entry = TokenLogprobs(97 + index, -abs(index - 1.0), 1, ())
        told = Output(index=index, events=(Content(chr(97 + index)),), token_ids=(97 + index,), logprobs=(entry,))
        end = Output(index=index, finish=FinishReason.STOP, stop_reason="x", usage=Usage(completion_tokens=1))
        return [told, end]

    at = site()
    at.service.script = script
    answer = (await send(at, best_of=3, do_sample=True, details=True)).json()
    assert answer["generated_text"] == "b"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert sorted(one["generated_text"] for one in answer["details"]["best_of_sequences"]) == ["a", "c"]
    at.service.script = script
    *_, last = events_of(await send(at, "/generate_stream"))  # the end came without a token
    assert (last["generated_text"], last["token"]["special"], last["token"]["text"]) == ("a", True, "")


@pytest.mark.parametrize("held", [1, 2, 5])
async def test_texts_of_tokens_make_up_the_text(held: int) -> None:
    """Join the texts of a stream's tokens, however many tokens an output has, and where the text comes late."""

    def script(request: Generate, index: int, ids: tuple[int, ...]) -> list[Output]:
        text, found = "abcde", []
        for start in range(0, len(text), held):
            piece = text[start : start + held]
            entries = tuple(TokenLogprobs(ord(char), -0.5, 1, ()) for char in piece)
            found.append(
                Output(
                    index=index,
                    events=(Content(text[max(0, start - 1) : start + len(piece) - 1]),),  # a character is held back
                    token_ids=tuple(map(ord, piece)),
                    logprobs=entries,
                    token_offsets=tuple(range(start, start + len(piece))),
                )
            )
        usage = Usage(prompt_tokens=5, completion_tokens=5)
        end = Output(index=index, events=(Content("e"),), finish=FinishReason.STOP, usage=usage)
        return [*found, end]

    at = site()
    at.service.script = script
    found = events_of(await send(at, "/generate_stream", details=True, return_full_text=True))
    texts = [event["token"]["text"] for event in found if not event["token"]["special"]]
    assert "".join(texts) == "abcde"
    assert [event["index"] for event in found] == list(range(1, len(found) + 1))
    assert [event["generated_text"] for event in found] == [None] * (len(found) - 1) + ["helloabcde"]
    end = {"finish_reason": "eos_token", "generated_tokens": 5, "input_length": 5, "seed": None}
    assert found[-1]["details"] == end


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (OverloadedError("The queue is full."), 429, "overloaded"),
        (UnavailableError("The server is starting."), 503, "overloaded"),
        (RequestFailed("It failed."), 500, "generation"),
    ],
)
async def test_failures_before_and_within_a_stream(failure: Any, status: int, kind: str) -> None:
    at = site()
    at.service.refusal = failure
    assert error_of(await send(at), status, kind) == failure.message
    at.service.refusal, at.service.failure = None, failure
    assert events_of(await send(at, "/generate_stream"))[-1] == {"error": failure.message, "error_type": kind}


async def test_without_the_distribution_s_router_the_paths_say_what_to_do() -> None:
    response = await Site().http.post("/generate", json=ASK)
    assert response.status_code == 404
    assert "--routers +tgi" in response.text


# ------------------------------------------------------------------------------------------------ a real server


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceClient]:
    log = tmp_path_factory.mktemp("server") / "log"
    args = ("--routers", "+tgi", "--dtype", "float32", "--num-gpu-blocks-override", "512", "--api-key", "sk-test")
    with servers.running(args, log, {"OMP_NUM_THREADS": "1"}) as running:
        yield InferenceClient(base_url=running.url, token="sk-test", timeout=240)


def test_hugging_face_s_client(client: InferenceClient) -> None:
    text = client.text_generation("1, 2, 3,", max_new_tokens=8)
    assert "".join(client.text_generation("1, 2, 3,", max_new_tokens=8, stream=True)) == text
    whole = client.text_generation("1, 2, 3,", max_new_tokens=8, details=True, decoder_input_details=True)
    assert whole.details is not None
    assert "".join(token.text for token in whole.details.tokens if not token.special) == whole.generated_text == text
    assert (whole.details.prefill[0].logprob, whole.details.finish_reason) == (None, "length")
    *_, last = client.text_generation("1, 2, 3,", max_new_tokens=8, details=True, stream=True)
    assert last.details is not None
    assert (last.generated_text, last.details.input_length) == (text, len(whole.details.prefill))
    full = client.text_generation("1, 2, 3,", max_new_tokens=8, return_full_text=True)
    assert full == "1, 2, 3," + text
    stopped = client.text_generation("1, 2, 3,", max_new_tokens=8, stop=[text[2:4]], details=True)
    assert stopped.details is not None
    assert (stopped.generated_text, stopped.details.finish_reason) == (text[:4], "stop_sequence")
    best = client.text_generation("1,", max_new_tokens=4, best_of=3, do_sample=True, seed=1, details=True)
    assert best.details is not None
    assert len(best.details.best_of_sequences or ()) == 2
    grammar: Any = {"type": "regex", "value": "[0-9]{3}"}
    assert client.text_generation("Say: ", max_new_tokens=20, grammar=grammar).isdigit()
    with pytest.raises(ValidationError, match="temperature"):
        client.text_generation("1,", temperature=-1.0)


async def test_refusals_of_the_service_have_the_names_of_this_protocol() -> None:
    at = site()
    for name, told in (("n", "best_of"), ("top_k", "top_k"), ("truncate_prompt_tokens", "truncate")):
        at.service.refusal = RequestError(f"{name} must be smaller.", name)
        assert error_of(await send(at)) == f"parameters.{told} must be smaller."
    assert at.service.refusal.message == "truncate_prompt_tokens must be smaller."


async def test_a_wrong_method_is_told_the_right_one() -> None:
    """Say so of routes, too, for which servers without this router have advice."""
    answer = await site().http.get("/generate")
    assert (error_of(answer, 405), answer.headers["allow"]) == ("This route takes POST.", "POST")


async def test_info_has_the_limits_of_the_server() -> None:
    found = (await site().http.get("/info")).json()
    assert (found["max_best_of"], found["max_total_tokens"]) == (LimitsConfig().max_n, 256)
