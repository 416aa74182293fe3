"""How much memory there is by files of the system, and making a cache real."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ferrule.errors import ConfigError, StepTooLarge
from ferrule_plugins.platform import cpu_memory
from ferrule_plugins.platform.cpu_memory import CpuMemory, available, limit

GIB = 1 << 30


def _machine(folder: Path, groups: str, **files: str) -> tuple[Path, Path]:
    """Make (proc, cgroup) with 8 GiB available and 1 GiB of swap. `files`: path with __ for /, and - for a dot →
    text.
    """
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\nSwapFree: {1 << 20} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        file = cgroup / name.replace("__", "/").replace("DOT", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return proc, cgroup


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available(*_machine(tmp_path, "0::/user\n", user__memoryDOTmax="max\n")) == 9 * GIB


def test_version_2_has_the_smallest_of_a_group_and_those_around_it(tmp_path: Path) -> None:
    files = {
        "pod__box__memoryDOTmax": f"{4 * GIB}\n",
        "pod__box__memoryDOTcurrent": f"{3 * GIB}\n",
        "pod__box__memoryDOTstat": f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\n",  # these can be had
        "pod__memoryDOTmax": f"{5 * GIB}\n",
        "pod__memoryDOTcurrent": f"{4 * GIB}\n",
    }
    places = _machine(tmp_path, "0::/pod/box\n", **files)
    assert available(*places) == 1 * GIB
    assert limit(*places) == 4 * GIB


def test_version_1_of_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "memory__memoryDOTlimit_in_bytes": f"{2 * GIB}\n",
        "memory__memoryDOTusage_in_bytes": f"{GIB}\n",
        "memory__memoryDOTstat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
    }
    places = _machine(tmp_path, "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/\n", **files)
    assert available(*places) == 3 * GIB // 2
    assert limit(*places) == 2 * GIB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


SIZE = (160 << 20) + 12345


@pytest.mark.parametrize("old", [False, True])
def test_a_cache_is_resident_and_still_zero(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill at once where there is not twice as much memory, and where the kernel does not know the advice."""
    monkeypatch.setattr(cpu_memory, "available", lambda: 4 * GIB if old else 2 * SIZE)
    if old:
        monkeypatch.setattr(cpu_memory, "_POPULATE_WRITE", 9999)
    storage = CpuMemory(1 << 40).zeros((SIZE,), torch.uint8)
    assert storage.data_ptr() % mmap.PAGESIZE == 0
    before = _resident()
    CpuMemory(1 << 40).commit([storage, torch.zeros(3)])
    assert _resident() - before > SIZE - (8 << 20)
    assert not storage.count_nonzero()


def _thread(monkeypatch: pytest.MonkeyPatch, storage: list[torch.Tensor]) -> threading.Thread:
    """Return the thread that fills a cache after the start, not yet begun. As in a worker, a daemon thread makes it."""
    threads: list[threading.Thread] = []
    started = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.append(thread))
    maker = threading.Thread(target=CpuMemory(1 << 40).commit, args=(storage,), daemon=True)
    started(maker)
    maker.join()
    monkeypatch.undo()
    return threads[0]


def test_where_memory_is_plenty_a_cache_is_filled_behind_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep in the cache's pages what was written to them before."""
    storages = [CpuMemory(1 << 40).zeros((SIZE,), torch.uint8) for _ in range(2)]
    thread = _thread(monkeypatch, storages)
    before = _resident()
    storages[1][SIZE // 2 :] = 7
    thread.start()
    thread.join()
    assert _resident() - before > 2 * SIZE - (8 << 20)
    assert not storages[0].count_nonzero()
    assert storages[1].count_nonzero() == SIZE - SIZE // 2


def test_filling_rests_but_not_for_long_and_has_no_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rest briefly: the program's end waits for the rest, and a low priority would hold up threads that wait for its
    locks.
    """
    storages = [CpuMemory(1 << 40).zeros((20 << 20,), torch.uint8)]
    thread = _thread(monkeypatch, storages)
    rests: list[tuple[float, int]] = []

    def sleep(seconds: float) -> None:
        rests.append((seconds, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    clock = itertools.cycle((0.0, 0.001, 1.0, 9.0))  # parts that take 0.001 and 8 seconds
    monkeypatch.setattr(cpu_memory, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=sleep))
    thread.start()
    thread.join()
    assert {round(seconds, 6) for seconds, _ in rests} == {0.007, 0.1}
    assert {priority for _, priority in rests} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_a_cache_that_was_let_go_is_not_filled_further(monkeypatch: pytest.MonkeyPatch) -> None:
    storages = [CpuMemory(1 << 40).zeros((SIZE,), torch.uint8) for _ in range(2)]
    thread = _thread(monkeypatch, storages)
    before = _resident()
    del storages[1]
    thread.start()
    thread.join()
    assert _resident() - before < 32 << 20


def test_the_program_waits_for_the_filling_which_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the thread: one that is the last to hold a tensor, and is not waited for, aborts the process."""
    storages = [CpuMemory(1 << 40).zeros((SIZE,), torch.uint8) for _ in range(2)]
    thread = _thread(monkeypatch, storages)
    assert not thread.daemon
    before = _resident()
    monkeypatch.setattr(threading, "main_thread", lambda: threading.Thread())  # not alive
    thread.start()
    thread.join()
    assert _resident() - before < 32 << 20


def test_a_cache_is_not_filled_with_memory_that_others_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storages = [CpuMemory(1 << 40).zeros((SIZE,), torch.uint8)]
    thread = _thread(monkeypatch, storages)
    before = _resident()
    there = iter([GIB, GIB, GIB, 1, 1])
    monkeypatch.setattr(cpu_memory, "available", lambda: next(there))
    thread.start()
    thread.join()
    assert _resident() - before < 32 << 20
    assert "others have taken the rest. Set --kv-cache-memory-bytes" in caplog.text


def test_a_cache_that_does_not_fit_is_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse it before anything is written, and when others take memory meanwhile."""
    storage = CpuMemory(1 << 40).zeros((256 << 20,), torch.uint8)
    there = iter([GIB // 2, GIB // 2, 0, 0, 0, 0])
    monkeypatch.setattr(cpu_memory, "available", lambda: next(there))
    with pytest.raises(ConfigError, match=r"to have 0.25 GiB, but 0.00 GiB of memory"):
        CpuMemory(1 << 40).commit([storage])
    monkeypatch.setattr(cpu_memory, "available", lambda: 200 << 20)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        CpuMemory(1 << 40).commit([storage])


def test_weights_that_do_not_fit_are_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "available", lambda: 2 * GIB)
    CpuMemory(1 << 40).check_weights(2 * GIB)
    with pytest.raises(ConfigError, match=r"need 3\.0 GiB, but 2\.0 GiB"):
        CpuMemory(1 << 40).check_weights(3 * GIB)


@pytest.mark.parametrize(("stage", "says"), [("load", "weights cannot be"), ("cache", "KV cache cannot be")])
def test_an_allocation_that_fails_is_one_block(stage: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says), CpuMemory(1).guard(stage):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=says), CpuMemory(1).guard(stage):
        CpuMemory(1 << 40).zeros((1 << 55,), torch.uint8)
    with pytest.raises(RuntimeError, match="other"), CpuMemory(1).guard(stage):
        raise RuntimeError("other")
    with pytest.raises(StepTooLarge), CpuMemory(1).guard("step"):
        torch.empty(1 << 60, dtype=torch.uint8)
