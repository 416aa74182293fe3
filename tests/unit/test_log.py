"""The log: one record is one line, nothing forges a line, and a stuck reader costs lines, not time."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrule import log
from ferrule.errors import ConfigError


@pytest.fixture
def sink() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    yield stream
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h).__module__ == log.__name__]:
        root.removeHandler(handler)
        handler.close()
    logging.getLogger("ferrule").setLevel(logging.NOTSET)


def lines(stream: io.StringIO) -> list[str]:
    log.flush(240)
    return stream.getvalue().splitlines()


def test_a_line(sink: io.StringIO) -> None:
    log.setup("info", stream=sink)
    log.get("engine").info("loaded %d blocks", 7, model="a/b", note="two words", quote='a"b', empty="")
    (line,) = lines(sink)
    assert re.fullmatch(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[engine\] .*", line)
    assert line.endswith(r'] loaded 7 blocks model=a/b note="two words" quote="a\"b" empty=""')


def test_the_process_stands_before_the_area(sink: io.StringIO) -> None:
    log.setup("info", "api-0", stream=sink)
    log.get("gate").info("one")
    log.get("api-0").info("two")
    assert [line.partition("[")[2] for line in lines(sink)] == ["api-0 gate] one", "api-0] two"]


def test_levels(sink: io.StringIO) -> None:
    log.setup("warning", stream=sink)
    log.get("a").info("not shown")
    log.get("a").warning("shown")
    logging.getLogger("some.library").warning("from a library")
    logging.getLogger("some.library").info("not shown either")
    assert [line.split(" ", 3)[3] for line in lines(sink)] == ["[a] shown", "[some.library] from a library"]
    assert not log.get("a").enabled(logging.INFO)


def test_nothing_forges_a_line(sink: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    log.setup("info", stream=sink)
    root = logging.getLogger()  # pytest's own handlers would put the lone surrogate into the test's report
    monkeypatch.setattr(root, "handlers", [h for h in root.handlers if type(h).__module__ == "ferrule.log"])
    evil = "x\nINFO 01-01 00:00:00 [gate] forged\r\x1b[2J\u2028\u202e\x00\ud800"
    log.get("gate").info("bad name %s", evil, name=evil)
    (line,) = lines(sink)
    assert line.isprintable()
    assert r"x\nINFO 01-01 00:00:00 [gate] forged\r\x1b[2J\u2028\u202e\x00\ud800" in line


def test_a_traceback_is_marked(sink: io.StringIO) -> None:
    log.setup("info", stream=sink)
    try:
        raise ValueError("first\nERROR 01-01 00:00:00 [gate] forged")
    except ValueError:
        log.get("engine").exception("it failed")
    first, *rest = lines(sink)
    assert first.endswith("[engine] it failed")
    assert len(rest) >= 4
    assert all(row.startswith("    | ") for row in rest)


def test_a_value_that_cannot_be_shown_does_not_end_the_caller(
    sink: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    log.setup("info", stream=sink)
    log.get("a").info("value", broken=Broken())
    log.get("a").info("next")
    assert [line.partition("] ")[2] for line in lines(sink)] == ["next"]
    assert "no text" in capsys.readouterr().err


def test_a_second_setup_replaces_the_first(sink: io.StringIO) -> None:
    first = io.StringIO()
    log.setup("info", stream=first)
    log.setup("info", stream=sink)
    log.get("a").info("once")
    assert len(lines(sink)) == 1
    assert first.getvalue() == ""


def _child(code: str, **popen: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "from ferrule import log\n" + code], **popen)  # type: ignore[call-overload,no-any-return]


def test_lines_are_there_when_the_process_ends() -> None:
    patient = "log._FLUSH_SECONDS = 240.0\nlog.setup('info')\n"
    child = _child(f"{patient}for i in range(500): log.get('a').info('line', i=i)", stderr=subprocess.PIPE)
    _, err = child.communicate(timeout=240)
    assert child.returncode == 0
    assert [line.rpartition("=")[2] for line in err.decode().splitlines()] == [str(i) for i in range(500)]


def test_a_pipe_that_nobody_reads_stalls_nothing() -> None:
    """Write 10,000 lines of 1 KiB into a pipe of 64 KiB: the writer continues, the rest is dropped and counted."""
    read_end, write_end = os.pipe()
    code = (
        "log.setup('info')\nfor i in range(10_000): log.get('a').info('x' * 1024)\nprint('done', flush=True)\ninput()"
    )
    child = _child(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write_end)
    os.close(write_end)
    written = dropped = 0
    with os.fdopen(read_end) as pipe, child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        assert child.stdin is not None
        for row in pipe:
            written += "x" * 1024 in row
            dropped += int(row.rpartition("=")[2]) if "lines dropped" in row else 0
            if written + dropped == 10_000:
                break
        child.stdin.write(b"\n")
        child.stdin.close()
        assert pipe.read() == ""
    assert child.returncode == 0
    assert written > 0 < dropped


def test_a_reader_that_left_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    child = _child(
        "log.setup('info')\nfor i in range(10): log.get('a').info('x')\nprint('done')", stdout=-1, stderr=write_end
    )
    os.close(write_end)
    out, _ = child.communicate(timeout=240)
    assert (child.returncode, out) == (0, b"done\n")


def test_lines_begin_with_a_prefix(sink: io.StringIO) -> None:
    log.setup("info", "api", stream=sink, prefix="[node 7] ")
    log.get("gate").info("one")
    assert lines(sink)[0].startswith("[node 7] INFO ")


CONFIGURED = """
import json, pathlib
file = pathlib.Path("log.json")
file.write_text(json.dumps({{
    "version": 1,
    "formatters": {{"f": {{"format": "%(levelname)s %(name)s <%(message)s>"}}}},
    "handlers": {{"h": {{"class": "logging.StreamHandler", "formatter": "f"}}}},
    "loggers": {loggers},
    "root": {{"handlers": ["h"], "level": "ERROR"}},
}}))
made_before = log.get("early")
log.setup_from("log.json")
made_before.info("value %s", chr(10).join("ab"), name="two words")
log.get("x").warning("plain")
"""


@pytest.mark.parametrize("name", ["ferrule", "vllm"])
def test_a_file_configures_the_log(tmp_path: Path, name: str) -> None:
    """Keep records to one line, with their fields; loggers made before are not switched off."""
    loggers = {name: {"handlers": ["h"], "level": "INFO", "propagate": False}}
    code = "from ferrule import log\n" + CONFIGURED.format(loggers=loggers)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True, cwd=tmp_path
    )
    assert done.stderr.splitlines() == [
        'INFO ferrule.early <value a\\nb name="two words">',
        "WARNING ferrule.x <plain>",
    ]


def test_what_a_file_says_of_ferrule_wins_over_what_it_says_of_vllm(tmp_path: Path) -> None:
    loggers = {"vllm": {"level": "DEBUG"}, "ferrule": {"level": "ERROR"}, "vllm.x": {"level": "WARNING"}}
    code = "from ferrule import log\n" + CONFIGURED.format(loggers=loggers)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True, cwd=tmp_path
    )
    assert done.stderr.splitlines() == ["WARNING ferrule.x <plain>"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "log.json, line 1, column 2: "),
        ('"x"', "a JSON object is expected"),
        ('{"version": 1, "handlers": {\n"h": {"class": "no.Such"}}}', "line 2: Unable to configure handler 'h'"),
        ('{"version": 1, "root": {"handlers": ["q"]}}', "line 1: Unable to"),
        (None, "Cannot read the logging configuration"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "log.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        log.setup_from(str(file))
