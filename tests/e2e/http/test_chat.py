"""`ferrule chat` and `ferrule complete` as a user meets them: a real server, a real terminal, real pipes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pexpect
import pyte
import pytest

from ferrule_testkit import server as servers
from tests.fakes.serving import Here, serving_here

KEY = "sesame"
LONG = ["--extra-body", '{"ignore_eos": true, "max_tokens": 1900}']
STEPS = 40  # in which an answer has begun


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> servers.Gate:
    return servers.Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def tiny(gate: servers.Gate) -> Iterator[Here]:
    """Serve the embedded model behind a key."""
    with serving_here(["--api-key", KEY, "--served-model-name", "tiny", *gate.args]) as running:
        yield running


class _Screen(pyte.Screen):
    """A terminal's screen that also answers when it is asked where the cursor is."""

    reply: Callable[[str], object]

    def write_process_input(self, data: str) -> None:
        self.reply(data)


class Terminal:
    """A program in a terminal of 100 x 30. `text` is what stands on the screen now."""

    def __init__(self, argv: Sequence[str], variables: dict[str, str]) -> None:
        environment = {**os.environ, "TERM": "xterm-256color", **variables}
        self.child = pexpect.spawn(
            sys.executable, ["-m", "ferrule", *argv], env=environment, dimensions=(30, 100), timeout=240
        )
        self.child.delaybeforesend = None
        self.raw = b""
        self._screen = _Screen(100, 30)
        self._screen.reply = self.child.send
        self._stream = pyte.ByteStream(self._screen)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def wait(self, found: Callable[[str], object], what: str = "") -> str:
        """Read until the screen is as wanted."""
        deadline = time.monotonic() + servers.PATIENCE
        while not found(self.text):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} does not come:\n{self.text}")
            try:
                data = self.child.read_nonblocking(4096, timeout=1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                raise AssertionError(f"it left before {what}:\n{self.text}") from None
            self.raw += data
            self._stream.feed(data)
        return self.text

    def prompt(self, count: int) -> str:
        """Wait until there have been so many prompts, and the last one is empty."""
        return self.wait(
            lambda text: len(re.findall(r"^>", text, re.M)) == count and text.endswith("\n>"), f"prompt {count}"
        )

    def send(self, text: str) -> None:
        self.child.send(text)

    def left(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)


@pytest.fixture
def terminal(tiny: Here, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_(command: str, *args: str, **variables: str) -> Terminal:
        argv = [command, "--url", f"{tiny.url}/v1", *args]
        around = {"XDG_STATE_HOME": str(tmp_path / "state"), "OPENAI_API_KEY": KEY}
        opened.append(Terminal(argv, {**around, **variables}))
        return opened[-1]

    yield open_
    for each in opened:
        each.child.close(force=True)


def piped(
    url: str, command: str, *args: str, typed: str = "", key: str = KEY, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPENAI_API_KEY": key, "TERM": "xterm-256color", **variables}
    return subprocess.run(
        [sys.executable, "-m", "ferrule", command, "--url", f"{url}/v1", *args],
        input=typed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def aborted(server: Here) -> float:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=240) as response:
        text = response.read().decode()
    found = re.search(r'^vllm:request_success_total\{.*finished_reason="abort".*\} (\S+)$', text, re.M)
    assert found is not None
    return float(found[1])


# ------------------------------------------------------------------------------------------------ on a terminal


def test_a_conversation_on_a_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal("chat", "--stats")
    assert "tiny at http://127.0.0.1:" in chat.prompt(1)
    chat.send("Hello\r")
    assert "I am Tiny" in chat.prompt(2)
    assert re.search(r"^first token after \d+ ms, .* tokens/s, output \d+, prompt \d+", chat.text, re.M)
    chat.send("two\\\rlines\x1b\rthree\r")
    assert re.search(r"^> two\n… lines\n… three\n\S", chat.prompt(3), re.M)
    chat.send("\x1b[200~pasted\nover\n/exit\n\x1b[201~")
    chat.wait(lambda text: "/exit" in text)
    chat.send("\x03")
    chat.prompt(3)  # the line is emptied, nothing was sent and nothing run
    chat.send("/system Be brief.\r")
    assert "System prompt: Be brief." in chat.prompt(4)
    chat.send("/he\t")
    chat.wait(lambda text: text.endswith("> /help"), "the completed command")
    chat.send("\r")
    assert "/reset" in chat.prompt(5)
    chat.send("\x1b[A\x1b[A\x1b[A")
    chat.wait(lambda text: re.search(r"^> two\n… lines\n… three$", text, re.M | re.S), "the earlier message")
    chat.send("\x03")
    chat.prompt(5)
    chat.send("\x04")
    assert chat.left() == 0
    history = tmp_path / "state" / "ferrule" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+two\n+lines\n+three\n" in history.read_text()
    again = terminal("chat")
    again.prompt(1)
    again.send("\x1b[A")
    again.wait(lambda text: text.endswith("> /help"), "yesterday's line")
    again.send("\x03")
    again.prompt(1)
    again.send("\x03")
    assert again.left() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(
    tiny: Here, gate: servers.Gate, terminal: Callable[..., Terminal]
) -> None:
    before = aborted(tiny)
    chat = terminal("chat", *LONG, "--no-history")
    chat.prompt(1)
    with gate.shut(after=STEPS):
        chat.send("Hello\r")
        chat.wait(lambda text: "I am Tiny" in text)
        chat.send("typed too early\x03")
        chat.wait(lambda text: "(stopped)" in text)
    assert servers.until(lambda: aborted(tiny) == before + 1)
    chat.prompt(2)
    assert "typed" not in chat.text
    chat.send("/stats\r")
    assert "session: 1 answer" in chat.wait(lambda text: "session:" in text)
    chat.send("/exit\r")
    assert chat.left() == 0


def test_nothing_is_kept_without_history(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal("chat", "--no-history")
    chat.prompt(1)
    chat.send("/stats\r")
    chat.prompt(2)
    chat.send("\x04")
    assert chat.left() == 0
    assert not (tmp_path / "state").exists()


def test_a_folder_that_cannot_be_written(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chat = terminal("chat", XDG_STATE_HOME=str(tmp_path / "file"))
    assert "The history cannot be saved: Not a directory" in chat.prompt(1)
    chat.send("\x03")
    assert chat.left() == 0


def test_completions_on_a_terminal_without_colours(terminal: Callable[..., Terminal]) -> None:
    complete = terminal("complete", "--max-tokens", "4", "--temperature", "0", "--stats", NO_COLOR="1")
    complete.prompt(1)
    complete.send("// a comment\r")
    assert "output 4" in complete.prompt(2)
    complete.send("/exit\r")
    assert complete.left() == 0
    colours = [
        code for code in re.findall(rb"\x1b\[([0-9;]*)m", complete.raw) if set(code.split(b";")) - {b"", b"0", b"1"}
    ]
    assert not colours


def test_a_terminal_that_knows_no_sequences(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat", TERM="dumb")
    chat.prompt(1)
    chat.send("Hello\\\n")
    chat.wait(lambda text: text.endswith("…"), "the next line's prompt")
    chat.send("you\n")
    chat.prompt(2)
    assert b"\x1b" not in chat.raw
    chat.send("\x04")
    assert chat.left() == 0


# ------------------------------------------------------------------------------------------------ in pipes


def test_one_message(tiny: Here) -> None:
    done = piped(tiny.url, "chat", "-q", "Hello", "--stats", "--system-prompt", "You are a ship's cook.")
    assert done.returncode == 0
    assert "Tiny" in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr.startswith("first token after ")
    from_input = piped(tiny.url, "chat", "--quick", "-", typed="Hello", key="")
    assert "401" in from_input.stderr
    from_input = piped(tiny.url, "chat", "--quick", "-", "--api-key", KEY, typed="Hello\n", key="wrong")
    assert (from_input.returncode, from_input.stderr) == (0, "")
    assert "Tiny" in from_input.stdout
    assert piped(tiny.url, "chat", "-q", " ").returncode == 2


def test_lines_from_a_pipe_are_messages_of_one_conversation(tiny: Here) -> None:
    done = piped(tiny.url, "chat", "--temperature", "0", typed="Hello\n\n/stats\nWhat is \\\nyour name?\n")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 2
    assert done.stdout.count("Tiny") == 2
    assert "session: 1 answer" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_completions_in_a_pipe(tiny: Here) -> None:
    one = piped(tiny.url, "complete", "-q", "Once upon", "--max-tokens", "5", "--temperature", "0")
    two = piped(tiny.url, "complete", "--max-tokens", "5", "--temperature", "0", typed="Once upon\nOnce upon\n")
    assert one.returncode == two.returncode == 0
    assert one.stdout.strip()
    assert two.stdout == one.stdout * 2


def test_errors_of_a_pipe_show_in_the_status(tiny: Here) -> None:
    done = piped(tiny.url, "chat", "--max-tokens", "999999", typed="Hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("error: The server answers 400: ")
    assert done.stderr.count("\n") == 1
    wrong = piped(tiny.url, "chat", "-q", "Hello", "--model-name", "other")
    assert wrong.returncode == 1
    assert "other" in wrong.stderr
    refused = piped(tiny.url, "chat", "-q", "Hello", key="wrong")
    assert refused.returncode == 1
    assert re.search(r"401.*\n.*--api-key", refused.stderr)
    assert "Traceback" not in done.stderr + wrong.stderr + refused.stderr


def test_no_server() -> None:
    with servers.own_port() as port:
        url = f"http://127.0.0.1:{port}"
        done = piped(url, "chat", "-q", "Hello")
    assert done.returncode == 1
    assert f"Nothing answers at {url}/v1" in done.stderr
    assert "ferrule serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_pipe_ends(tiny: Here, gate: servers.Gate) -> None:
    before = aborted(tiny)
    argv = [sys.executable, "-m", "ferrule", "complete", "--url", tiny.url, "--api-key", KEY, *LONG]
    with (
        gate.shut(after=STEPS),
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Once\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # streaming: a part is there before the whole
        process.send_signal(2)
        process.stdout.read()
        assert process.wait(240) == 130
    assert servers.until(lambda: aborted(tiny) == before + 1)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from ferrule.launch.cli import main\n"
        "assert main(['chat', '--url', 'http://127.0.0.1:1/v1', '-q', 'x']) == 1\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'uvicorn'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
