"""The options that `chat` and `complete` share, and the start of a session with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ferrule import env
from ferrule.config.option import opt
from ferrule.errors import ConfigError

if TYPE_CHECKING:
    from ferrule_plugins.command.terminal.dialogue import Dialogue
    from ferrule_plugins.command.terminal.editor import Reader
    from ferrule_plugins.command.terminal.screen import Screen

_SAMPLING = ("temperature", "top_p", "max_tokens", "seed")


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """The server to use, and how it should generate."""

    url: str = opt("http://localhost:8000/v1", "Base URL of an OpenAI-compatible API; unix:/PATH for a Unix socket.")
    model_name: str | None = opt(None, "Model to use. Default: the first of /v1/models.")
    api_key: str | None = opt(
        None, "API key. Default: FERRULE_API_KEY, else OPENAI_API_KEY, else EMPTY.", secret=True, env="api_key"
    )
    temperature: float | None = opt(None, "Sampling temperature; 0 means greedy sampling. Default: the server's.")
    top_p: float | None = opt(
        None, "Sample from the likeliest tokens whose probabilities add up to this. Default: the server's."
    )
    max_tokens: int | None = opt(None, "Highest number of tokens in one response. Default: the server's.", ge=1)
    seed: int | None = opt(None, "Seed for sampling. Default: the server's.")
    extra_body: dict[str, Any] = opt({}, "Additional JSON fields of each request.", json=True)
    stats: bool = opt(
        False, "After each response, show its time to the first token, number of tokens and tokens per second."
    )
    thinking: bool | None = opt(None, "Show the model's reasoning. Default: on a terminal only.")


def fields_of(options: ClientOptions) -> dict[str, Any]:
    """Return the fields that the options set in every request."""
    given = {name: getattr(options, name) for name in _SAMPLING}
    return {**{name: value for name, value in given.items() if value is not None}, **options.extra_body}


def start(
    options: ClientOptions,
    quick: str | None,
    make: Callable[..., Dialogue],
    history: bool,
) -> int:
    """Ask once, or until the input ends; `make(server, model, screen, fields, stats=)` returns the dialogue."""
    from ferrule_plugins.command.terminal.client import Server

    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # no character may end the program
    quick = _message(quick)
    around = env.terminal()
    server = Server(options.url, options.api_key or around.openai_api_key or "EMPTY")
    model = options.model_name or _first(server.models())
    screen = _screen(options, around)
    dialogue = make(server, model, screen, fields_of(options), stats=options.stats)
    if quick is not None:
        dialogue.ask(quick)
        return 0
    interactive = sys.stdin.isatty()
    if interactive:
        screen.note(f"{model} at {server.url}")
        screen.note("Enter sends, Alt-Enter begins a new line, /help lists the commands.")
    reader = _reader(dialogue, around, screen, history=history)
    return dialogue.run(reader, interactive=interactive)


def _message(quick: str | None) -> str | None:
    """Return the message of `--quick`; `-` stands for all of the standard input. Raises ConfigError for an empty
    one.
    """
    text = sys.stdin.read() if quick == "-" else quick
    if text is not None and not text.strip():
        raise ConfigError("--quick needs a message to send.")
    return text


def _first(models: tuple[str, ...]) -> str:
    from ferrule_plugins.command.terminal.client import Unanswered

    if not models:
        raise Unanswered("The server lists no model.", "Name one with --model-name.")
    return models[0]


def _screen(options: ClientOptions, around: env.Terminal) -> Screen:
    from ferrule_plugins.command.terminal.screen import Screen

    live = sys.stdout.isatty()
    return Screen(
        sys.stdout,
        sys.stderr,
        styled=(live and not around.plain, sys.stderr.isatty() and not around.plain),
        thinking=live if options.thinking is None else options.thinking,
    )


def _reader(dialogue: Dialogue, around: env.Terminal, screen: Screen, *, history: bool) -> Reader:
    """Return the editor where it can work, which is a terminal for input and output that understands escape sequences;
    else a reader of plain lines.
    """
    from ferrule_plugins.command.terminal.editor import Editor, Lines, history_file

    if not sys.stdin.isatty():
        return Lines(sys.stdin, None)
    if not sys.stdout.isatty() or around.dumb:
        return Lines(sys.stdin, sys.stdout if sys.stdout.isatty() else sys.stderr)
    path = None
    if history:
        try:
            path = history_file(around.state_folder)
        except OSError as error:
            screen.note(f"The history cannot be saved: {error.strerror} ({error.filename}).")
    commands = {f"/{name}": action.doc for name, action in dialogue.actions().items()}
    return Editor(path, commands, styled=not around.plain)
