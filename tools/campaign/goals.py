"""The goals: what the server must survive, its bound, and the commands that prove it.

A command proves its goal by exit status 0; the last line that it prints is the figure that the table shows. `quick`
and `full` are the words after ``python -m``: a driver of this package, or tests. A goal without commands waits for a
feature that this build does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

Command = tuple[str, ...]


@dataclass(frozen=True)
class Goal:
    """A goal. `quick` takes a minute or so, `full` up to ten; without `full` both are the same."""

    id: str
    what: str
    bound: str
    quick: tuple[Command, ...] = ()
    full: tuple[Command, ...] = ()
    waits_for: str = ""


def _tests(*nodes: str, slow: bool = False) -> Command:
    """Return a pytest command that shows what tests print of victims; with `slow` also those of `make test-slow`."""
    return ("pytest", "-rfEP", *(("-m", "slow or not slow") if slow else ()), *nodes)


def _driver(name: str, *words: str) -> Command:
    return (f"tools.campaign.{name}", *words)


def _driven(name: str, *words: str) -> tuple[tuple[Command], tuple[Command]]:
    """Return the quick and the full command of a driver that has both."""
    return (_driver(name, "--quick", *words),), (_driver(name, *words),)


_API = "tests/unit/api/"
_E2E = "tests/e2e/"
_FRONTEND = "tests/unit/frontend/"
_LOADS = ("burst", "bodies", "prompts", "overload")
_ABORTS = (_tests("tests/simulate/test_machine.py", "tests/simulate/test_engine_deaths.py"),)
_CONSTRAINTS = (_tests(f"{_FRONTEND}guided/test_compiler.py", "tests/conformance/test_kits_guided_decoding.py"),)

HOSTILE = (
    Goal(
        "G-H1",
        "every field of every route at and beyond its borders, and with wrong types",
        "400 that names the field, no 5xx, a victim stream unchanged",
        (_tests(f"{_E2E}http/test_hostile.py", "-k", "borders or json"),),
        (_tests(f"{_E2E}http/test_hostile.py", slow=True),),
    ),
    Goal(
        "G-H2",
        "token ids that the model does not have, in every field that takes ids",
        "400, or 200 without a change for others",
        (_tests(f"{_E2E}http/test_hostile.py", "-k", "token_ids"),),
    ),
    Goal(
        "G-H3",
        "lists and counts over their limits",
        "400 before any copy",
        (_tests(f"{_E2E}http/test_hostile.py", "-k", "lists"),),
    ),
    Goal(
        "G-H4",
        "invalid schemas, regular expressions and grammars, for every backend",
        "400, nothing reaches the engine",
        (_tests(f"{_FRONTEND}guided", "tests/unit/plugins/guided_decoding"),),
        (_tests(f"{_FRONTEND}guided", "tests/unit/plugins/guided_decoding", slow=True),),
    ),
    Goal(
        "G-H5",
        "constraints that explode, for every backend",
        "400 within 6 s, only the child dies; alone and for 128 choices, no 5xx",
        (*_CONSTRAINTS, _driver("crafted", "n=16")),
        (*_CONSTRAINTS, _driver("crafted", "constraint")),
    ),
    Goal(
        "G-H6",
        "20,000 distinct schemas",
        "memory on a plateau, no files written",
        *_driven("schemas"),
    ),
    Goal(
        "G-H7",
        "templates of requests: endless, expanding, reserved names",
        "403, or 400 within 3 s; the server's own go on",
        (_tests(f"{_FRONTEND}children", f"{_FRONTEND}text/test_template.py"),),
    ),
    Goal(
        "G-H8",
        "tool and reasoning parsers with a MiB of adversarial output",
        "linear time, nothing is executed",
        (_tests("tests/conformance/test_kits_parsers.py"),),
    ),
    Goal(
        "G-H9",
        "parsers, stop strings and UTF-8 in pieces of every size",
        "the same events for every cut",
        (_tests("tests/unit/parsing", f"{_FRONTEND}text/test_stops.py", f"{_FRONTEND}text/test_detokenize.py"),),
        (_tests("tests/unit/parsing", f"{_FRONTEND}output", f"{_FRONTEND}text", slow=True),),
    ),
    Goal(
        "G-H10",
        "special tokens in what users write",
        "text, in linear time",
        (_tests(f"{_E2E}http/test_hostile.py", "-k", "conversations"),),
    ),
    Goal("G-H11", "tensors from clients", "403 or 400, bounded memory", (_tests(f"{_FRONTEND}admission"),)),
    Goal("G-H12", "addresses inside the network in URLs of media", "no connection", waits_for="media in prompts"),
    Goal("G-H13", "bombs of media", "400 or 413, bounded memory", waits_for="media in prompts"),
    Goal("G-H14", "sizes and modes of media", "200 or 400", waits_for="media in prompts"),
    Goal(
        "G-H15",
        "what errors tell",
        "no address, path, traceback, key or foreign prompt",
        (_tests(f"{_API}test_app.py", "-k", "error or bug or hostile"),),
    ),
    Goal(
        "G-H16",
        "raw HTTP: smuggling, odd Host, chunks, headers, pipelining",
        "400, 413, 431 or closed",
        (_tests(f"{_API}test_server.py"), _driver("crafted", "trailers")),
    ),
    Goal(
        "G-H17",
        "JSON: depth, integers, repeated keys, surrogates",
        "400, linear time",
        (_tests(f"{_API}test_decode.py", f"{_API}test_app.py", "-k", "json or json_ or scan or body"),),
    ),
    Goal(
        "G-H18",
        "requests made from the OpenAPI document",
        "no 5xx, answers that fit the document",
        (_tests(f"{_E2E}http/test_schemathesis.py"), _driver("hostile", "--quick")),
        (_tests(f"{_E2E}http/test_schemathesis.py", slow=True), _driver("hostile")),
    ),
    Goal(
        "G-H19",
        "mutated files for every parser of files",
        "one error, bounded memory, no crash",
        (_tests("tests/unit/test_damaged_files.py", "tests/unit/plugins/load_format/test_hostile.py"),),
        (_tests("tests/unit/test_damaged_files.py", "tests/unit/plugins/load_format/test_hostile.py", slow=True),),
    ),
    Goal(
        "G-H20",
        "names and lines that clients would add to metrics and logs",
        "constant size, escaped lines",
        (_tests(f"{_API}test_app.py", "-k", "metrics or escaped or request_id"),),
    ),
)

OVERLOAD = (
    Goal(
        "G-O1",
        "ten times the work that the server can do, for five minutes",
        "429 p99 < 100 ms, first tokens within twice those of a full queue, 0.9 of the peak, as before 5 s later",
        *_driven("overload"),
    ),
    Goal(
        "G-O2",
        "probes under a burst, large bodies, long prompts, and ten times the connections that the queue has room for",
        "p99 over a bare server: /health < 1 s, on --probe-port < 100 ms, /metrics there < 500 ms",
        tuple(_driver("liveness", "--load", load, "--check") for load in _LOADS),
    ),
    Goal(
        "G-O3",
        "bodies of 31 MiB that are held, sent slowly, left, or full of ids",
        "bounded memory",
        *_driven("memory"),
    ),
    Goal(
        "G-O4",
        "a pool with room for little more than one long request",
        "all finish, at most 8 preemptions each",
        (_tests("tests/simulate"),),
        (_tests("tests/simulate", slow=True),),
    ),
    Goal(
        "G-O5",
        "a request that can never fit",
        "refused at admission",
        (_tests(f"{_E2E}frame/test_limits.py"),),
    ),
    Goal(
        "G-O6",
        "1,000 clients that leave, in every phase",
        "all freed within 5 s",
        *_driven("disconnects"),
    ),
    Goal(
        "G-O7",
        "2,000 requests that are aborted at once; ids that are used again while they end",
        "no wrong text, no hang, no gap of another stream over 1 s",
        (*_ABORTS, _driver("aborts", "--quick")),
        (*_ABORTS, _driver("aborts")),
    ),
    Goal(
        "G-O8",
        "slow and idle connections by the thousand, no file descriptors",
        "active clients go on",
        *_driven("storm"),
    ),
    Goal(
        "G-O9",
        "clients that do not read",
        "paused, bounded memory",
        (_tests(f"{_API}test_server.py", "-k", "reader"),),
    ),
    Goal("G-O10", "one key that floods", "another's requests go on", (_driver("keys", "--quick"),), (_driver("keys"),)),
    Goal(
        "G-O11",
        "streams through nginx",
        "they survive, and a client's end arrives",
        (_tests(f"{_E2E}frame/test_nginx.py"),),
    ),
    Goal(
        "G-O12",
        "the maximum of everything at once",
        "200 or 429; over a limit 400",
        (_tests("tests/simulate/test_runs.py"), _driver("crafted", "logprobs")),
    ),
)

FAULTS = (
    Goal(
        "G-F1",
        "the engine is killed under streams",
        "every client has an end within 5 s",
        (_driver("deaths", "--streams", "16", "kill-engine"),),
        (_driver("deaths", "kill-engine"),),
    ),
    Goal(
        "G-F2",
        "any process is killed or stopped",
        "no survivor, no client without an end",
        (_driver("deaths", "--streams", "16"),),
        (_driver("deaths"),),
    ),
    Goal(
        "G-F3", "a thread or a step that hangs", "noticed, exit with a non-zero status", (_tests("tests/unit/launch"),)
    ),
    Goal(
        "G-F4",
        "the Nth allocation, open, send or child start fails",
        "one clear outcome",
        *_driven("nth_failure"),
    ),
    Goal(
        "G-F5",
        "SIGTERM under streams, a second signal",
        "streams end whole, or with an error",
        (_tests(f"{_E2E}launch/test_processes.py", f"{_E2E}launch/test_signals.py"),),
    ),
    Goal(
        "G-F6",
        "the engine dies, then SIGTERM",
        "exit status 1",
        (_tests(f"{_E2E}launch/test_processes.py", "-k", "death"),),
    ),
    Goal("G-F7", "NaN, ids out of range, faults of plugins", "that request alone", (_tests("tests/unit/runner"),)),
    Goal(
        "G-F8",
        "no memory in a step",
        "the largest and newest requests fail, a second time within a minute ends the engine",
        (_tests("tests/unit/execution/test_shortage.py", "tests/unit/engine", "tests/unit/runner"),),
    ),
    Goal(
        "G-F9",
        "unusable places and models",
        "it serves, or says why in a line",
        (_driver("starts", "growing", "nofile", "no-", "read-only", "foreign", "stderr", "full"),),
        (_driver("starts"),),
    ),
    Goal("G-F10", "a full pipe, a slow scraper", "steps go on", (_tests(f"{_E2E}launch/test_logs.py", slow=True),)),
    Goal(
        "G-F11",
        "killed and started again, two servers on one port",
        "binds at once, nothing is left",
        *_driven("again"),
    ),
    Goal(
        "G-F12", "clocks that jump, a suspended machine", "no time-outs", (_tests("tests/unit/launch/test_parts.py"),)
    ),
    Goal("G-F13", "ranks of several processes", "all end soon", waits_for="several workers"),
    Goal(
        "G-F14",
        "the simulator: a million steps, planted bugs",
        "all laws hold, all bugs are found",
        (_tests("tests/simulate"),),
        (_tests("tests/simulate", slow=True),),
    ),
    Goal(
        "G-F15",
        "the event loop watches itself",
        "stalls are counted and logged",
        (_tests(f"{_API}", "-k", "stall or guard"),),
    ),
    Goal(
        "G-F16",
        "programs that end, or are ended, with an open engine",
        "the status of a program without one within 15 s, no process left",
        *_driven("programs"),
    ),
)

LEAKS = (
    Goal(
        "G-L1",
        "hours of mixed load with a fault now and then",
        "memory, files and threads stay",
        (_driver("soak", "--minutes", "2"),),
        (_driver("soak", "--minutes", "60"),),
    ),
    Goal(
        "G-L2",
        "short requests by the ten thousand",
        "memory stays",
        (_driver("soak", "--minutes", "2", "--short"),),
        (_driver("soak", "--minutes", "20", "--short"),),
    ),
    Goal(
        "G-L3",
        "100,000 hostile requests",
        "memory within 5 % + 64 MiB",
        *_driven("hostile"),
    ),
    Goal(
        "G-L4",
        "a soak with faults",
        "no drift",
        (_driver("soak", "--minutes", "2", "--faults"),),
        (_driver("soak", "--minutes", "30", "--faults"),),
    ),
    Goal(
        "G-L5",
        "what is left after a drain",
        "nothing",
        (_tests(f"{_E2E}launch/test_soak.py"),),
        (_tests(f"{_E2E}launch/test_soak.py", slow=True),),
    ),
    Goal("G-L6", "a day on a GPU", "device memory stays", waits_for="a machine with a GPU"),
    Goal(
        "G-L7",
        "many more responses than the store keeps, by count, bytes and age",
        "never more than the bounds, the newest are there, those that went are a 404, memory stays",
        *_driven("stored", "bounds"),
    ),
)

ISOLATION = (
    Goal(
        "G-A1",
        "every route, method and place of a key",
        "401 but for the public list",
        (_tests(f"{_API}test_access.py"),),
    ),
    Goal(
        "G-A2",
        "Host and path confusion",
        "no by-pass",
        (_tests(f"{_API}test_origin.py", f"{_API}test_app.py", "-k", "path or host or origin"),),
    ),
    Goal(
        "G-A3", "comparison of keys", "constant time", (_tests("tests/unit/test_api_keys.py", f"{_API}test_access.py"),)
    ),
    Goal("G-A4", "what listens", "HTTP alone", (_tests(f"{_E2E}launch/test_one.py", f"{_E2E}launch/test_many.py"),)),
    Goal(
        "G-A5",
        "garbage on the engine's socket",
        "dropped",
        (_tests("tests/unit/wire", "tests/unit/launch/test_parts.py"),),
    ),
    Goal(
        "G-A6",
        "model folders with code, links and pickles",
        "refused, nothing runs",
        (_driver("starts", "config", "pickle", "nan"),),
        (_driver("starts"),),
    ),
    Goal("G-A7", "revisions at hubs", "every fetch carries it", (_tests("tests/unit/plugins/hub"),)),
    Goal(
        "G-A8",
        "cached prompts of others",
        "not told by time or counts",
        *_driven("keys"),
    ),
    Goal("G-A9", "routes for administration", "absent by default", (_tests(f"{_E2E}http/test_admin.py"),)),
    Goal(
        "G-A10",
        "banned calls, versions with known holes",
        "no findings",
        (_tests("tests/architecture", "tests/unit/tools/test_constraints.py"),),
    ),
)

DATA = (
    Goal(
        "G-D1",
        "files of weights with flipped bits",
        "refused, or found by digests",
        (_tests("tests/unit/assembly/test_integrity.py", "tests/unit/test_damaged_files.py"),),
    ),
    Goal("G-D2", "delivered text is the reference", "no difference", (_tests("tests/simulate/test_runs.py"),)),
    Goal(
        "G-D3",
        "options that make it faster",
        "the same text",
        (_tests("tests/unit/runner/test_overlap.py", "tests/unit/runner/test_steps.py"),),
    ),
    Goal(
        "G-D4",
        "one end for each stream",
        "always",
        (_tests(f"{_FRONTEND}test_service.py", f"{_API}test_app.py", "-k", "stream or finish or usage"),),
    ),
    Goal(
        "G-D5",
        "batch files: killed in the middle, full disks",
        "no loss, nothing twice",
        *_driven("batch"),
    ),
    Goal(
        "G-D6",
        "stored responses: killed under load, a full disk, and started again",
        "whole or failed, as they were told, streams with one end; 500 while the disk is full",
        *_driven("stored", "restarts"),
    ),
    Goal(
        "G-D7",
        "weights that change under traffic",
        "one version for each request",
        waits_for="adapters and updates of weights",
    ),
    Goal("G-D8", "neighbours end or are preempted", "others unchanged", (_tests("tests/simulate/test_machine.py"),)),
)

GROUPS = {
    "Hostile input": HOSTILE,
    "Overload": OVERLOAD,
    "Faults": FAULTS,
    "Leaks": LEAKS,
    "Keys, isolation, supply": ISOLATION,
    "Data": DATA,
}
