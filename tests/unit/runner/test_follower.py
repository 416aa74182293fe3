"""The thread that work on constraints is done by, and left behind by what takes too long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ferrule.runner.follower import Follower
from ferrule_testkit import server as servers


class Work:
    """A piece of work that computes, or sleeps, until it is released."""

    def __init__(self, computes: bool = True) -> None:
        self.begun, self.released, self.done = threading.Event(), threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self._computes = computes

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        self.begun.set()
        if self._computes:
            while not self.released.is_set():
                pass
        else:
            self.released.wait(60)
        self.done.set()


@pytest.fixture
def works() -> Iterator[list[Work]]:
    """Yield a list of works, all of which are released at the end."""
    made: list[Work] = []
    yield made
    for work in made:
        work.released.set()


@pytest.fixture
def follower() -> Iterator[Follower]:
    made = Follower()
    yield made
    made.close()


def done(follower: Follower) -> None:
    """Wait for all that was submitted."""
    last = threading.Event()
    follower.submit(b"", last.set)
    assert last.wait(60)


def busy(follower: Follower, works: list[Work], key: bytes, computes: bool = True) -> Work:
    """Work of this key that has begun."""
    work = Work(computes)
    works.append(work)
    follower.submit(key, work)
    assert work.begun.wait(60)
    return work


def test_work_is_done_in_order_and_a_fault_of_one_is_not_the_next_ones(
    follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def fails() -> None:
        raise RuntimeError("planted")

    for number in range(5):
        follower.submit(b"", lambda number=number: seen.append(number))  # type: ignore[misc]
        follower.submit(b"", fails)
    done(follower)
    assert seen == [0, 1, 2, 3, 4]
    assert sum("planted" in str(record.exc_info) for record in caplog.records) == 5


def test_nothing_is_overdue_where_nothing_is_done(follower: Follower) -> None:
    assert follower.overdue(0.0) is None
    done(follower)
    assert servers.until(lambda: follower.overdue(0.0) is None)


def test_what_computes_is_overdue_and_what_waits_for_a_processor_is_not(follower: Follower, works: list[Work]) -> None:
    """Count the CPU time of the thread: a busy machine is not the constraint's fault."""
    waits = busy(follower, works, b"waits", computes=False)
    assert not servers.until(lambda: follower.overdue(0.05), 0.3)
    waits.released.set()
    busy(follower, works, b"computes")
    assert servers.until(lambda: follower.overdue(0.05) == b"computes")
    assert follower.overdue(3600.0) is None


def test_work_goes_on_without_what_was_left_behind_whose_thread_ends_with_it(
    follower: Follower, works: list[Work]
) -> None:
    slow = busy(follower, works, b"slow")
    seen = threading.Event()
    follower.submit(b"next", seen.set)
    assert follower.leave(b"slow")
    assert seen.wait(60)
    assert not slow.done.is_set()
    assert follower.overdue(0.0) != b"slow"
    slow.released.set()
    assert slow.done.wait(60)
    assert slow.thread is not None
    slow.thread.join(60)
    assert not slow.thread.is_alive()
    done(follower)


def test_only_what_is_being_done_can_be_left_behind(follower: Follower, works: list[Work]) -> None:
    assert not follower.leave(b"nothing")
    slow = busy(follower, works, b"slow")
    assert not follower.leave(b"other")
    slow.released.set()
    done(follower)
    assert not follower.leave(b"slow")
    done(follower)


def test_several_are_left_behind_one_after_the_other(follower: Follower, works: list[Work]) -> None:
    for number in range(3):
        key = b"slow %d" % number
        busy(follower, works, key)
        assert follower.leave(key)
    done(follower)
    assert not any(work.done.is_set() for work in works)


def test_closing_ends_the_thread_behind_its_work(works: list[Work]) -> None:
    follower = Follower()
    work = busy(follower, works, b"last", computes=False)
    follower.close()
    work.released.set()
    assert work.thread is not None
    work.thread.join(60)
    assert not work.thread.is_alive()
