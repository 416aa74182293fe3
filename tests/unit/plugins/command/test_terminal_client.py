"""The client of `chat` and `complete` against servers that say odd things."""

from __future__ import annotations

import io
import json
import signal
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from ferrule.config.parse import parse
from ferrule.config.schema import Schema
from ferrule.env import read as read_environment
from ferrule.env import terminal
from ferrule.errors import ConfigError
from ferrule_plugins.command.chat import ChatOptions
from ferrule_plugins.command.terminal.chunks import Figures, ShownAnswer, told
from ferrule_plugins.command.terminal.client import Server, Unanswered
from ferrule_plugins.command.terminal.conversation import Completions, Conversation
from ferrule_plugins.command.terminal.editor import Lines, history_file
from ferrule_plugins.command.terminal.screen import Screen, clean, one_line


class Script:
    """A server that answers each POST with the next text of `says`, and /v1/models with one model."""

    def __init__(self) -> None:
        self.says: list[tuple[int, dict[str, str], bytes]] = []
        self.heard: list[tuple[str, dict[str, str], Any]] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._next(None)

            def do_POST(self) -> None:
                self._next(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _next(self, body: Any) -> None:
                script.heard.append((self.path, dict(self.headers), body))
                status, headers, data = script.says.pop(0)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stream(self, *events: Any, done: bool = True) -> None:
        lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
        text = "".join(f"data: {line}\n\n" for line in [*lines, *(["[DONE]"] if done else [])])
        self.says.append((200, {"Content-Type": "text/event-stream"}, text.encode()))

    def deltas(self, *deltas: dict[str, Any], finish: str = "stop") -> None:
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        self.stream(*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})

    def fails(self, status: int, body: Any, **headers: str) -> None:
        self.says.append((status, headers, body if isinstance(body, bytes) else json.dumps(body).encode()))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    made.close()


@pytest.fixture
def server(script: Script) -> Server:
    return Server(f"http://127.0.0.1:{script.port}/v1/", "secret")


class Shown:
    """A conversation on a screen that is two strings."""

    def __init__(self, server: Server, styled: bool = False, thinking: bool = True, **fields: Any) -> None:
        self._out, self._err = io.StringIO(), io.StringIO()
        screen = Screen(self._out, self._err, styled=(styled, styled), thinking=thinking)
        self.chat = Conversation(server, "m", screen, fields, stats=False, system="Be brief.")

    @property
    def out(self) -> str:
        return self._out.getvalue()

    @property
    def err(self) -> str:
        return self._err.getvalue()

    def run(self, *lines: str, interactive: bool = True) -> int:
        source = io.StringIO("".join(line + "\n" for line in lines))
        return self.chat.run(Lines(source, None), interactive=interactive)


# ------------------------------------------------------------------------------------------------ what is shown


def test_the_conversation_goes_with_every_request(script: Script, server: Server) -> None:
    shown = Shown(server, temperature=0.5)
    script.deltas({"role": "assistant"}, {"content": "one"}, {"content": " two"})
    script.deltas({"content": "three"})
    assert shown.run("first", "  ", "second\\", "line") == 0
    assert shown.out == "one two\nthree\n"
    (path, headers, body), (_, _, again) = script.heard
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert (body["stream"], body["stream_options"], body["temperature"]) == (True, {"include_usage": True}, 0.5)
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "first"}
    assert body["messages"] == [system, first]
    said = {"role": "assistant", "content": "one two"}
    assert again["messages"] == [system, first, said, {"role": "user", "content": "second\nline"}]


def test_commands(script: Script, server: Server) -> None:
    shown = Shown(server)
    for text in ("a", "b", "c"):
        script.deltas({"content": text})
    script.says.insert(1, (200, {}, b'{"data": [{"id": "m"}, {"id": "other"}]}'))
    script.says.insert(2, (200, {}, b'{"data": [{"id": "m"}, {"id": "other"}]}'))
    shown.run(
        "x", "/model othr", "/model other", "/system Be long.", "/reset", "y", "/system -", " /z", "/exit", "never"
    )
    bodies = [body for path, _, body in script.heard if body]
    assert [body["model"] for body in bodies] == ["m", "other", "other"]
    assert bodies[1]["messages"] == [{"role": "system", "content": "Be long."}, {"role": "user", "content": "y"}]
    assert [m["content"] for m in bodies[2]["messages"]] == ["y", "b", " /z"]
    assert "no model 'othr'. Did you mean 'other'?" in shown.err
    assert "* other" in shown.err
    assert "There is no system prompt." in shown.err


