"""Outputs of models in each parser's format, for `ferrule plugins check` and tests. Not for servers."""

from __future__ import annotations

from typing import Any

from ferrule.interfaces.parsers import ChoiceContext
from ferrule_testkit.kits import Thought

_WHOLE = (
    Thought("<think>\nHm, <b> is it?\n</think>\n\nHello\n", "Hm, <b> is it?", "Hello\n"),
    Thought("\n<think>one\n\ntwo</think>No </think> here", "one\n\ntwo", "No </think> here"),
)

QWEN3: dict[str, Any] = {"samples": (*_WHOLE, Thought("<think>\n\n</think>\n\nHello", "", "Hello"))}
DEEPSEEK_R1: dict[str, Any] = {"samples": (*_WHOLE, Thought("Well,\n so\n</think>\n\nHello", "Well,\n so", "Hello"))}

MINIMAX_M2: dict[str, Any] = {
    "samples": (
        *(one for one in DEEPSEEK_R1["samples"] if one.text.count("</think>") == 1),
        Thought("Hm.\n</think>\n\n</think>\n\nHello", "Hm.", "Hello"),
    )
}
_PLAIN_GRANITE = "Here is my thought process:\n\nA sum.\n\nHere is my response:\n\nFive.\n"
GRANITE = {
    "samples": (
        Thought(_PLAIN_GRANITE, "A sum.", "Five.\n"),
        Thought(_PLAIN_GRANITE.replace("Here is", "Here's"), "A sum.", "Five.\n"),
        Thought("Here is the answer: five.", "", "Here is the answer: five."),
    )
}
_THINKING = ChoiceContext(template_kwargs={"thinking": True})
DEEPSEEK_V3 = {"samples": DEEPSEEK_R1["samples"], "context": _THINKING}
_SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}"
KIMI_K2 = {
    "samples": (
        *QWEN3["samples"],
        Thought(f"<think>I call it.\n{_SECTION}", "I call it.", _SECTION),
        Thought(f"<think>I call it.</think>{_SECTION}", "I call it.", _SECTION),
    )
}
DEEPSEEK_V4 = {
    "samples": (*DEEPSEEK_R1["samples"], Thought("I call.\n<｜DSML｜tool_calls>", "I call.", "<｜DSML｜tool_calls>")),
    "context": _THINKING,
}


def _ended(call: str, open: str = "<think>", close: str = "</think>", sure: bool = False) -> dict[str, Any]:
    """Return samples of an optional block, or of one that the prompt opens (`sure`), which `call` ends too."""
    return {
        "samples": (
            Thought(f"{open}\nHm, <b> is it?\n{close}\n\nHello\n", "Hm, <b> is it?", "Hello\n"),
            Thought(f"{open}I call it.\n{call}", "I call it.", call),
            Thought(f"So\n{close}Hello", *(("So", "Hello") if sure else ("", f"So\n{close}Hello"))),
        )
    }


HY_V3 = _ended("<tool_calls>\n<tool_call>add<tool_sep>")
POOLSIDE_V1 = _ended("<tool_call>add\n")
MINIMAX_M3 = _ended("]<]minimax[>[<tool_call>", "<mm:think>", "</mm:think>")
SOLAR_OPEN2 = _ended("<|tool_call:start|>add\n", "<|think:start|>", "<|think:end|>", sure=True)


def _cohere(open: str, close: str) -> dict[str, Any]:
    thought = "<|START_THINKING|>A sum.<|END_THINKING|>"
    return {
        "samples": (
            Thought(f"{thought}{open}Five <b>.{close}", "A sum.", "Five <b>."),
            Thought(f"{thought}<|START_ACTION|>[", "A sum.", "<|START_ACTION|>["),
            Thought("<|START_THINKING|>A sum.<|START_ACTION|>[", "A sum.", "<|START_ACTION|>["),
        )
    }


