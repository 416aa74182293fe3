"""Prompts of `ferrule bench serve`: random token ids, or texts from a file in the form that --dataset-name names.

The server tells how many tokens a text has (POST /tokenize), so that no tokenizer is needed here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ferrule.errors import ConfigError, StartupError
from ferrule_plugins.command.bench.figures import random_prompts, varied
from ferrule_plugins.command.bench.serve_options import ServeBench

T = TypeVar("T")

# Which conversations of a ShareGPT file are used, in tokens, as vLLM's benchmark documents it.
_SHORTEST = 4  # prompt, and answer
_LONGEST_PROMPT = 1024
_LONGEST = 2048  # prompt and answer together
_NEEDED = {
    "sharegpt": f"A conversation needs two turns, a prompt of {_SHORTEST} to {_LONGEST_PROMPT} tokens, an answer of at "
    f"least {_SHORTEST}, and at most {_LONGEST} in all.",
    "custom": 'Expected {"prompt": "…"} in each line.',
}
_TOO_LONG = (400, 413)  # statuses with which servers refuse a text that is too long for the model


@dataclass(frozen=True)
class Sample:
    """A prompt, as text or token ids, and the number of tokens to generate."""

    prompt: str | list[int]
    output_len: int


class _Refused(StartupError):
    """An error for a text that the server refused."""


class Prompts:
    """A source of the bodies of all requests, warm-ups included."""

    def __init__(self, session: aiohttp.ClientSession, base: str, model: str, options: ServeBench) -> None:
        self._session = session
        self._base = base
        self._model = model
        self._options = options
        self._count = options.num_warmups + options.num_prompts
        self._refusal = ""  # of the last text that the server did not take

    async def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of all requests, warm-ups first.

        Raises ConfigError for a file without usable prompts, and StartupError.
        """
        options = self._options
        read = {"random": self._random, "sharegpt": self._sharegpt, "custom": self._custom}[options.dataset_name]
        samples = await read()
        if not samples:
            raise ConfigError(
                f"--dataset-path {options.dataset_path} has no prompt that can be used.",
                self._refusal or _NEEDED[options.dataset_name],
            )
        if not options.no_oversample:
            rng = random.Random(options.seed + 3)
            samples += rng.choices(samples, k=self._count - len(samples))
        if len(samples) <= options.num_warmups:
            raise ConfigError(f"--dataset-path {options.dataset_path} has only as many prompts as there are warm-ups.")
        return [await self._body(sample) for sample in samples]

    async def _body(self, sample: Sample) -> dict[str, Any]:
        """Return the body of a request. Chat takes no token ids, so the server is asked for their text."""
        prompt: Any = sample.prompt
        given: dict[str, Any] = {"prompt": prompt}
        if self._options.chats:
            text = prompt if isinstance(prompt, str) else (await self._post("detokenize", tokens=prompt))["prompt"]
            given = {"messages": [{"role": "user", "content": text}]}
        return {"model": self._model, **given, "max_tokens": sample.output_len, **self._options.fields}

    async def _post(self, route: str, **fields: Any) -> dict[str, Any]:
        async with self._session.post(f"{self._base}/{route}", json={"model": self._model, **fields}) as response:
            if response.status != 200:
                said = f"POST {self._base}/{route} was answered {response.status}: {(await response.text())[:200]}"
                raise (_Refused if response.status in _TOO_LONG else StartupError)(said)
            answer: dict[str, Any] = await response.json()
            return answer

    async def _random(self) -> list[Sample]:
        options = self._options
        prompts = random_prompts(
            self._count,
            options.random_prefix_len + options.random_input_len,
            options.random_prefix_len,
            (options.min_token_id, options.max_token_id),
            options.seed,
            options.random_range_ratio,
        )
        rng, spread = random.Random(options.seed + 2), options.random_range_ratio
        return [Sample(prompt, varied(rng, options.random_output_len, spread)) for prompt in prompts]

    async def _sharegpt(self) -> list[Sample]:
        """Return one sample for each conversation: its first turn is the prompt, the length of its second that of the
        answer.

        A conversation with a text that the server refuses as too long for its model is left out.
        """
        wanted, found = self._options.sharegpt_output_len, list[Sample]()
        for prompt, answer in self._shuffled(conversations(self._options.dataset_path)):
            if len(found) == self._count:
                break
            try:
                prompt_len = await self._num_tokens(prompt)
                output_len = await self._num_tokens(answer) if wanted is None else wanted
            except _Refused as error:
                self._refusal = error.message
                continue
            long_enough = prompt_len >= _SHORTEST and (wanted is not None or output_len >= _SHORTEST)
            if long_enough and prompt_len <= _LONGEST_PROMPT and prompt_len + output_len <= _LONGEST:
                found.append(Sample(prompt, output_len))
        return found

    async def _custom(self) -> list[Sample]:
        """Return one sample for each row: a message, in the model's chat template unless that is switched off."""
        options, found = self._options, list[Sample]()
        for text in self._shuffled(rows(options.dataset_path))[: self._count]:
            prompt: str | list[int] = text
            if not options.chats and not options.custom_skip_chat_template:
                prompt = (await self._post("tokenize", messages=[{"role": "user", "content": text}]))["tokens"]
            found.append(Sample(prompt, options.custom_output_len))
        return found

    async def _num_tokens(self, text: str) -> int:
        return int((await self._post("tokenize", prompt=text))["count"])

    def _shuffled(self, items: Iterator[T]) -> list[T]:
        found = list(items)
        if not self._options.disable_shuffle:
            random.Random(self._options.seed).shuffle(found)
        return found


def conversations(path: str) -> Iterator[tuple[str, str]]:
    """Yield the first two turns of each conversation in a ShareGPT file; shorter ones are left out. Raises ConfigError.

    The file is a JSON list of {"conversations": [{"from": …, "value": …}, …]}.
    """
    content = _parsed(path, _text(path))
    if not isinstance(content, list):
        raise ConfigError(f"--dataset-path {path}: expected a list of conversations.")
    for number, entry in enumerate(content):
        try:
            turns = [turn["value"] for turn in entry.get("conversations", ())[:2]]
            if not all(isinstance(turn, str) for turn in turns):
                raise TypeError
        except (AttributeError, KeyError, TypeError):
            raise ConfigError(
                f"--dataset-path {path}: entry {number} is not a conversation.",
                'Expected {"conversations": [{"from": "human", "value": "…"}, …]}.',
            ) from None
        if len(turns) == 2:
            yield turns[0], turns[1]


def rows(path: str) -> Iterator[str]:
    """Yield the prompts of a JSONL file with {"prompt": "…"} in each line. Raises ConfigError."""
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            row = _parsed(f"{path}, line {number}", line)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ConfigError(f'--dataset-path {path}, line {number}: expected {{"prompt": "…"}}.')
            yield row["prompt"]


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--dataset-path {path} cannot be read: {reason}.") from None


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--dataset-path {where} is not JSON: {error}.") from None
