"""Measures what quantization costs the embedded model: ``python -m tools.tiny.quantized [METHOD …]``.

For bfloat16, for each method of ``--quantization``, and for each format of `ferrule quantize`, it prints how many of
500 held-out prompts get exactly the expected answer (as ``python -m tools.tiny.evaluate`` counts), and the
perplexity of the expected answers, in Ferrule.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ferrule import LLM, SamplingParams
from ferrule.config import Config, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.plugin import discover
from ferrule_contrib.tiny import path
from ferrule_files.offline import outline
from ferrule_quantize import QuantizeCommand, gguf_file
from ferrule_quantize.run import write
from ferrule_quantize.targets import target_of
from tools.tiny import chat, dialogues
from tools.tiny.dialogues import Dialogue

Test = tuple[Dialogue, str]  # and its prompt
METHODS = ("int8", "int8_per_channel_weight_only", "int4", "int4_weight_only", "fp8", "bitsandbytes")

# Formats of `ferrule quantize`, with the group size.
_WRITTEN = {
    "`ferrule quantize --to int8`": ("int8", 128),
    "`ferrule quantize --to fp8`": ("fp8", 128),
    "`ferrule quantize --to int4`": ("int4", 128),
    "`ferrule quantize --to int4 --group-size 32`": ("int4", 32),
}

# Formats that are calibrated, with further options: with training dialogues, of which none is held out.
_CALIBRATED = {
    "`ferrule quantize --to gptq`": ("gptq",),
    "`ferrule quantize --to gptq --desc-act`": ("gptq", "--desc-act"),
    "`ferrule quantize --to awq`": ("awq",),
}
_NUM_TEXTS = 256


def score(llm: LLM, tests: Sequence[Test]) -> int:
    """Return how many answers are exactly the expected ones."""
    greedy = SamplingParams(temperature=0, max_tokens=256)
    answers = llm.generate([prompt for _, prompt in tests], greedy, use_tqdm=False)
    texts = (answer.outputs[0].text.strip() for answer in answers)
    return sum(text == chat.completion_of(test) for text, (test, _) in zip(texts, tests, strict=True))


def perplexity(llm: LLM, tests: Sequence[Test]) -> float:
    """Return the perplexity of the tokens of the expected answers, each given all before it."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise RuntimeError("the embedded model has a tokenizer")
    prompts = [tokenizer.encode(prompt) for _, prompt in tests]
    wholes = [tokenizer.encode(prompt + chat.completion_of(test) + chat.END) for test, prompt in tests]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in wholes], asked, use_tqdm=False)
    total, count = 0.0, 0
    for prompt, ids, output in zip(prompts, wholes, outputs, strict=True):
        told = output.prompt_logprobs or []
        for token, position in list(zip(ids, told, strict=True))[len(prompt) :]:
            total -= position[token].logprob if position else 0.0
            count += 1
    return math.exp(total / count)


def write_texts(file: Path) -> None:
    """Write training dialogues, each whole, for --calibration."""
    template = chat.load_template()
    drawn = itertools.islice(dialogues.stream("calibration", dict(dialogues.HELD_OUT_COUNTS)), _NUM_TEXTS)
    texts = (chat.prompt_of(one, template) + chat.completion_of(one) + chat.END for one in drawn)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def calibrate(to: str, *more: str, out: Path, texts: Path) -> None:
    """Run `ferrule quantize`, without its output."""
    words = [str(path()), "--to", to, "-o", str(out), "--evaluate", "none", "--log-level", "error", *more]
    words += ["--calibration", str(texts), "--calibration-samples", str(_NUM_TEXTS)]
    with contextlib.redirect_stdout(io.StringIO()):
        QuantizeCommand().run(words, discover())


HEADING = "| weights | correct of 500 | perplexity | MB |\n|---|--:|--:|--:|"


class Row(NamedTuple):
    name: str
    correct: int
    perplexity: float
    megabytes: float

    def __str__(self) -> str:
        return f"| {self.name} | {self.correct} | {self.perplexity:.4f} | {self.megabytes:.1f} |"


def held_out(seed: int = 0, count: int | None = None) -> list[Test]:
    """Return the 500 held-out prompts of a drawing, or the first of them."""
    template = chat.load_template()
    return [(test, chat.prompt_of(test, template)) for test in dialogues.held_out_set(seed)[:count]]


def measure(
    tests: Sequence[Test], name: str, model: Path, method: str | None = None, kv_cache_dtype: str = "auto"
) -> Row:
    """Measure a model in bfloat16, with a method of ``--quantization``."""
    same: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "use_tqdm_on_load": False}
    with LLM(str(model), tokenizer=str(path()), quantization=method, **same) as llm:
        return Row(name, score(llm, tests), perplexity(llm, tests), llm.model.weight_bytes / 1e6)


def written() -> Iterator[tuple[str, Path]]:
    """Yield the embedded model as `ferrule quantize` writes it, in each format. Each exists until the next is asked
    for.
    """
    for name, (form, group) in _WRITTEN.items():
        with tempfile.TemporaryDirectory() as folder:
            write(path(), Path(folder), target_of(form, group))
            yield name, Path(folder)
    for name, (form, *more) in _CALIBRATED.items():
        with tempfile.TemporaryDirectory() as folder:
            write_texts(Path(folder) / "texts.jsonl")
            calibrate(form, *more, out=Path(folder) / "model", texts=Path(folder) / "texts.jsonl")
            yield name, Path(folder) / "model"
    model = outline(resolve(Config(model=ModelConfig(model=str(path())))), discover())
    for kind, mix in gguf_file.MIXES.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            gguf_file.write(path(), file, mix, model)
            yield f"`ferrule quantize --to {kind}`", file


def rows(tests: Sequence[Test], methods: Sequence[str], kv_cache_dtype: str = "auto") -> Iterator[Row]:
    """Yield the rows of bfloat16, of the methods, and of the formats that `ferrule quantize` writes."""
    yield measure(tests, "bfloat16", path(), None, kv_cache_dtype)
    for method in methods:
        yield measure(tests, method, path(), method, kv_cache_dtype)
    for name, model in written():
        yield measure(tests, name, model, None, kv_cache_dtype)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.quantized", description=__doc__)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--seed", type=int, default=0, help="which drawing of 500 held-out prompts")
    parser.add_argument("--kv-cache-dtype", default="auto", help="type of the KV cache, for all of them")
    options = parser.parse_args(argv)
    print(HEADING)
    for row in rows(held_out(options.seed), options.methods, options.kv_cache_dtype):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
