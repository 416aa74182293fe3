"""What is waited for, and told in the log."""

from __future__ import annotations

import threading

import pytest

from ferrule.waiting import waiting


def test_what_is_waited_for_goes_on_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with waiting("the import of a plugin", limit=1.0):
        pass
    assert "the import of a plugin is waited for, however long it takes: can't start new thread" in caplog.text