COHERE_COMMAND3 = _cohere("<|START_RESPONSE|>", "<|END_RESPONSE|>")
COHERE_COMMAND4 = _cohere("<|START_TEXT|>", "<|END_TEXT|>")
_K3 = "<|open|>think<|sep|>A sum.<|close|>think<|sep|>"
_K3_CALL = "<|open|>tools<|sep|><|open|>call tool="
KIMI_K3 = {
    "samples": (
        Thought(
            f"{_K3}<|open|>response<|sep|>Five <b>.<|close|>response<|sep|><|close|>message<|sep|>",
            *("A sum.", "Five <b>."),
        ),
        Thought(f"{_K3}{_K3_CALL}", "A sum.", _K3_CALL),
        Thought(f"<|open|>think<|sep|>A sum.{_K3_CALL}", "A sum.", _K3_CALL),
    )
}
_INKLING = "<|content_thinking|>A sum.<|end_message|><|message_model|>"
_INKLING_CALL = "now<|content_invoke_tool_json|>{"
INKLING = {
    "samples": (
        Thought(f"{_INKLING}<|content_text|>Five <b>.<|end_message|>", "A sum.", "Five <b>."),
        Thought("<|content_text|>Five.<|end_message|>", "", "Five."),
        Thought(f"{_INKLING}{_INKLING_CALL}", "A sum.", _INKLING_CALL),
        Thought(f"<|content_text|>I.<|end_message|><|message_model|>{_INKLING}<|content_text|>II", "A sum.", "I.II"),
    )
}
_SHOWN = "<think>\nHm, <b> is it?\n</think>\n\nHello\n"
MINIMAX_M2_APPEND_THINK = {"samples": (Thought(_SHOWN, "", _SHOWN),)}
MISTRAL = {
    "samples": (
        Thought("[THINK]Hm, [b] is it?[/THINK]Hello\n", "Hm, [b] is it?", "Hello\n"),
        Thought("[THINK]\nHm [TH\n[/THINK]\n\nHello", "Hm [TH", "Hello"),
        Thought("No [/THINK] here", "", "No [/THINK] here"),
    )
}
HUNYUAN_A13B = {
    "samples": (
        *QWEN3["samples"],
        Thought("<think>\nA sum.\n</think>\n<answer>\nIt is\n\nfive.\n</answer>", "A sum.", "It is\n\nfive."),
        Thought("<think>\n\n</think>\n<answer>\nFive <b>.\n</answer>\n", "", "Five <b>."),
    )
}
ERNIE45 = {
    "samples": (
        Thought("A sum.\n</think>\n\n<response>\nIt is\n\nfive.\n</response>\n", "A sum.", "It is\n\nfive."),
        Thought("<think>\nA sum.\n</think>\n\nFive.\n", "A sum.", "Five.\n"),
    )
}
_REFLECTED = "A sum.\n<seed:cot_budget_reflect>I have used 129 tokens.</seed:cot_budget_reflect>\nIt is"
SEED_OSS = {
    "samples": (
        Thought(f"<seed:think>\n{_REFLECTED}\n</seed:think>\nFive.", _REFLECTED, "Five."),
        Thought("<seed:think></seed:think>Five.", "", "Five."),
        Thought("Five </seed:think>.", "", "Five </seed:think>."),
    )
}
GEMMA4 = {
    "samples": (
        Thought("<|channel>thought\nHm, <|b> is it?\n<channel|>Hello\n", "Hm, <|b> is it?", "Hello\n"),
        Thought("<|channel>thought\n<channel|>Hello", "", "Hello"),
        Thought("Hello <channel|>", "", "Hello <channel|>"),
    )
}
NONE = {"samples": (Thought(_SHOWN, "", _SHOWN),)}

_ANALYSED = "<|channel|>analysis<|message|>Hm, <b> is it?<|end|>"
_FINAL = "<|start|>assistant<|channel|>final<|message|>"
OPENAI_GPTOSS = {
    "samples": (
        Thought(f"{_ANALYSED}{_FINAL}Hello\n", "Hm, <b> is it?", "Hello\n"),
        Thought("<|channel|>final<|message|>Hello <|x", "", "Hello <|x"),
        Thought(f"{_ANALYSED}<|start|>assistant<|channel|>commentary<|message|>I look.", "Hm, <b> is it?", "I look."),
        Thought("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    )
}
