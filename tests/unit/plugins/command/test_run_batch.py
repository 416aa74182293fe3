"""The parts of `ferrule run-batch`: lines, the two passes, the journal, the window, options, transfers."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.config import Config
from ferrule.config.parse import parse_command
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError, EngineDead, StartupError
from ferrule.interfaces.service import Generate, Output
from ferrule.plugin import discover
from ferrule_plugins.batch import journal as journals
from ferrule_plugins.batch.drive import Asker, Drive
from ferrule_plugins.batch.journal import Journal, Record
from ferrule_plugins.batch.local import ask, served_urls
from ferrule_plugins.batch.rows import AppResponse, Bad, Row, answered, read_row, refused
from ferrule_plugins.batch.source import read_rows, survey
from ferrule_plugins.command.run_batch import RunBatch, options
from ferrule_plugins.command.run_batch.files import Target, opened
from ferrule_plugins.command.run_batch.progress import Progress
from ferrule_plugins.command.run_batch.transfer import shown
from tests.fakes.http import Site

URL = "/v1/completions"
URLS = frozenset({URL, "/v1/chat/completions"})
MOST = 1 << 20


def line(custom_id: Any = "a", method: Any = "POST", url: Any = URL, body: Any = None, **more: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": method, "url": url, "body": {"prompt": "x"} if body is None else body}
    return json.dumps(fields | more).encode()


def without(name: str) -> bytes:
    fields = json.loads(line())
    del fields[name]
    return json.dumps(fields).encode()


# ------------------------------------------------------------------------------------------------------------- lines


def test_a_row_keeps_its_body_byte_for_byte() -> None:
    body = b'{"prompt" : "\\u00e9", "max_tokens":1e1, "max_tokens": 3, "stream": false}'
    text = b'{"body": ' + body + b', "url": "/v1/completions", "method": "POST", "custom_id": "7", "more": [1]}'
    assert read_row(3, text, URLS) == Row(3, "7", URL, body)


@pytest.mark.advisory("CVE-2026-34753")
@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b'{"\x80"', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": ' + b"[" * 100_000 + b"}", "invalid_json_line", None),
        (without("custom_id"), "missing_required_parameter", "custom_id"),
        (line(custom_id=""), "missing_required_parameter", "custom_id"),
        (line(custom_id=5), "missing_required_parameter", "custom_id"),
        (without("method"), "invalid_method", "method"),
        (line(method="GET"), "invalid_method", "method"),
        (line(method=None), "invalid_method", "method"),
        (without("url"), "invalid_url", "url"),
        (line(url="/v1/embeddings"), "invalid_url", "url"),
        (line(url="http://169.254.169.254/v1/completions"), "invalid_url", "url"),
        (line(url="/v1/completions?x=1"), "invalid_url", "url"),
        (without("body"), "missing_required_parameter", "body"),
        (line(body=[1]), "missing_required_parameter", "body"),
        (line(body="x"), "missing_required_parameter", "body"),
        (line(body={"stream": True}), "stream_unsupported", "body.stream"),
        (line(body={"stream": "yes"}), "stream_unsupported", "body.stream"),
    ],
)
def test_a_bad_line_is_named(text: bytes, code: str, param: str | None) -> None:
    bad = read_row(12, text, URLS)
    assert isinstance(bad, Bad)
    assert (bad.code, bad.param, bad.number) == (code, param, 12)
    assert "12" in bad.message


@given(st.binary(max_size=200))
def test_no_line_is_too_odd_to_be_answered(text: bytes) -> None:
    row = read_row(1, text, URLS)
    if isinstance(row, Bad):
        result = refused(row)
        assert b"\n" not in result
        assert json.loads(result)["error"]["line"] == 1


def test_a_url_that_is_not_served_names_those_that_are() -> None:
    bad = read_row(1, line(url="/v1/complete"), URLS)
    assert isinstance(bad, Bad)
    assert bad.message == "Line 1: url must be one of /v1/chat/completions, /v1/completions, not '/v1/complete'."


def test_results_have_the_form_of_openai() -> None:
    row = Row(4, "x", URL, b"{}")
    good = json.loads(answered(row, AppResponse(200, "rid", b'{"id": "cmpl-1"}')))
    assert good.pop("id").startswith("batch_req_")
    body = {"id": "cmpl-1"}
    assert good == {
        "custom_id": "x",
        "response": {"status_code": 200, "request_id": "rid", "body": body},
        "error": None,
    }
    error = {"message": "No.", "type": "NotFoundError", "param": "model", "code": 404}
    failed = json.loads(answered(row, AppResponse(404, "rid", json.dumps({"error": error}).encode())))
    assert failed["response"]["body"] == {"error": error}
    assert failed["error"] == {"code": "NotFoundError", "message": "No.", "param": "model", "line": 4}


@pytest.mark.parametrize("body", [b"", b"<html>\n</html>", b"[1,\n2]", b'{"error": "text"}', b'{"error":\n null}'])
def test_an_answer_of_any_form_becomes_one_line(body: bytes) -> None:
    result = answered(Row(4, "x", URL, b"{}"), AppResponse(502, "", body))
    assert b"\n" not in result
    assert json.loads(result)["error"]["message"] == "The request was answered 502."


# -------------------------------------------------------------------------------------------------------- two passes


def read(text: bytes, done: Sequence[int] = (), most: int = MOST) -> list[Row | Bad]:
    file = io.BytesIO(text)
    return list(read_rows(file, survey(file, most), done, URLS, most))


def test_blank_lines_and_a_byte_order_mark_are_passed_over() -> None:
    text = b"\xef\xbb\xbf" + line("a") + b"\r\n\n  \n" + line("b")
    assert survey(io.BytesIO(text), MOST).rows == 2
    assert [(row.number, row.custom_id) for row in read(text)] == [(1, "a"), (4, "b")]


def test_the_second_of_a_custom_id_is_an_error_and_the_first_is_not() -> None:
    text = b"\n".join([line("a"), line("b"), line("a"), b"{", line("a", method="GET"), line("c")])
    found = read(text)
    codes = [getattr(row, "code", None) for row in found]
    assert codes == [None, None, "duplicate_custom_id", "invalid_json_line", "duplicate_custom_id", None]
    assert "line 1" in found[2].message  # type: ignore[union-attr]
    again = read(text, done=[1, 2])  # the first one was answered by an earlier run
    assert [getattr(row, "code", None) for row in again] == codes[2:]


def test_an_empty_input_has_no_rows() -> None:
    assert read(b"") == []
    assert read(b"\n\n") == []


def test_a_line_over_the_limit_is_an_error_row_and_takes_no_memory() -> None:
    text = b"\n".join([line("a"), line("b", body={"prompt": "x" * (3 << 20)}), line("c")]) + b"\n"
    first, second, third = read(text, most=1000)
    assert (first.number, third.number) == (1, 3)
    assert isinstance(second, Bad)
    assert second.code == "line_too_long"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"b"', b'"B"'),
        lambda text: text + line("d") + b"\n",
        lambda text: text[: text.rindex(b"{")],
        lambda text: b"",
    ],
)
def test_an_input_that_changes_between_the_passes_ends_the_run(change: Callable[[bytes], bytes]) -> None:
    text = line("a") + b"\n" + line("b") + b"\n" + line("c") + b"\n"
    seen = survey(io.BytesIO(text), MOST)
    with pytest.raises(StartupError, match="has changed since the run began"):
        list(read_rows(io.BytesIO(change(text)), seen, (), URLS, MOST))


# ----------------------------------------------------------------------------------------------------------- journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl.journal"


def record(number: int, status: int = 200) -> Record:
    return Record(number, status, json.dumps({"n": number, "status": status}).encode())


def kept(path: Path, lines: int = 9) -> list[int]:
    journal = Journal(path, {"run": 1}, lines)
    try:
        return [json.loads(result)["n"] for result in journal.results()]
    finally:
        journal.close()


def test_results_come_back_in_the_order_of_the_input(path: Path) -> None:
    journal = Journal(path, {"run": 1}, 9)
    journal.append([record(5), record(2, 400)])
    journal.append([record(9)])
    assert [json.loads(result)["n"] for result in journal.results()] == [2, 5, 9]
    assert (journal.done, journal.failed) == (3, 1)
    assert 5 in journal
    assert 4 not in journal
    journal.close()
    again = Journal(path, {"run": 1}, 9)
    assert (again.done, again.failed) == (3, 1)
    again.append([record(1)])
    assert [json.loads(result)["n"] for result in again.results()] == [1, 2, 5, 9]
    again.remove()
    assert not path.exists()


@given(draw=st.data())
@settings(max_examples=50, deadline=None)
def test_cut_or_damaged_anywhere_it_keeps_what_comes_before(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    journal = Journal(path, {"run": 1}, 9)
    ends = []
    for number in range(1, 10):
        journal.append([record(number)])
        ends.append(path.stat().st_size)
    head = ends[0] - len(record(1).line)
    journal.close()
    place = draw.draw(st.integers(head, ends[-1]))
    tail = draw.draw(st.sampled_from([b"", b"\0" * 40, b"\n", b"3 200 \n", b"3 200 {}", b"x 200 {}\n", b"99 200 {}\n"]))
    path.write_bytes(path.read_bytes()[:place] + tail)
    whole = [number for number, end in enumerate(ends, 1) if end <= place]
    found = kept(path)
    assert found[: len(whole)] == whole
    assert set(found) <= {*whole, len(whole) + 1}  # a tail may complete the line that was cut
    assert kept(path) == found


def test_a_fault_of_the_server_is_tried_again(path: Path) -> None:
    journal = Journal(path, {"run": 1}, 9)
    journal.append([record(1), record(2, 500), record(3, 400)])
    assert journal.done == 3  # in this run it counts
    journal.close()
    again = Journal(path, {"run": 1}, 9)
    assert [number in again for number in (1, 2, 3)] == [True, False, True]
    again.append([record(2)])
    assert [json.loads(result)["status"] for result in again.results()] == [200, 200, 400]
    again.close()


def test_a_full_disk_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, {"run": 1}, 9)
    journal.append([record(1)])
    size, real = path.stat().st_size, os.pwrite

    def full(fd: int, data: Any, place: int) -> int:
        if place > size:
            raise OSError(errno.ENOSPC, "")
        return real(fd, bytes(data)[:5], place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StartupError, match="no space left on device"):
        journal.append([record(2), record(3)])
    monkeypatch.undo()
    assert path.stat().st_size == size
    journal.append([record(4)])
    journal.close()
    assert kept(path) == [1, 4]


def test_one_process_at_a_time(path: Path) -> None:
    journal = Journal(path, {"run": 1}, 9)
    with pytest.raises(StartupError, match="Another run-batch"):
        Journal(path, {"run": 1}, 9)
    journal.close()
    assert kept(path) == []


def test_another_run_is_refused_with_the_difference(path: Path) -> None:
    Journal(path, {"model": "a", "dtype": "float32"}, 9).close()
    before = path.read_bytes()
    with pytest.raises(StartupError, match="model was 'a', is 'b'"):
        Journal(path, {"model": "b", "dtype": "float32"}, 9)
    with pytest.raises(StartupError, match="dtype was 'float32', is None"):
        Journal(path, {"model": "a"}, 9)
    assert path.read_bytes() == before


def test_what_is_no_journal_is_left_alone(path: Path, tmp_path: Path) -> None:
    for text in (b"my notes\n", b'{"\x80": 1}\n'):
        path.write_bytes(text)
        with pytest.raises(StartupError, match="is not a journal"):
            Journal(path, {}, 9)
        assert path.read_bytes() == text
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="Cannot write the journal"):
        Journal(path, {}, 9)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StartupError, match="not a regular file of this user"):
        Journal(path, {}, 9)


def test_killed_while_the_first_line_was_written_it_begins_anew(path: Path) -> None:
    path.write_bytes(b'{"format":1,')
    assert kept(path) == []
    assert path.read_bytes() == b'{"format":1,"run":1}\n'


def test_it_is_made_lasting_before_a_row_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, {"run": 1}, 9)
    synced: list[bool] = []
    monkeypatch.setattr(journals.os, "fsync", lambda fd: synced.append(1 in journal))
    journal.append([record(1)])
    assert synced == [False]
    journal.close()


# ------------------------------------------------------------------------------------------------------------ window


class Clerk:
    """A server with scripted answers. `held` are rows that wait for `go`."""

    def __init__(self, statuses: dict[str, list[int]] | None = None, held: Sequence[str] = ()) -> None:
        self.statuses = statuses or {}
        self.held = held
        self.go = asyncio.Event()
        self.alive = True
        self.open = self.most = 0
        self.asked: list[str] = []

    async def ask(self, url: str, body: bytes) -> AppResponse:
        name = json.loads(body)["prompt"]
        self.asked.append(name)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await (self.go.wait() if name in self.held else asyncio.sleep(0))
        finally:
            self.open -= 1
        statuses = self.statuses.get(name, [200])
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        return AppResponse(status, "r", b'{"text": "x"}', retry_after=0.0)


def rows_of(count: int) -> Iterator[Row | Bad]:
    return (Row(n, f"r{n}", URL, json.dumps({"prompt": f"r{n}"}).encode()) for n in range(1, count + 1))


def drive_of(clerk: Clerk, path: Path, window: int = 4, lines: int = 100) -> tuple[Drive, Journal]:
    journal = Journal(path, {}, lines)
    progress = Progress(lines, 0, 0, io.StringIO())
    return Drive(Asker(clerk.ask, lambda: clerk.alive), journal, progress, lambda: window), journal


def statuses(journal: Journal) -> dict[str, int]:
    found = [json.loads(result) for result in journal.results()]
    return {row["custom_id"]: row["response"]["status_code"] for row in found}


async def test_the_window_bounds_what_is_in_flight(path: Path) -> None:
    clerk = Clerk()
    drive, journal = drive_of(clerk, path, window=3)
    await drive.run(rows_of(50), 1)
    assert journal.done == 50
    assert clerk.most == 3
    journal.close()


async def test_a_full_queue_is_waited_for(path: Path) -> None:
    clerk = Clerk({"r2": [429, 503, 200], "r3": [429]})
    drive, journal = drive_of(clerk, path)
    await drive.run(rows_of(5), 1)
    assert statuses(journal) == {"r1": 200, "r2": 200, "r3": 429, "r4": 200, "r5": 200}
    journal.close()


async def test_all_being_refused_ends(path: Path) -> None:
    clerk = Clerk({f"r{n}": [429] for n in range(1, 9)})
    drive, journal = drive_of(clerk, path, window=8)
    await asyncio.wait_for(drive.run(rows_of(8), 1), 120)
    assert set(statuses(journal).values()) == {429}
    journal.close()


async def test_a_dead_engine_ends_it_and_answers_that_came_are_kept(path: Path) -> None:
    clerk = Clerk({"r3": [503]})
    clerk.alive = False
    drive, journal = drive_of(clerk, path, window=1)
    with pytest.raises(EngineDead):
        await drive.run(rows_of(9), 1)
    assert statuses(journal) == {"r1": 200, "r2": 200}
    journal.close()


async def test_stopping_lets_what_runs_finish_and_begins_nothing(path: Path) -> None:
    clerk = Clerk(held=("r3", "r4"))
    drive, journal = drive_of(clerk, path, window=2)
    running = asyncio.create_task(drive.run(rows_of(50), 1000))
    while not set(clerk.held) <= set(clerk.asked):
        await asyncio.sleep(0.001)
    drive.stopping.set()
    await asyncio.sleep(0.01)
    clerk.go.set()
    await running
    assert statuses(journal) == {"r1": 200, "r2": 200, "r3": 200, "r4": 200}
    journal.close()


@pytest.mark.parametrize("insist", [True, False])
async def test_the_grace_and_the_second_signal_are_the_end_of_it(path: Path, insist: bool) -> None:
    clerk = Clerk(held=("r2",))
    drive, journal = drive_of(clerk, path, window=2)
    running = asyncio.create_task(drive.run(iter(list(rows_of(2))), 1000 if insist else 0.05))
    while journal.done < 1:
        await asyncio.sleep(0.001)
    drive.stopping.set()
    await asyncio.sleep(0.01)
    if insist:
        drive.insisted.set()
    await running
    assert statuses(journal) == {"r1": 200}
    assert clerk.open == 0
    journal.close()


async def test_a_disk_that_fills_up_ends_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clerk = Clerk()
    drive, journal = drive_of(clerk, path)

    def full(fd: int, data: Any, place: int) -> int:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StartupError, match="no space left"):
        await drive.run(rows_of(50), 1)
    monkeypatch.undo()
    assert journal.done == 0
    journal.close()


async def test_an_error_of_the_input_is_raised_and_what_came_is_kept(path: Path) -> None:
    def broken() -> Iterator[Row | Bad]:
        yield from rows_of(2)
        raise StartupError("changed")

    drive, journal = drive_of(Clerk(), path, window=1)
    with pytest.raises(StartupError, match="changed"):
        await drive.run(broken(), 1)
    assert 1 in journal
    journal.close()


# ------------------------------------------------------------------------------------------------- the application


@pytest.mark.advisory("CVE-2026-34753")
async def test_rows_take_the_way_of_http_requests(path: Path) -> None:
    site = Site(enable_request_id_headers=True)
    urls = await served_urls(site.app)
    assert {URL, "/v1/chat/completions"} <= set(urls)
    assert "/tokenize" not in urls
    answer = await ask(site.app, URL, b'{"prompt": "hello"}')
    assert answer.status == 200
    assert len(answer.request_id) == 32
    assert json.loads(answer.body)["choices"][0]["text"] == "hello"
    answer = await ask(site.app, URL, b'{"prompt": "hello", "model": "other"}')
    assert answer.status == 404
    answer = await ask(site.app, URL, b'{"prompt": ')
    assert answer.status == 400


@pytest.mark.advisory("CVE-2026-116173")
async def test_one_bad_body_does_not_touch_its_neighbours(path: Path) -> None:
    site = Site(enable_request_id_headers=True)

    def script(request: Generate, index: int, ids: tuple[int, ...]) -> Sequence[Output]:
        raise RuntimeError("planted")

    journal = Journal(path, {}, 4)
    asker = Asker(lambda url, body: ask(site.app, url, body), lambda: True)
    drive = Drive(asker, journal, Progress(4, 0, 0, io.StringIO()), lambda: 4)
    bodies = [b'{"prompt": "good"}', b'{"prompt": ', b'{"prompt": "x", "n": 0}', b'{"prompt": "good too"}']
    await drive.run((Row(n, f"r{n}", URL, body) for n, body in enumerate(bodies, 1)), 1)
    assert statuses(journal) == {"r1": 200, "r2": 400, "r3": 400, "r4": 200}
    site.service.script = script
    assert (await ask(site.app, URL, b'{"prompt": "x"}')).status == 500
    journal.close()


# ---------------------------------------------------------------------------------------------------- files, options


def test_the_journal_stands_beside_the_output_or_in_the_named_folder(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert Target(str(out), None).journal == tmp_path / "out.jsonl.journal"
    other = tmp_path / "other"
    other.mkdir()
    one, two = Target(str(out), str(other)).journal, Target(str(tmp_path / "b.jsonl"), str(other)).journal
    assert one.parent == two.parent == other
    assert one != two
    signed = Target("https://u:p@host/a/out.jsonl?sig=1", str(other))
    assert signed.shown == "https://host/a/out.jsonl"
    assert signed.journal == Target("https://host/a/out.jsonl?sig=2", str(other)).journal


def test_an_output_that_is_a_link_is_written_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "deep" / "real.jsonl")
    target = Target(str(link), None)
    journal = Journal(target.journal, {}, 1)
    journal.append([record(1)])
    target.publish(journal)
    journal.remove()
    assert link.is_symlink()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["real.jsonl"]
    assert json.loads(link.read_text()) == {"n": 1, "status": 200}


def test_outputs_that_cannot_be_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no folder"):
        Target(str(tmp_path / "none" / "out.jsonl"), None)
    with pytest.raises(StartupError, match="not a regular file"):
        Target("/dev/null", None)
    with pytest.raises(StartupError, match="not a regular file"):
        Target(str(tmp_path), None)
    with pytest.raises(StartupError, match="no folder"):
        Target("http://localhost/x", str(tmp_path / "none"))


def test_inputs_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such file"), opened(str(tmp_path / "none"), tmp_path, MOST):
        pass
    with pytest.raises(StartupError, match="is a directory"), opened(str(tmp_path), tmp_path, MOST):
        pass
    with pytest.raises(StartupError, match="not a regular file"), opened("/dev/null", tmp_path, MOST):
        pass


def test_the_output_is_not_the_input(tmp_path: Path) -> None:
    same = tmp_path / "rows.jsonl"
    same.write_bytes(line())
    with opened(str(same), tmp_path, MOST) as file:
        assert Target(str(same), None).is_file(file)
        assert not Target(str(tmp_path / "other.jsonl"), None).is_file(file)


def test_secrets_of_a_url_are_not_shown() -> None:
    assert shown("https://user:pass@host:9/a/b?X-Amz-Signature=1#f") == "https://host:9/a/b"


def parsed(*argv: str) -> Any:
    plugins = discover()
    found = parse_command(argv, options_usage(), plugins, sections=options.sections(), server=False)
    assert found is not None
    return found


def options_usage() -> Any:
    from ferrule.config.help import CommandUsage

    return CommandUsage("ferrule run-batch", "", "model")


def test_documented_options_and_their_defaults() -> None:
    found = parsed("-i", "a", "-o", "b")
    batch, served = found.extra["batch"], found.extra["served"]
    assert (batch.input_file, batch.output_file, batch.output_tmp_dir) == ("a", "b", None)
    assert (batch.enable_metrics, batch.port, batch.url) == (False, 8000, None)
    assert (served.response_role, served.max_log_len, served.disable_log_requests) == ("assistant", None, False)
    assert served.enable_prompt_tokens_details is False
    found = parsed(
        *("some/model", "--input-file", "a", "--output-file", "b", "--output-tmp-dir", "/t", "--response-role", "bot"),
        *("--enable-metrics", "--url", "127.0.0.2", "--port", "9", "--max-log-len", "7", "--disable-log-requests"),
        *("--disable-log-stats", "--enable-prompt-tokens-details", "--max-num-seqs", "3", "--max-inflight", "5"),
    )
    config = options.applied(found.config, found.extra["served"])
    assert config.model.model == "some/model"
    assert config.frontend.response_role == "bot"
    assert config.frontend.max_log_len == 7
    assert config.frontend.disable_log_requests
    assert config.frontend.enable_prompt_tokens_details
    assert config.observability.disable_log_stats
    assert config.scheduler.max_num_seqs == 3
    assert found.extra["batch"].max_inflight == 5


def test_a_key_in_the_environment_does_not_shut_the_batch_out() -> None:
    found = parsed("-i", "a", "-o", "b")
    config = resolve(Config(env=Environment(api_key="secret")))
    applied = options.applied(config, found.extra["served"])
    assert applied.env.api_key is None
    assert applied.frontend.api_key == ()


@pytest.mark.parametrize("argv", [["-i", "a"], ["-o", "a"], []])
def test_input_and_output_are_asked_for(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="missing"):
        RunBatch().run(argv, discover())


@pytest.mark.parametrize("flag", ["--api-key", "--ssl-keyfile", "--root-path", "--uds"])
def test_options_of_a_listening_server_are_not_taken(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        parsed("-i", "a", "-o", "b", flag, "x")


def test_what_decides_an_answer_is_in_the_journal_and_secrets_are_not() -> None:
    found = parsed("m", "--hf-token", "secret", "--dtype", "float32", "--max-num-seqs", "7", "--response-role", "bot")
    config = options.applied(found.config, found.extra["served"])
    assert options.identity(config) == {"model": "m", "dtype": "float32", "response_role": "bot"}
    adapters = [
        "--enable-lora",
        "--lora-modules",
        "a=/a",
        "--lora-resolver-cache-dir",
        "/b",
        "--prompt-adapters",
        "c=/c",
    ]
    found = parsed("m", *adapters)
    config = options.applied(found.config, found.extra["served"])
    assert options.identity(config) == {
        "model": "m",
        "lora_modules": ("a=/a",),
        "lora_resolver_cache_dir": "/b",
        "prompt_adapters": ("c=/c",),
    }


def test_options_without_effect_are_said() -> None:
    found = parsed("-i", "a", "-o", "b", "--port", "1")
    said = options.notices(found.extra["batch"], found.origins)
    assert said == ("--port has no effect without --enable-metrics.",)
    found = parsed("-i", "a", "-o", "b", "--enable-metrics", "--url", "::1", "--use-v2-block-manager", "false")
    assert options.notices(found.extra["batch"], found.origins) == ()
    assert found.extra["batch"].host == "::1"
    assert any("--host" in notice for notice in found.notices)
    assert any("block manager" in notice for notice in found.notices)