def test_help_names_every_command_and_a_wrong_one_is_no_message(script: Script, server: Server) -> None:
    shown = Shown(server)
    assert shown.run("/help", "/rset", "/stats") == 0
    assert not script.heard
    for name in shown.chat.actions():
        assert f"/{name}" in shown.err
    assert "no command /rset. Did you mean '/reset'?" in shown.err
    assert "session: 0 answers" in shown.err


def test_thinking_is_dimmed_or_marked_or_left_out(script: Script, server: Server) -> None:
    deltas = (
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"reasoning": "m"},
        {"content": "\n\n"},
        {"content": "yes"},
    )
    seen = []
    for styled, thinking in ((True, True), (False, True), (False, False)):
        script.deltas(*deltas)
        shown = Shown(server, styled, thinking)
        shown.run("?")
        seen.append(shown.out)
    assert seen == ["\x1b[2mhmm\n\x1b[0m\nyes\n", "<think>\nhmm\n</think>\n\n\nyes\n", "\n\nyes\n"]


def test_calls_are_readable_and_get_a_result(script: Script, server: Server) -> None:
    def call(number: int, arguments: str, **start: str) -> dict[str, Any]:
        function = {"arguments": arguments, **({"name": start.pop("name")} if "name" in start else {})}
        return {"tool_calls": [{"index": number, "function": function, **start}]}

    script.deltas(
        {"content": "So: "},
        call(0, "", id="a", name="weather"),
        call(0, '{"city": '),
        call(0, '"Paris"}'),
        call(1, "{}", id="b", name="time"),
        finish="tool_calls",
    )
    script.deltas({"content": "ok"})
    shown = Shown(server)
    shown.run("x", "y")
    assert shown.out == 'So: \n→ weather({"city": "Paris"})\n→ time({})\nok\n'
    assistant, first, second = script.heard[1][2]["messages"][2:5]
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == ['{"city": "Paris"}', "{}"]
    assert [first["tool_call_id"], second["tool_call_id"]] == ["a", "b"]


