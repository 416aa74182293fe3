"""Twenty small requests, what each came to, and the one that tells whether a server is still right."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

OK, ERROR, CUT, WRONG, HANG = "right", "error", "cut", "WRONG TEXT", "HANG"
FORBIDDEN = (WRONG, HANG)
_PATIENCE = 30.0  # seconds after which a request counts as one that hangs
_AT_ONCE = 4
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

Ask = tuple[str, Mapping[str, Any]]  # path and body


def _chat(text: str, **more: Any) -> Ask:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, "seed": 3, **more}
    return "/v1/chat/completions", body


def _form(name: str) -> Mapping[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": _SCHEMA}}


def _completion(text: str, **more: Any) -> Ask:
    return "/v1/completions", {"prompt": text, "max_tokens": 12, "temperature": 0, "seed": 3, **more}


PROBE = _completion("The answer is", ignore_eos=True)
REQUESTS: Sequence[Ask] = [
    ask
    for number in range(5)
    for ask in (
        _chat(f"Count to {number}", stream=True),
        _completion(f"Number {number}"),
        _chat(f"Say {number} as JSON", response_format=_form(f"form{number}")),
        ("/tokenize", {"prompt": f"{number} small words"}),
    )
]


async def _ask(http: aiohttp.ClientSession, url: str, ask: Ask) -> tuple[str, str]:
    """Return (how a request ended, its text)."""
    path, body = ask
    try:
        async with asyncio.timeout(_PATIENCE), http.post(url + path, json=body) as response:
            text = await response.text()
    except TimeoutError:
        return HANG, ""
    except (aiohttp.ClientError, ConnectionError):
        return CUT, ""
    if response.status != 200:
        return (ERROR, "") if _is_error(text) else (WRONG, text)
    rows = [row.removeprefix("data: ") for row in text.splitlines() if row.startswith("data: ")]
    if not body.get("stream"):
        return OK, _said(json.loads(text))
    events = [json.loads(row) for row in rows if row != "[DONE]"]
    said = "".join(_said(event) for event in events)
    if any("error" in event for event in events):
        return ERROR, said
    return (OK if rows and rows[-1] == "[DONE]" else CUT), said


def _is_error(text: str) -> bool:
    try:
        return "error" in json.loads(text)
    except ValueError:
        return False


def _said(answer: Mapping[str, Any]) -> str:
    if "tokens" in answer:
        return repr(answer["tokens"])
    parts = []
    for choice in answer.get("choices", ()):
        message = choice.get("message") or choice.get("delta") or choice
        parts.append(message.get("content") or message.get("text") or "")
    return "".join(parts)


async def _all(url: str, asks: Sequence[Ask]) -> list[tuple[str, str]]:
    connector = aiohttp.TCPConnector(limit=_AT_ONCE)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        return list(await asyncio.gather(*[_ask(http, url, ask) for ask in asks]))


class Scenario:
    """A set of requests. `expected` is what a server without a fault answers; one that makes its tokens up refuses
    schemas.
    """

    def __init__(self, url: str, without_model: bool) -> None:
        self.expected = asyncio.run(_all(url, [*REQUESTS, PROBE]))
        for (path, body), (how, said) in zip([*REQUESTS, PROBE], self.expected, strict=True):
            if how != OK and not (without_model and how == ERROR and "response_format" in body):
                raise RuntimeError(f"A server without a fault answers {path} {body}: {how} {said[:200]}")

    def run(self, url: str) -> Counter[str]:
        """Ask all, and count how they ended."""
        return self._ends(asyncio.run(_all(url, REQUESTS)), self.expected[:-1])

    def probe(self, url: str) -> str:
        """Return how the probe ends."""
        return next(iter(self._ends(asyncio.run(_all(url, [PROBE])), self.expected[-1:])))

    def _ends(self, found: Sequence[tuple[str, str]], expected: Sequence[tuple[str, str]]) -> Counter[str]:
        ends: Counter[str] = Counter()
        for answer, whole in zip(found, expected, strict=True):
            how, said = answer
            if answer == whole:
                ends[OK] += 1
            else:
                ends[how if how != OK and whole[1].startswith(said) else WRONG] += 1
        return ends
