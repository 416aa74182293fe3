"""Parts of a start that take long: what the log says of them, and how they are given up."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from ferrule.slow_start import waiting


def test_what_takes_long_is_told_with_its_place_and_last_step(caplog: pytest.LogCaptureFixture) -> None:
    told, records = threading.Event(), list[logging.LogRecord]()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)
            told.set()

    logger, handler = logging.getLogger("ferrule.start"), Heard()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "ferrule.start"), waiting("the weights", first=0.02) as progress:
            progress.step("tensor 7")
            assert told.wait(60)
    finally:
        logger.removeHandler(handler)
    assert records[0].getMessage().startswith("waiting for the weights, at ")
    assert records[0].ferrule_fields["last"] == "tensor 7"  # type: ignore[attr-defined]


def test_what_ends_soon_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ferrule.start"), waiting("nothing", limit=60):
        pass
    assert "nothing" not in caplog.text  # the thread of another test may still tell what it waited for


def test_a_limit_counts_from_the_last_step() -> None:
    ended, texts = threading.Event(), list[str]()

    def end(text: str) -> None:
        texts.append(text)
        ended.set()

    with waiting("the import of x", 0.05, "See --y.", end=end):
        assert ended.wait(60)
    assert texts[0].startswith("The import of x did not end within 0.05 s, at ")
    assert texts[0].endswith("\nSee --y.")
    ended.clear()
    with waiting("steps", 0.05, end=end) as progress:
        progress.moved += 1000  # as if steps went on
        assert not ended.wait(0.3)


def test_a_process_that_waits_too_long_ends() -> None:
    program = "import time\nfrom ferrule.slow_start import waiting\nwith waiting('sleep', 0.1): time.sleep(600)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ferrule: Sleep did not end within 0.1 s, at <string>:3." in done.stderr


def test_what_is_waited_for_goes_on_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with waiting("the import of a plugin", limit=1.0):
        pass
    assert "the import of a plugin is waited for, however long it takes: can't start new thread" in caplog.text
