"""Traces of real servers: spans of HTTP requests, with what another process has measured, at a real collector."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ferrule_testkit import server as servers
from tests.otlp_collector import Collector, Received, grpc_collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GUIDED = {"structured_outputs": {"regex": "[a-z]+"}}
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture(scope="module")
def traced(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Collector, list[httpx.Response]]:
    """Serve a chat, a completion of two choices, a refusal and one after which the server ends at once."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with grpc_collector() as collector:
        args = [str(tiny_llama), "--dtype", "float32", "--served-model-name", "tiny", "--chat-template", str(template)]
        args += [
            *servers.FEW_ROUTES,
            "--otlp-traces-endpoint",
            collector.endpoint,
            "--collect-detailed-traces",
            "model,worker",
        ]
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True}
        with servers.running(args, tmp_path_factory.mktemp("traced") / "log", {"OMP_NUM_THREADS": "1"}) as server:
            with httpx.Client(base_url=f"{server.url}/v1", timeout=240) as client:
                answers = [
                    client.post("/chat/completions", json=chat, headers=HEADERS),
                    client.post("/completions", json={"prompt": "a", "n": 2, "max_tokens": 3, **GUIDED}),
                    client.post("/completions", json={"prompt": "a", "stop_token_ids": [1 << 30]}, headers=HEADERS),
                    client.post("/chat/completions", json={**chat, "stream": True, "temperature": 0}),
                ]
            assert server.stop() == 0
    return collector, answers


def check_order(request: Received, phases: list[Received]) -> None:
    """Check that phases lie within the request, one after another."""
    for before, after in zip(phases, phases[1:], strict=False):
        assert before.end <= after.start
    assert request.start <= phases[0].start
    assert phases[-1].end <= request.end


def test_a_chat_continues_the_clients_trace(traced: tuple[Collector, list[httpx.Response]]) -> None:
    collector, answers = traced
    chat = collector.requests(4)[0]
    assert (chat.trace_id, chat.parent) == (TRACE, SPAN)
    phases = collector.children(chat)
    assert [each.name for each in phases] == ["render", "tokenize", "queue", "prefill", "decode", "parse"]
    check_order(chat, phases)
    told, usage = chat.attributes, answers[0].json()["usage"]
    assert told["gen_ai.request.id"] == answers[0].json()["id"]
    assert told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (usage["prompt_tokens"], 6)
    assert told["gen_ai.response.finish_reasons"] == ["length"]


def test_the_engine_has_measured_its_steps(traced: tuple[Collector, list[httpx.Response]]) -> None:
    for request in (each for each in traced[0].requests(4) if not each.status):
        times = {name.removeprefix("gen_ai.latency."): value for name, value in request.attributes.items()}
        assert 0 < times["time_in_model_forward"] < times["time_in_model_execute"] <= times["time_in_model_inference"]
        assert 0 < times["time_in_scheduler"] < times["e2e"]


def test_choices_refusals_and_the_last_request_are_sent(traced: tuple[Collector, list[httpx.Response]]) -> None:
    collector, answers = traced
    _, several, refused, last = collector.requests(4)
    assert several.attributes["gen_ai.request.n"] == 2
    assert sum(each.name == "decode" for each in collector.children(several)) == 2
    assert sum(each.name == "compile" for each in collector.children(several)) == 1
    assert answers[2].status_code == 400
    assert (refused.trace_id, refused.status) == (TRACE, 2)
    assert refused.message == answers[2].json()["error"]["message"]
    assert last.attributes["gen_ai.request.temperature"] == 0
