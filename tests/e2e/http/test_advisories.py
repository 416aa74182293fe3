"""What published advisories did to other servers, done to this one: nobody else notices, and nothing is told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ferrule_testkit import server as servers
from tests.e2e.http.test_hostile import JSON, TALK, check, victim

ASK: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
CHAT: dict[str, Any] = {"model": "tiny", "messages": TALK, "max_tokens": 2, "temperature": 0}


@pytest.fixture
async def http(server: servers.Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as found:
        yield found


@pytest.fixture(scope="session")
def vocabulary(tiny_llama: Path) -> int:
    """Return how many logits the model has."""
    return int(json.loads((tiny_llama / "config.json").read_text())["vocab_size"])


# ------------------------------------------------------------------------------------------------ ids and numbers


@pytest.mark.advisory("CVE-2026-71486")
async def test_giant_and_foreign_lists_of_ids_are_not_turned_into_text(
    http: httpx.AsyncClient, vocabulary: int
) -> None:
    async with victim(http):
        answer = await http.post("/detokenize", content=b'{"tokens": [' + b"5," * 2_999_999 + b"5]}", headers=JSON)
        assert answer.status_code == 400
        check(answer, None, "three million ids")
        with contextlib.suppress(httpx.TransportError):  # closed before all of it was sent
            answer = await http.post("/detokenize", content=b'{"tokens": [' + b"5," * 9_999_999 + b"5]}", headers=JSON)
        assert answer.status_code == 400
        for token in (-1, vocabulary, 2**31, 2**63 - 1):
            answer = await http.post("/detokenize", json={"tokens": [5, token]})
            assert answer.status_code == 400, token
            check(answer, "tokens", token)
        assert (await http.post("/detokenize", json={"tokens": [0, vocabulary - 1]})).status_code == 200


@pytest.mark.advisory("vllm-issue-54195")
async def test_ids_at_the_borders_of_the_vocabulary(http: httpx.AsyncClient, vocabulary: int) -> None:
    """Accept the last id, and not the next one; with `min_tokens` stop tokens are masked until then."""

    def bodies(token: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for field in ("stop_token_ids", "allowed_token_ids"):
            yield field, {field: [token], "min_tokens": 2}
        for bias in (-100, 100):
            yield "logit_bias", {"logit_bias": {str(token): bias}, "min_tokens": 2}
        yield "prompt", {"prompt": [5, token]}

    async with victim(http):
        for token in (0, vocabulary - 1):
            for field, body in bodies(token):
                answer = await http.post("/v1/completions", json={**ASK, **body})
                assert answer.status_code == 200, (field, token, answer.text)
        for token in (-1, vocabulary, 2**31, 2**63):
            for field, body in bodies(token):
                answer = await http.post("/v1/completions", json={**ASK, **body})
                assert answer.status_code == 400, (field, token, answer.text)
                check(answer, field, token)


@pytest.mark.advisory("CVE-2026-105922")
async def test_penalties_at_both_ends_over_every_id(http: httpx.AsyncClient, vocabulary: int) -> None:
    ends = {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (1e-6, 5)}
    prompts = [[0, 1, 2, vocabulary - 1], [vocabulary - 1] * 60, [0] * 60]  # special tokens have the first and last ids
    async with victim(http):
        for values in itertools.product(*ends.values()):
            body = {**ASK, **dict(zip(ends, values, strict=True)), "prompt": prompts, "logprobs": 3}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert [choice["finish_reason"] for choice in answer.json()["choices"]].count("error") == 0


@pytest.mark.advisory("CVE-2026-114051")
async def test_more_tokens_at_least_than_can_come(http: httpx.AsyncClient) -> None:
    for path, base in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT), ("/invocations", CHAT)):
        for least, most in ((257, None), (2**62, None), (5, 4)):
            answer = await http.post(path, json={**base, "max_tokens": most, "min_tokens": least})
            assert answer.status_code == 400, (path, least, answer.text)
            check(answer, "min_tokens", least)
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200


OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True},
    "stop": {"stop": ["a", "e", " "]},
    "stop_token_ids": {"stop_token_ids": list(range(3, 250))},
    "min_tokens": {"min_tokens": 4, "ignore_eos": True},
    "penalties": {"repetition_penalty": 5, "presence_penalty": 2, "frequency_penalty": -2},
    "noise": {"temperature": 1e6, "top_p": 1e-9, "min_p": 1.0, "seed": -1},
    "top_k": {"temperature": 1, "top_k": 1},
    "bias": {"logit_bias": {"9": 100, "10": -100}},
    "allowed": {"allowed_token_ids": [3, 9]},
    "bad_words": {"bad_words": ["a", " "]},
    "choices": {"n": 3, "temperature": 1},
    "best_of": {"n": 2, "best_of": 3, "temperature": 1},
    "beams": {"use_beam_search": True, "n": 2},
    "regex": {"guided_regex": "[0-9]+"},
    "ids": {"return_token_ids": True, "detokenize": False},
    "embeds": {"prompt": None, "prompt_embeds": "AAAA"},
    "stream": {"stream": True},
}


FORBIDDING = {"allowed", "bad_words", "min_tokens", "stop_token_ids", "regex"}


@pytest.mark.advisory("PYSEC-2026-2303", "CVE-2026-44223", "llama.cpp-7038")
async def test_no_two_options_together_are_the_servers_fault(http: httpx.AsyncClient) -> None:
    """Combine all options: the first token may be a stop word whose logprobs were asked for; every list may leave
    nothing to choose.
    """

    async def ask(one: str, two: str) -> None:
        answer = await http.post("/v1/completions", json={**ASK, **OPTIONS[one], **OPTIONS[two]})
        if "No token is allowed" in answer.text:  # the two of them contradict each other at the first token
            assert answer.status_code == 400
            assert {one, two} & FORBIDDING, (one, two)
        assert answer.status_code in {200, 400, 403}, (one, two, answer.text)
        check(answer, None, one)

    pairs = list(itertools.combinations(OPTIONS, 2))
    async with victim(http):
        for at in range(0, len(pairs), 16):
            await asyncio.gather(*(ask(*pair) for pair in pairs[at : at + 16]))


# ------------------------------------------------------------------------------------------------ names and texts


@pytest.mark.advisory("CVE-2026-105756")
async def test_salts_of_any_kind(http: httpx.AsyncClient) -> None:
    salts: list[tuple[Any, set[int]]] = [
        *[(salt, {200}) for salt in ("a", "a" * 256, "../../etc/passwd", "a b", "%00")],
        *[(salt, {400}) for salt in ("", "a" * 257, "a" * 1_000_000, "a\0", "\n", "\x7f", 5, [], {}, True)],
        *[(salt, {200, 400}) for salt in ("é", "\u202e", "🙂" * 64)],
    ]
    async with victim(http):
        for salt, status in salts:
            for path, base in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
                answer = await http.post(path, json={**base, "cache_salt": salt})
                assert answer.status_code in status, (path, str(salt)[:20], answer.text)
                check(answer, "cache_salt", salt)


@pytest.mark.advisory("CVE-2026-105755")
async def test_requests_that_share_an_id_get_their_own_answers(http: httpx.AsyncClient) -> None:
    prompts = [[5, 6, 7 + number] for number in range(8)]

    async def ask(prompt: list[int], **more: Any) -> Any:
        body = {**ASK, "prompt": prompt, "logprobs": 2, **more}
        return (await http.post("/v1/completions", json=body, headers={"x-request-id": "victims"})).json()["choices"]

    alone = [await ask(prompt) for prompt in prompts]
    assert len({json.dumps(each) for each in alone}) > 1
    for _ in range(4):
        together = await asyncio.gather(*(ask(prompt, request_id="victims") for prompt in prompts))
        assert list(together) == alone


RESERVED = (
    *("tokenize", "chat_template", "messages", "conversation", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "return_tensors", "return_dict", "tokenizer_kwargs", "padding", "truncation"),
    *("trust_remote_code", "code_revision", "revision", "cache_dir", "token", "subfolder", "self", "bos_token"),
    *("raise_exception", "strftime_now", "namespace", "range", "__class__"),
)
MUST_BE_REFUSED = {"tokenize", "chat_template", "messages", "tools", "documents", "add_generation_prompt", "bos_token"}


@pytest.mark.advisory("CVE-2026-114053", "CVE-2025-62426", "PYSEC-2026-4349", "CVE-2026-105758")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/invocations"])
async def test_names_of_the_renderer_are_not_variables_of_a_request(http: httpx.AsyncClient, path: str) -> None:
    """Refuse names that the renderer has; others are variables, which only a template could read."""
    base = CHAT if path != "/tokenize" else {"model": "tiny", "messages": TALK}
    plain = (await http.post(path, json=base)).json()
    for name in RESERVED:
        body = {**base, "chat_template_kwargs": {name: "{{ 1 }}"}}
        answer = await http.post(path, json=body)
        check(answer, "chat_template_kwargs", name)
        if name in MUST_BE_REFUSED or answer.status_code != 200:
            assert answer.status_code == 400, (name, answer.text)
        else:
            kept = ("tokens",) if path == "/tokenize" else ("choices", "usage")
            assert [answer.json()[key] for key in kept] == [plain[key] for key in kept], name
        answer = await http.post(path, json={**base, "mm_processor_kwargs": {name: "x"}})
        assert answer.status_code in {200, 400}
        if answer.status_code == 200:
            assert "mm_processor_kwargs" in answer.headers["x-ferrule-ignored-fields"]


@pytest.mark.advisory("CVE-2025-46560", "CVE-2026-44222")
async def test_special_tokens_in_texts_of_users(http: httpx.AsyncClient, tiny_llama: Path) -> None:
    file = json.loads((tiny_llama / "tokenizer.json").read_text())
    special = [token["content"] for token in file["added_tokens"]] + ["<image>", "<|image_pad|>", "<|audio|>"]
    assert len(special) > 3
    async with victim(http):
        for token in special:
            for text in (token, token * 1000):
                for path, body in (
                    ("/v1/completions", {**ASK, "prompt": text, "stop": [text[:500]], "bad_words": [text[:200]]}),
                    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}),
                    ("/tokenize", {"prompt": text}),
                ):
                    answer = await http.post(path, json=body)
                    assert answer.status_code in {200, 400}, (path, token, answer.text)
                    check(answer, None, text)


# ------------------------------------------------------------------------------------------------ addresses


@contextmanager
def canary() -> Iterator[tuple[int, list[int]]]:
    """Open a listener that nobody must connect to; yield its port, and those who did."""
    came: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def wait() -> None:
            while True:
                try:
                    found, _ = listener.accept()
                except OSError:
                    return
                came.append(1)
                found.close()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield port, came
        finally:
            with socket.create_connection(("127.0.0.1", port)):  # it hears what comes
                assert servers.until(lambda: came)
            came.pop()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def urls(port: int) -> Iterator[str]:
    for host in (
        "127.0.0.1",
        "localhost",
        "2130706433",
        "017700000001",
        "0x7f000001",
        "[::ffff:127.0.0.1]",
        "0",
        "[::]",
    ):
        yield f"http://{host}:{port}/a.png"
    for host in (
        "127.0.0.1.",
        "a@127.0.0.1",
        "example.com\\@127.0.0.1",
        "127.1",
        "１２７.0.0.1",
        "127.0.0.1%00.a.example",
    ):
        yield f"http://{host}:{port}/a.png"
    yield from (f"//127.0.0.1:{port}/a", f"ftp://127.0.0.1:{port}/a", f"gopher://127.0.0.1:{port}/_a")
    yield from ("file:///etc/passwd", "data:image/png;base64,AAAA", f"data:text/plain,http://127.0.0.1:{port}/")


def parts(url: str) -> Iterator[dict[str, Any]]:
    for kind in ("image_url", "audio_url", "video_url"):
        yield {"type": kind, kind: {"url": url}}
        yield {"type": kind, kind: url}
        yield {kind: url}
    yield {"type": "input_image", "image_url": url}
    yield {"type": "image", "image": url}
    yield {"type": "image_embeds", "image_embeds": "AAAA"}
    yield {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}
    yield {"type": "file", "file": {"file_data": url}}


@pytest.mark.advisory(
    "CVE-2026-56340",
    "CVE-2025-6242",
    "CVE-2026-116176",
    "CVE-2026-34755",
    "CVE-2026-54233",
    "CVE-2026-130686",
    "CVE-2026-22773",
    "CVE-2026-34760",
    "CVE-2025-67729",
    "CVE-2026-0599",
)
async def test_no_address_in_a_request_is_connected_to(http: httpx.AsyncClient) -> None:
    with canary() as (port, came):
        first, *_ = every = list(urls(port))
        turn = itertools.cycle(range(len([*parts(first)])))
        for url in every:
            headers = {"x-request-id": f"127.0.0.1:{port}", "x-kv-address": f"tcp://127.0.0.1:{port}"}
            for part in parts(url) if url == first else itertools.islice(parts(url), next(turn), None, 99):
                body = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
                for path in ("/v1/chat/completions", "/tokenize"):
                    answer = await http.post(path, json=body, headers=headers)
                    assert answer.status_code == 400, (path, part, answer.text)
                    check(answer, "messages[0].content[0]", part)
        many = [
            {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/{number}"}} for number in range(500)
        ]
        answer = await http.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": many}]})
        assert answer.status_code == 400
        assert came == []


@pytest.mark.advisory("CVE-2024-9052", "CVE-2025-47277", "CVE-2025-30202", "CVE-2025-66455")
def test_nothing_listens_but_the_http_port(server: servers.Server) -> None:
    root = psutil.Process(server.process.pid)
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in (root, *root.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and connection.laddr)
    }
    assert listening == {("127.0.0.1", server.port)}


# ------------------------------------------------------------------------------------------------ routes and metrics

ABSENT = (
    *("/update_weights_from_tensor", "/update_weights_from_disk", "/update_weights", "/init_weights_update_group"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/files", "/api/pull", "/api/create", "/models"),
    *("/inference/v1/generate", "/v1/embeddings", "/pooling", "/v1/score", "/v1/audio/transcriptions"),
    *("/kv_transfer", "/set_log_level", "/v2/logging", "/v2/systemsharedmemory/region/a/register", "/jobs"),
)


@pytest.mark.advisory("CVE-2026-54233", "CVE-2026-105754", "CVE-2025-10164", "CVE-2025-23310", "CVE-2023-43654")
async def test_routes_that_load_or_write_what_a_caller_names_are_not_there(http: httpx.AsyncClient) -> None:
    for path in ABSENT:
        for method in ("POST", "GET", "PUT"):
            answer = await http.request(method, path, json={"path": "/etc/passwd", "url": "http://127.0.0.1:1/"})
            assert answer.status_code == 404, (method, path, answer.text)
            check(answer, None, path)


async def series(http: httpx.AsyncClient) -> set[str]:
    text = (await http.get("/metrics")).text
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


@pytest.mark.advisory("PYSEC-2026-4325")
async def test_metrics_have_no_name_that_a_caller_made_up(http: httpx.AsyncClient) -> None:
    async def odd(number: int) -> None:
        await http.request(f"M{number}", f"/nowhere/{number}", headers={"host": f"h{number}"})
        await http.post("/v1/completions", json={**ASK, "model": f"m{number}"}, headers={"user-agent": f"u{number}"})

    await odd(0)
    await http.post("/v1/completions", json={**ASK, "max_tokens": 1})
    await series(http)
    before = await series(http)
    for at in range(1, 61, 20):
        await asyncio.gather(*(odd(number) for number in range(at, at + 20)))
    assert await series(http) == before
    assert not [name for name in before if re.search(r"M0|/nowhere|m0|u0", name)]
