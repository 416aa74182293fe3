"""The drivers' pure parts: what they send, and what counts as a miss."""

from __future__ import annotations

import pytest

from tools.campaign import batch, crafted, hostile, programs, storm
from tools.campaign.running import growths, verdict
from tools.campaign.soak import MIB, Size

DOCUMENT = {
    "paths": {
        "/health": {"get": {}},
        "/ask": {
            "post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Ask"}}}}}
        },
    },
    "components": {"schemas": {"Ask": {"anyOf": [{"properties": {"prompt": {}}}, {"properties": {"n": {}}}]}}},
}


def test_hostile_requests_come_from_the_document_and_from_the_seed() -> None:
    routes = hostile.routes_of(DOCUMENT)
    assert routes == (hostile.Route("GET", "/health", ()), hostile.Route("POST", "/ask", ("n", "prompt")))
    one, same = hostile.Grammar(routes, 1), hostile.Grammar(routes, 1)
    made = [one.one() for _ in range(300)]
    assert made == [same.one() for _ in range(300)]
    assert len({kind for kind, _ in made}) == 11
    assert len({message for _, message in made}) > 150


def test_only_faults_of_the_server_count_among_statuses() -> None:
    seen = hostile.Seen()
    seen.statuses.update(
        {("field", 400): 5, ("field", 500): 1, ("head", 501): 1, ("garbage", 505): 1, ("deep", 503): 2}
    )
    assert seen.bad == 3


def test_growth_is_missed_by_memory_files_threads_and_a_lost_process() -> None:
    size = Size(200 * MIB, 30, 10)
    assert growths({"api": size}, {"api": Size(273 * MIB, 34, 14)})[1] == []
    for other in (Size(275 * MIB, 30, 10), Size(200 * MIB, 35, 10), Size(200 * MIB, 30, 15)):
        assert len(growths({"api": size}, {"api": other})[1]) == 1
    assert growths({"api": size}, {}) == ("", ["there is no api any more"])


def test_a_storm_is_missed_by_refused_clients_late_ends_and_bad_health() -> None:
    alone = storm.Seen()
    alone.answers[200] = 100
    kept = storm.Seen(closed=[11.0], health=[0.1])
    kept.answers[200] = 50
    assert storm.problems_of(alone, kept) == []
    missed = storm.Seen(closed=[15.1], health=[0.1], unhealthy=1)
    missed.answers.update({200: 49, 503: 1})
    assert len(storm.problems_of(alone, missed)) == 4


def test_rows_of_a_batch_have_ids_twice() -> None:
    assert b'"row-6"' in batch.row(7)
    assert b'"row-8"' in batch.row(8)


def test_the_last_line_stands_for_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict("all well", []) == 0
    assert verdict("figures", ["lost", "lost"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "all well",
        "PROBLEM: lost",
        "2 problems, such as: lost; figures",
    ]


def test_the_smaller_run_has_programs_of_each_kind_state_and_end() -> None:
    every, some = list(programs.cases(quick=False)), list(programs.cases(quick=True))
    assert set(some) < set(every)
    for field in ("kind", "state", "end", "own_process"):
        assert {getattr(case, field) for case in some} == {getattr(case, field) for case in every}


def test_a_program_is_missed_by_its_status_lost_words_tracebacks_and_what_is_left() -> None:
    case = programs.Case("LLM", "idle", "exit", own_process=True)
    right = {"status": 3, "out": "the last words\n", "err": "Traceback of a warning before it\nhere\n", "left": 0}
    assert list(programs.problems_of(case, **right)) == []
    for wrong in ({"status": -6}, {"status": None}, {"out": ""}, {"err": "here\nTraceback"}, {"left": 1}):
        assert len(list(programs.problems_of(case, **{**right, **wrong}))) == 1, wrong


def test_crafted_requests_are_of_every_backend_and_number_of_choices() -> None:
    names = [case.name for case in crafted.CASES]
    assert len(names) == len(set(names))
    for constraint in crafted.CONSTRAINTS:
        for backend in crafted.BACKENDS:
            found = {name for name in names if name.startswith(f"constraint: {constraint}, {backend}, n=")}
            assert len(found) == 3
    for case in crafted.CASES:
        assert case.message.startswith(b"POST /v1/completions HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", ""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n{}", ""),
        (b"", "no answer"),
        (b"HTTP/1.1 503 Unavailable\r\n\r\nwhy", "answered 503: b'why'"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"code": 500}}', "the answer has"),
    ],
)
def test_a_crafted_request_is_missed_by_a_5xx_an_error_in_its_stream_and_no_answer(answer: bytes, problem: str) -> None:
    found = crafted.problem_of(crafted.Case("a", b""), answer)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_a_trailer_is_missed_where_it_acts() -> None:
    cases = {case.name: case for case in crafted.trailers()}
    head = b"HTTP/1.1 200 OK\r\n"
    fine, refused, named = head + b"\r\n{}", b"HTTP/1.1 401 Unauthorized\r\n\r\n{}", b"x-request-id: from-a-trailer\r\n"
    assert crafted.problem_of(cases["trailers: authorization"], fine)
    assert not crafted.problem_of(cases["trailers: authorization"], refused)
    assert not crafted.problem_of(cases["trailers: x-request-id"], fine)
    assert crafted.problem_of(cases["trailers: x-request-id"], head + named + b"\r\n{}")
