"""Start-up finds a chat template whose calls the tool parser does not read."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ferrule.config import Config, FrontendConfig, LimitsConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.forms import GrammarSpec
from ferrule.frontend.inputs import open_inputs
from ferrule.frontend.output.parse import Parsers
from ferrule.frontend.service import build_service
from ferrule.frontend.template_fit import find_misfit, generated, warn_of_misfit
from ferrule.frontend.text.builtin import builtin_templates
from ferrule.frontend.text.render import Renderer
from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Event, TextDelta, ToolParser
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.plugin import discover
from ferrule_plugins.reasoning_parser.tagged import Qwen3
from ferrule_plugins.tool_parser.hermes import Hermes
from ferrule_testkit.tokenizers import ByteTokenizer
from tests.fakes.engine import FakeEngine, says
from tools import ROOT

HERMES = builtin_templates()["hermes"].text
CHATML = builtin_templates()["chatml"].text
MISTRAL = builtin_templates()["mistral"].text
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n"
NOT_READ = "form that the parser does not read"


class WholeText(ToolParser):
    """The whole text is the call; anything else before or behind it is content."""

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        return None

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self.text = getattr(self, "text", "") + delta.text
        return []

    def finish(self) -> Sequence[Event]:
        if not self.text.lstrip().startswith("<tool_call>"):
            return []
        call = json.loads(self.text.replace("<tool_call>", "").replace("</tool_call>", ""))
        return [CallStart(0, "id", call["name"]), CallArguments(0, json.dumps(call["arguments"])), CallEnd(0)]


class Failing(WholeText):
    def finish(self) -> Sequence[Event]:
        raise KeyError("a fault of this parser")


@asynccontextmanager
async def opened(text: str | dict[str, str], **special_tokens: str) -> AsyncIterator[Renderer]:
    templates = {"default": text} if isinstance(text, str) else text
    renderer = Renderer(FrontendConfig(), LimitsConfig(template_timeout=120.0), templates, special_tokens, 10_000)
    try:
        yield renderer
    finally:
        await renderer.close()


async def misfit(
    text: str | dict[str, str],
    tools: Callable[[Sequence[dict[str, Any]]], ToolParser] = Hermes,
    tokenizer: Tokenizer | None = None,
    **parsers: Any,
) -> str | None:
    async with opened(text) as renderer:
        return await find_misfit(renderer, Parsers(tools=tools, **parsers), tokenizer)


async def test_a_template_of_the_parser_s_form_fits() -> None:
    assert await misfit(HERMES) is None
    assert await misfit(HERMES, tokenizer=ByteTokenizer()) is None
    assert await misfit({"default": CHATML, "tool_use": HERMES}) is None


async def test_the_embedded_model_s_template_fits_its_parsers() -> None:
    template = (ROOT / "contrib_models/ferrule_contrib/tiny/checkpoint/chat_template.jinja").read_text("utf-8")
    assert await misfit(template) is None
    assert await misfit(template, reasoning=Qwen3) is None


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHATML, "does not show tools"),
        (MISTRAL, NOT_READ),
        (HERMES.replace("'arguments': call.function.arguments}", "'arguments': {}}"), NOT_READ),
        (HERMES.replace("'name': call.function.name,", "'name': 'other',"), NOT_READ),
        (HERMES.replace("function | tojson +", "call.function.arguments +"), "cannot render .*TypeError"),
        (HERMES.replace("message.tool_calls or []", "raise_exception('no calls')"), "cannot render .*no calls"),
        ({"rag": HERMES}, "cannot render .*--chat-template NAME"),
    ],
)
async def test_what_does_not_fit_is_told(template: str | dict[str, str], why: str) -> None:
    found = await misfit(template)
    assert found is not None
    assert re.search(why, found)


@pytest.mark.parametrize("begin", ["<think>\n", "<think>\n\n</think>\n\n", ""])
async def test_thoughts_do_not_count(begin: str) -> None:
    """Ignore the reasoning at the beginning of an answer, which the history shows in another way."""
    thinking = HERMES.replace("'<|im_start|>assistant\\n'", f"'<|im_start|>assistant\\n' + {begin!r}")
    assert thinking != HERMES or not begin
    assert await misfit(thinking) is None
    assert await misfit(thinking, reasoning=Qwen3) is None


async def test_the_reasoning_parser_may_be_what_makes_them_fit() -> None:
    empty = "message['content'] | replace('', '', 1) -}}{{- '<think>\\n\\n</think>\\n\\n' if message.tool_calls else ''"
    thinking = HERMES.replace("{{- message['content'] -}}", "{{- " + empty + " -}}")
    assert await misfit(thinking, WholeText) == f"a call in the history is written in a {NOT_READ}"
    assert await misfit(thinking, WholeText, reasoning=Qwen3) is None


async def test_special_tokens_that_the_parser_does_not_see_are_no_markup() -> None:
    class Tagged(ByteTokenizer):
        names = ("<s>", "</s>", "<tool_call>")

    class Seeing(Hermes):
        wants_special_tokens = True

    assert await misfit(HERMES, Hermes, Tagged()) == f"a call in the history is written in a {NOT_READ}"
    assert await misfit(HERMES, Seeing, Tagged()) is None


async def test_a_parser_that_raises_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        await misfit(HERMES, Failing, tools_title="failing of test")
        == f"a call in the history is written in a {NOT_READ}"
    )
    assert "plugin failing of test raised in finish" in caplog.text


def test_what_the_model_generated() -> None:
    assert generated("Q>", "Q", "Q>call|", "|") == ("call",)
    assert generated("Q><think>", "Q", "Q>call|", "|") == ("call", ">call")
    assert generated("[tools]Q>", "[tools]Q", "Q>call|", "|") == ("Q>call",)


# ------------------------------------------------------------------------------------------------ the warning


def reading(renderer: Renderer) -> Any:
    """Return the parts of a `PromptReader` that the warning needs."""
    return SimpleNamespace(renderer=renderer, tokenizer=None)


async def warned(caplog: pytest.LogCaptureFixture, template: str, parsers: Parsers, **frontend: Any) -> list[str]:
    caplog.clear()
    async with opened(template) as renderer:
        await warn_of_misfit(FrontendConfig(**frontend), reading(renderer), parsers)
        assert bool(renderer.pids) == (parsers.tools is not None)
    return [record.getMessage() for record in caplog.records]


async def test_the_warning_names_template_parser_and_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    parsers = Parsers(tools=Hermes)
    (line,) = await warned(caplog, MISTRAL, parsers, tool_call_parser="hermes", chat_template="mistral")
    assert line.startswith("--chat-template mistral does not fit --tool-call-parser hermes: a call in the history is ")
    assert line.endswith("Templates that do: --chat-template hermes. `ferrule templates` lists them.")
    (line,) = await warned(caplog, CHATML, parsers, tool_call_parser="mine", chat_template="{{ messages }}")
    assert line.startswith("--chat-template does not fit --tool-call-parser mine: it does not show tools")
    assert line.endswith("No built-in template does.")
    (line,) = await warned(caplog, CHATML, parsers, tool_call_parser="hermes")
    assert line.startswith("the model's chat template does not fit")
    assert await warned(caplog, HERMES, parsers, tool_call_parser="hermes") == []


async def test_nothing_is_rendered_without_a_tool_parser(caplog: pytest.LogCaptureFixture) -> None:
    assert await warned(caplog, CHATML, Parsers(reasoning=Qwen3)) == []


async def test_a_child_that_cannot_start_says_nothing_about_the_template(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(CHATML) as renderer:
        await renderer.close()
        await warn_of_misfit(FrontendConfig(tool_call_parser="hermes"), reading(renderer), Parsers(tools=Hermes))
    (record,) = caplog.records
    assert "was not checked" in record.getMessage()


@pytest.mark.parametrize(("parser", "lines"), [("hermes", 1), (None, 0)])
async def test_a_server_warns_when_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parser: str | None, lines: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FakeForCausalLM"], "eos_token_id": 1}))
    frontend = FrontendConfig(chat_template="chatml", tool_call_parser=parser)
    config = resolve(Config(model=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True), frontend=frontend))
    service = build_service(config, discover(), FakeEngine(says([1])))
    try:
        await service._warm()
    finally:
        await service.close()
    assert caplog.text.count("does not fit --tool-call-parser hermes") == lines


async def test_a_documented_file_that_is_not_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FakeForCausalLM"], "eos_token_id": 1}))
    caplog.set_level("INFO")
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True)
    for option in ("examples/tool_chat_template_internlm2_tool.jinja", "internlm2", "{{ messages }}"):
        frontend = FrontendConfig(chat_template=option)
        assert open_inputs(resolve(Config(model=model, frontend=frontend)), discover()).templates["default"]
    (line,) = [record.getMessage() for record in caplog.records if "chat-template" in record.getMessage()]
    assert line.startswith("--chat-template examples/tool_chat_template_internlm2_tool.jinja is not a file here")
    assert line.endswith("the built-in template internlm2 is used")