def test_output_cannot_control_the_terminal(script: Script, server: Server) -> None:
    nasty = "\x1b[2J\x1b]0;title\x07\x9b31m\rover\x7f\x00\ud800 tab\t"
    script.deltas(
        {"reasoning": nasty},
        {"content": nasty},
        {"tool_calls": [{"index": 0, "function": {"name": nasty, "arguments": nasty}}]},
    )
    script.stream({"error": {"message": f"a\n{nasty}"}})
    script.fails(400, {"error": {"message": nasty}})
    script.says.append((200, {}, json.dumps({"data": [{"id": nasty}]}).encode()))
    shown = Shown(server)
    shown.run("x", "x", "x", "/model")
    for text in (shown.out, shown.err):
        assert all(c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") for c in text)
        text.encode()
        assert "\\x1b[2J" in text
    assert len(shown.err.splitlines()) == 3


def test_clean_and_one_line() -> None:
    assert clean("a\r\nb\u202fé\tz") == "a\nb\u202fé\tz"
    assert one_line("a\n\n  b\x1b") == "a b\\x1b"
    assert len(one_line("x" * 10_000)) == 500


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ((401, {}, b'{"error": {"message": "no key"}}'), "does not accept the API key (401: no key) Pass --api-key"),
        ((429, {"Retry-After": "7"}, b'{"error": {"message": "full"}}'), "429: full Try again in 7 s."),
        ((404, {}, b"<html>\nnothing</html>"), "404: <html> nothing</html> Is --url the base"),
        ((422, {}, b'{"detail": [{"loc": ["body"]}]}'), '422: [{"loc": ["body"]}]'),
        ((307, {"Location": "http://evil/v1"}, b""), "has moved to http://evil/v1 (307). Name the new one with --url."),
        ((500, {}, b""), "answers 500: Internal Server Error"),
        ((200, {}, b"data: {\n\n"), "something that is not a chunk"),
        ((200, {}, b"data: [1]\n\n"), "something that is not a chunk"),
        ((200, {}, b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'), "something that is not a chunk"),
        ((200, {}, b": waiting\n\n"), "closed the connection in the middle"),
        ((200, {"Content-Length": "999"}, b'data: {"choices": []}\n\n'), "closed the connection in the middle"),
        (
            (200, {"Content-Type": "application/json"}, b'{"error": "broken"}'),
            "The server ended the response with an error: broken",
        ),
    ],
)
def test_errors_are_one_line_and_the_program_goes_on(
    script: Script, server: Server, says: tuple[int, dict[str, str], bytes], told: str
) -> None:
    script.says.append(says)
    script.deltas({"content": "fine"})
    shown = Shown(server)
    assert shown.run("lost", "kept") == 0
    assert shown.out == "fine\n"
    assert len(shown.err.splitlines()) == 1
    assert told in shown.err
    assert [message["content"] for message in script.heard[-1][2]["messages"]] == ["Be brief.", "kept"]


def test_warnings_of_the_server_are_told_once(script: Script, server: Server) -> None:
    for _ in range(2):
        chunk = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
        script.stream({**chunk, "ferrule": {"warnings": ["'foo' is not known"]}}, {**chunk, "ferrule": ["else"]})
    shown = Shown(server, foo=1)
    shown.run("x", "y")
    assert shown.err == "warning: 'foo' is not known\n"


def test_of_several_answers_the_first_is_shown(script: Script, server: Server) -> None:
    script.stream(*({"choices": [{"index": n, "text": f"{n}", "finish_reason": "stop"}]} for n in (1, 0, 1, 2)))
    shown = Shown(server, n=3)
    shown.run("x")
    assert shown.out == "0\n"


@pytest.mark.advisory("CVE-2025-43859")
def test_the_key_does_not_follow_a_redirect(script: Script, server: Server) -> None:
    script.fails(302, {}, Location=f"http://127.0.0.1:{script.port}/elsewhere")
    with pytest.raises(Unanswered, match=r"has moved to http://127.0.0.1:\d+/elsewhere \(302\)"):
        server.models()
    assert [path for path, _, _ in script.heard] == ["/v1/models"]


def test_a_server_on_this_machine_needs_no_proxy(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    script.fails(200, {"data": [{"id": "m"}]})
    assert Server(f"http://127.0.0.1:{script.port}/v1", "k").models() == ("m",)
    with pytest.raises(Unanswered):
        Server("http://192.0.2.1/v1", "k").models()  # by the proxy, which is not there


def test_an_error_in_the_middle_ends_the_line(script: Script, server: Server) -> None:
    script.stream({"choices": [{"delta": {"content": "half"}}]}, {"error": {"message": "the engine died"}}, done=False)
    shown = Shown(server)
    assert shown.run("x", interactive=False) == 1
    assert shown.out == "half\n"
    assert shown.err == "error: The server ended the response with an error: the engine died\n"


def test_a_second_interrupt_ends_the_request_as_the_first_does() -> None:
    """While one interrupt is dealt with the next one is raised wherever the loop is: what reads the answer goes on."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            chunks = Server(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "k").stream("/completions", {})
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                next(chunks)
    finally:
        signal.signal(signal.SIGALRM, former)


def test_nobody_there() -> None:
    with pytest.raises(Unanswered) as caught:
        Server("http://127.0.0.1:1/v1", "k").models()
    assert "refused" in caught.value.message
    assert "ferrule serve" in caught.value.hint
    with pytest.raises(Unanswered, match="host"):
        Server("http://no-such-host.invalid/v1", "k").models()


def test_a_tls_client_at_a_plain_server(script: Script) -> None:
    with pytest.raises(Unanswered, match="No TLS connection"):
        Server(f"https://127.0.0.1:{script.port}/v1", "k").models()


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"data": [{}]}', b"no json"])
def test_what_is_no_list_of_models(script: Script, server: Server, body: bytes) -> None:
    script.says.append((200, {}, body))
    with pytest.raises(Unanswered, match="list of models"):
        server.models()


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://h/v1", "http://", "http://h:x/v1", "http://u:p@h/v1", "http://h/v1?a=b", "http://h/\n"]
    + ["unix:", "unix:relative", "unix://", "http+unix://host/v1", "unix:/a\nb", "http+unix://%2Fa/v1?b=c"],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Server(url, "k")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h", "http://h/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/api/v2/", "https://h/api/v2"),
        ("unix:/run/s", "unix:/run/s"),
    ],
)
def test_bases(url: str, base: str) -> None:
    assert Server(url, "k").url == base


@pytest.mark.parametrize(
    "form", ["unix:{}", "unix://{}", "http+unix://{}", "http+unix://{quoted}", "unix://{quoted}/v1"]
)
def test_a_unix_socket(tmp_path: Path, form: str) -> None:
    path = tmp_path / "s o"
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b'{"data": [{"id": "m"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

        def address_string(self) -> str:
            return "socket"

    url = form.format(path, quoted=quote(str(path), safe=""))
    with pytest.raises(Unanswered, match="there is no socket"):
        Server(url, "k").models()
    with socketserver.UnixStreamServer(str(path), Handler) as served:
        thread = threading.Thread(target=served.handle_request)
        thread.start()
        assert Server(url, "k").models() == ("m",)
        thread.join()
    assert asked == ["/v1/models"]
    with pytest.raises(Unanswered, match="is refused"):
        Server(url, "k").models()


def test_a_key_that_no_header_can_carry() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        Server("http://h", "a\r\nX-Evil: 1")


# ------------------------------------------------------------------------------------------------ parts


def test_an_answer_that_was_not_streamed(script: Script, server: Server) -> None:
    calls = [{"id": str(n), "function": {"name": f"f{n}", "arguments": "{}"}} for n in range(2)]
    body = {"choices": [{"message": {"content": "whole", "tool_calls": calls}, "finish_reason": "stop"}]}
    script.says.append((200, {"Content-Type": "application/json"}, json.dumps(body).encode()))
    shown = Shown(server)
    shown.run("x")
    assert shown.out == "whole\n→ f0({})\n→ f1({})\n"


def test_a_completion_is_sent_as_it_is(script: Script, server: Server) -> None:
    script.stream({"choices": [{"text": " 4", "finish_reason": "length"}]})
    script.stream({"choices": [{"text": "x", "finish_reason": "length"}]})
    out = io.StringIO()
    screen = Screen(out, io.StringIO(), styled=(False, False), thinking=True)
    completions = Completions(server, "m", screen, {}, stats=False)
    assert completions.run(Lines(io.StringIO("  2 + 2 =\n/etc\n"), None), interactive=False) == 0
    assert [body["prompt"] for _, _, body in script.heard] == ["  2 + 2 =", "/etc"]
    assert out.getvalue() == " 4\nx\n"


def test_figures(script: Script, server: Server) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    script.stream({"choices": [{"text": "a", "finish_reason": "stop"}]}, {"choices": [], "usage": usage})
    answer = ShownAnswer()
    for chunk in server.stream("/completions", {}):
        assert [piece.text for piece in answer.take(chunk)] == (["a"] if chunk.choices else [])
    assert answer.first is not None
    answer.start, answer.first, answer.last = 0.0, 0.5, 2.0
    assert told(answer) == "first token after 500 ms, 2.0 tokens/s, output 4, prompt 9 (8 cached)"
    answer.usage = None
    assert told(answer).endswith("output about 1")
    assert told(ShownAnswer()) == "no tokens came"
    figures = Figures()
    figures.add(answer)
    assert figures.told() == "session: 1 answer, prompts 0, output 1 tokens, 0.5 tokens/s"


def test_lines_keep_what_a_backslash_at_the_end_leaves() -> None:
    prompts = io.StringIO()
    assert Lines(io.StringIO("a\\\nb\\"), prompts).read() == "a\nb\\"
    assert prompts.getvalue() == "> … … "


def test_the_history_is_private_and_bounded(tmp_path: Path) -> None:
    path = history_file(tmp_path / "new" / "ferrule")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    entry = "\n# 2025-01-01\n+" + "x" * 100 + "\n"
    path.write_text(entry * 20_000)
    assert history_file(path.parent) == path
    assert path.stat().st_mode & 0o777 == 0o600
    kept = path.read_text()
    assert 0 < len(kept) <= 1 << 19
    assert kept == entry * (len(kept) // len(entry))
    assert [file.name for file in path.parent.iterdir()] == ["chat_history"]


def test_a_history_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "chat_history").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        history_file(tmp_path)


@pytest.mark.parametrize(
    ("variables", "plain", "dumb"),
    [
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, False, False),
        ({"TERM": "dumb"}, True, True),
        ({}, True, True),
    ],
)
def test_what_the_terminal_is(variables: dict[str, str], plain: bool, dumb: bool) -> None:
    found = terminal(variables)
    assert (found.plain, found.dumb) == (plain, dumb)


def test_variables_of_others() -> None:
    found = terminal({"OPENAI_API_KEY": "k", "XDG_STATE_HOME": "/state"})
    assert (found.openai_api_key, found.state_folder) == ("k", Path("/state/ferrule"))
    assert terminal({"OPENAI_API_KEY": ""}).openai_api_key is None
    assert terminal({}).state_folder.is_absolute()


def test_the_key_comes_from_the_variable_of_the_option() -> None:
    """Read the key as documented: from FERRULE_API_KEY, and from the command line before it."""
    schema = Schema({"chat": ChatOptions})
    env = read_environment({"FERRULE_API_KEY": "k", "OPENAI_API_KEY": "other"})
    assert parse([], schema, env=env, positional=None).extra["chat"].api_key == "k"
    assert parse(["--api-key", "mine"], schema, env=env, positional=None).extra["chat"].api_key == "mine"
