"""The driver that measures probes under load: what it says of figures, and that it asks and reads answers."""

from __future__ import annotations

import asyncio

from tools.campaign.liveness import BARE, HEALTH, MAIN, METRICS, ask, problems, ranked_ms, request, stalls


def test_figures() -> None:
    assert ranked_ms([0.001 * number for number in range(1, 201)]) == (101.0, 199.0, 200.0)
    assert ranked_ms([])[0] == float("inf")


def test_what_was_not_kept() -> None:
    fast = {MAIN: [0.9] * 100, HEALTH: [0.09] * 100, METRICS: [0.4]}
    assert problems(fast) == []
    late = {**fast, HEALTH: [0.2] * 100}
    assert problems(late) == [f"{HEALTH} p99 200 ms, more than 100 over the 0 of a bare server"]
    assert problems({**late, BARE: [0.09]}) == [f"{HEALTH} p99 200 ms, more than 100 over the 90 of a bare server"]
    assert problems({**late, BARE: [0.11]}) == []
    assert problems({**fast, MAIN: [1.1]}) == [f"{MAIN} p99 1100 ms, more than 1000 over the 0 of a bare server"]
    assert problems({**fast, "/health lost": [1.0, 2.0]}) == ["2 probes were answered /health lost"]
    assert [problem.partition(" ms")[0] for problem in problems({})] == [
        f"{name} p99 inf" for name in (MAIN, HEALTH, METRICS)
    ]


def test_stalls_that_the_server_saw() -> None:
    line = 'ferrule:event_loop_stall_seconds_bucket{{api="0",le="{}"}} {}'.format
    assert stalls("\n".join([line("0.05", 7.0), line("0.1", 9.0), line("0.25", 9.0), line("+Inf", 9.0)])) == (
        "2 loop stalls > 50 ms, all <= 0.1 s"
    )
    assert stalls("\n".join([line("0.05", 9.0), line("+Inf", 9.0)])) == "0 loop stalls > 50 ms"


def test_a_refusal_that_comes_before_the_body_has_gone_is_read() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\n\r\n")
        writer.write_eof()
        while await reader.read(1 << 16):  # closing with something unread would reset the connection
            pass
        writer.close()

    async def run() -> tuple[str, float]:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            return await ask(server.sockets[0].getsockname()[1], request("/v1/completions", bytes(1 << 20)))

    status, seconds = asyncio.run(run())
    assert status == "429"
    assert seconds > 0
