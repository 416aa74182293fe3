"""`ferrule bench serve`: prompts from files, and goodput."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ferrule.errors import ConfigError
from ferrule_plugins.command.bench.load import Record, goodput
from ferrule_plugins.command.bench.prompts import Prompts, conversations, rows
from ferrule_plugins.command.bench.serve_options import ServeBench


class Words(Prompts):
    """A server that counts words, and puts one token before and one behind a message."""

    async def _post(self, route: str, **fields: Any) -> dict[str, Any]:
        assert route == "tokenize"
        if "messages" in fields:
            return {"tokens": [1, *range(10, 10 + len(fields["messages"][0]["content"].split())), 2]}
        return {"count": len(fields["prompt"].split())}


def bodies(**options: Any) -> list[dict[str, Any]]:
    session: Any = None
    return asyncio.run(Words(session, "", "m", ServeBench(num_warmups=0, **options)).bodies())


def words(count: int) -> str:
    return " ".join(["w"] * count)


def share(folder: Path, *talks: tuple[int, ...]) -> str:
    """Write a file of conversations, with so many words in each turn."""
    file = folder / "share.json"
    file.write_text(json.dumps([{"conversations": [{"from": "x", "value": words(n)} for n in talk]} for talk in talks]))
    return str(file)


def test_conversations_are_used_by_their_lengths(tmp_path: Path) -> None:
    path = share(tmp_path, (4, 4), (3, 9), (9, 3), (5,), (1024, 1024), (1025, 4), (1000, 1049), (6, 7, 8))
    given = {"dataset_name": "sharegpt", "dataset_path": path, "disable_shuffle": True, "no_oversample": True}
    found = [(len(body["prompt"].split()), body["max_tokens"]) for body in bodies(**given)]
    assert found == [(4, 4), (1024, 1024), (6, 7)]
    found = [(len(body["prompt"].split()), body["max_tokens"]) for body in bodies(**given, sharegpt_output_len=2)]
    assert found == [(4, 2), (9, 2), (1024, 2), (1000, 2), (6, 2)]


def test_the_order_comes_from_the_seed_and_few_prompts_are_repeated(tmp_path: Path) -> None:
    given = {"dataset_name": "sharegpt", "dataset_path": share(tmp_path, *[(n, 4) for n in range(4, 24)])}
    assert bodies(**given, num_prompts=50) == bodies(**given, num_prompts=50)
    assert bodies(**given, num_prompts=50) != bodies(**given, num_prompts=50, seed=1)
    assert len(bodies(**given, num_prompts=50)) == 50
    assert len(bodies(**given, num_prompts=7)) == 7
    with pytest.raises(ConfigError, match="has no prompt that can be used"):
        bodies(**{**given, "dataset_path": share(tmp_path, (1, 1))})


def test_rows_are_messages_unless_the_template_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"prompt": "c", "more": 1}\n')
    given: dict[str, Any] = {"dataset_name": "custom", "dataset_path": str(file), "disable_shuffle": True}
    given["num_prompts"] = 2
    assert [body["prompt"] for body in bodies(**given)] == [[1, 10, 11, 2], [1, 10, 2]]
    assert [body["prompt"] for body in bodies(**given, custom_skip_chat_template=True)] == ["a b", "c"]
    chats = bodies(**given, backend="openai-chat", custom_output_len=9)
    assert [(body["messages"][0]["content"], body["max_tokens"]) for body in chats] == [("a b", 9), ("c", 9)]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (conversations, "{", "is not JSON"),
        (conversations, '{"conversations": []}', "expected a list"),
        (conversations, '[{"conversations": [{"value": 1}]}]', "entry 0 is not a conversation"),
        (conversations, '[{"conversations": [{"from": "x"}]}]', "entry 0 is not a conversation"),
        (conversations, "[1]", "entry 0 is not a conversation"),
        (rows, '{"prompt": "a"}\n{"prompt": 1}', "line 2: expected"),
        (rows, "x", "line 1 is not JSON"),
        (rows, None, "cannot be read: No such file"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, read: Any, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(read(str(tmp_path / "file")))


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    def record(first: float, last: float, end: float, tokens: int, error: str | None = None) -> Record:
        return Record(start=0.0, chunks=[first, last], output_tokens=tokens, end=end, error=error)

    records = [
        record(0.1, 0.5, 0.6, 5),  # ttft 100 ms, tpot 100 ms, e2el 600 ms
        record(0.3, 0.3, 0.3, 1),  # one token: its tpot is 0
        record(0.1, 0.5, 0.6, 5, error="HTTP 500"),
        Record(start=0.0),
    ]
    assert goodput(records, 2.0, {"ttft": 300.0}) == 1.0
    assert goodput(records, 2.0, {"ttft": 299.0}) == 0.5
    assert goodput(records, 2.0, {"tpot": 99.0}) == 0.5
    assert goodput(records, 2.0, {"ttft": 200.0, "e2el": 500.0}) == 0.0
