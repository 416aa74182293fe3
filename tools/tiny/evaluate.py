"""Measures the embedded model on 500 held-out prompts: ``python -m tools.tiny.evaluate``.

An answer counts only when it is exactly the expected one, thinking and tool calls included. Without ``--url`` the
checkpoint runs through transformers, or with ``--ferrule`` in Ferrule, which reads quantized ones too. With it, the
same prompts go to an OpenAI-compatible server, whose tool and reasoning parsers may be on or off.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ferrule_contrib.tiny import path
from tools.tiny import chat, dialogues
from tools.tiny.dialogues import Dialogue, Message

MAX_NEW_TOKENS = 256
Answer = Callable[[list[Dialogue]], Iterator[tuple[Dialogue, str]]]


def with_transformers(folder: Path, batch_size: int, dtype: str) -> Answer:
    """Decode greedily with ``transformers``, batched, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def prompt(dialogue: Dialogue) -> str:
        text: str = tokenizer.apply_chat_template(
            list(dialogue.messages),
            tools=list(dialogue.tools) or None,
            enable_thinking=dialogue.thinking,
            add_generation_prompt=True,
            tokenize=False,
        )
        return text

    @torch.no_grad()
    def answer(tests: list[Dialogue]) -> Iterator[tuple[Dialogue, str]]:
        ordered = sorted(tests, key=lambda test: len(prompt(test)))
        for start in range(0, len(ordered), batch_size):
            chosen = ordered[start : start + batch_size]
            batch = tokenizer([prompt(test) for test in chosen], return_tensors="pt", padding=True)
            batch.pop("token_type_ids", None)
            made = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            texts = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            yield from zip(chosen, texts, strict=True)

    return answer


def with_ferrule(folder: Path, dtype: str) -> Answer:
    """Decode greedily with Ferrule in this process."""
    from ferrule import LLM, SamplingParams

    template = chat.load_template()
    greedy = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)

    def answer(tests: list[Dialogue]) -> Iterator[tuple[Dialogue, str]]:
        with LLM(str(folder), dtype=dtype, use_tqdm_on_load=False) as llm:
            outputs = llm.generate([chat.prompt_of(test, template) for test in tests], greedy, use_tqdm=False)
        yield from zip(tests, (output.outputs[0].text for output in outputs), strict=True)

    return answer


def _wire(messages: tuple[Message, ...]) -> list[Message]:
    """Return the messages as the OpenAI API wants them: arguments as text, calls and results tied by an id."""
    sent: list[Message] = []
    pending: list[str] = []
    for turn, message in enumerate(messages):
        out = dict(message)
        if message.get("tool_calls"):
            pending = [f"call_{turn}_{i}" for i in range(len(message["tool_calls"]))]
            out["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call_id, call in zip(pending, message["tool_calls"], strict=True)
            ]
        elif message["role"] == "tool":
            out["tool_call_id"] = pending.pop(0)
        sent.append(out)
    return sent


def _written(message: Any) -> str:
    """Return the text that the model wrote, from a response message whose parts a server may have parsed out."""
    thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    text = message.content or ""
    if message.tool_calls:
        calls = []
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
            except json.JSONDecodeError:
                return f"(no JSON) {call.function.arguments}"
            calls.append({"function": {"name": call.function.name, "arguments": arguments}})
        text = text.rstrip("\n") + chat.message_text({"tool_calls": calls})
    return f"<think>\n{thought.strip()}\n</think>\n\n{text.lstrip()}" if thought else text


def with_server(url: str, model: str | None, concurrency: int) -> Answer:
    """Decode greedily with the server at ``url`` (the part before ``/chat/completions``)."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    name = model or client.models.list().data[0].id

    def ask(test: Dialogue) -> tuple[Dialogue, str]:
        options: dict[str, Any] = {"tools": list(test.tools)} if test.tools else {}
        response = client.chat.completions.create(
            model=name,
            messages=_wire(test.messages),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=MAX_NEW_TOKENS,
            extra_body={"chat_template_kwargs": {"enable_thinking": test.thinking}},
            **options,
        )
        return test, _written(response.choices[0].message)

    def answer(tests: list[Dialogue]) -> Iterator[tuple[Dialogue, str]]:
        with ThreadPoolExecutor(concurrency) as pool:
            yield from pool.map(ask, tests)

    return answer


def measure(answer: Answer, tests: list[Dialogue], show: int) -> dict[str, tuple[int, int]]:
    """Return (right, asked) per category; print the first ``show`` wrong answers."""
    right: Counter[str] = Counter()
    for test, text in answer(tests):
        expected = chat.completion_of(test)
        if text.strip() == expected:
            right[test.category] += 1
        elif show > 0:
            show -= 1
            print(f"[{test.category}] {test.messages[-1]['content']}\n  expected {expected!r}\n  got      {text!r}")
    asked = Counter(test.category for test in tests)
    return {category: (right[category], count) for category, count in asked.items()}


def table(scores: dict[str, tuple[int, int]]) -> str:
    """Return the scores as a Markdown table."""
    lines = ["| category | right | asked | share |", "|---|--:|--:|--:|"]
    total = (sum(r for r, _ in scores.values()), sum(n for _, n in scores.values()))
    for name, (right, asked) in [*scores.items(), ("**overall**", total)]:
        lines.append(f"| {name} | {right} | {asked} | {right / asked:.1%} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=path(), help="folder of the checkpoint")
    parser.add_argument("--url", default=None, help="ask this server instead, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--served-name", default=None, help="model name at --url (default: the first it lists)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time with --url")
    parser.add_argument("--ferrule", action="store_true", help="run the checkpoint in Ferrule, without --url")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="without --url")
    parser.add_argument("--batch-size", type=int, default=50, help="without --url")
    parser.add_argument("--seed", type=int, default=0, help="which drawing of 500 held-out prompts")
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers")
    options = parser.parse_args(argv)
    if options.url:
        answer = with_server(options.url, options.served_name, options.concurrency)
    elif options.ferrule:
        answer = with_ferrule(options.model, options.dtype)
    else:
        answer = with_transformers(options.model, options.batch_size, options.dtype)
    print(table(measure(answer, dialogues.held_out_set(options.seed), options.show)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
