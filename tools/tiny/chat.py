"""Renders dialogues with the checkpoint's own chat template, and reads answers back.

The template runs in Jinja's immutable sandbox with the ``tojson`` that transformers gives to templates.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ferrule_contrib.tiny import path
from tools.tiny.dialogues import Dialogue, Message

END = "<|im_end|>"


def load_template(folder: Path | None = None) -> Template:
    """Compile ``chat_template.jinja`` of ``folder`` (default: the embedded checkpoint)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(((folder or path()) / "chat_template.jinja").read_text(encoding="utf-8"))


def prompt_of(dialogue: Dialogue, template: Template) -> str:
    """Return the text up to where the model begins to write."""
    return template.render(
        messages=list(dialogue.messages),
        tools=list(dialogue.tools) or None,
        enable_thinking=dialogue.thinking,
        add_generation_prompt=True,
    )


def message_text(message: Message) -> str:
    """Return an assistant message as the model writes it, without its thinking."""
    if not message.get("tool_calls"):
        return str(message["content"])
    calls: list[dict[str, Any]] = [call["function"] for call in message["tool_calls"]]
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": '
        f"{json.dumps(call['arguments'], ensure_ascii=False)}}}\n</tool_call>"
        for call in calls
    )


def completion_of(dialogue: Dialogue) -> str:
    """Return the text that the model has to write after :func:`prompt_of`, without the end token."""
    think = f"<think>\n{dialogue.thought}\n</think>\n\n" if dialogue.thinking else ""
    return think + message_text(dialogue.answer)
