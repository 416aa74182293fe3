"""What constraints cost beside the model: to open a backend, to compile and load a schema, and to make masks.

    python -m tools.benchmarks.guided [--backends guidance xgrammar] [--distinct 3000]

The vocabulary has the size of Qwen 3's (151,936) and is made of syllables, so that no file is needed; the schema has
20 fields of five types. Every backend runs in this process, on one thread for the masks; times are wall-clock. With
`--distinct`, the memory of a process that so many requests come to instead, each with a schema of its own. With
`--forced`, how much of the text a grammar leaves no choice about.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ferrule.forms import GrammarSpec, Json
from ferrule.interfaces.guided_decoding import GrammarBackend, Vocabulary
from ferrule.plugin import discover
from ferrule.runner.grammars import Grammars
from ferrule.types import Admit, Chunk, CompiledGrammar, TokenSampling

SIZE = 151_936
_SYLLABLES = (
    *(
        "an",
        "the",
        "ing",
        "er",
        "on",
        "re",
        "st",
        "en",
        "al",
        "it",
        "or",
        "as",
        "is",
        "ar",
        "le",
        "de",
        "co",
        "ti",
        "ra",
    ),
    *(
        "ra",
        "in",
        "ed",
        "es",
        "ly",
        "un",
        "pro",
        "ment",
        "con",
        "tion",
        "com",
        "per",
        "a",
        "e",
        "i",
        "o",
        "u",
        "s",
        "t",
        "n",
    ),
)
_JSON = ('{"', '":', '": "', '", "', '"}', '"]', "\n", '",\n', "  ", ": ", ", ", '[{"', "}}", "true", "false", "null")
_VALUES: tuple[tuple[dict[str, Any], Any], ...] = (
    ({"type": "string"}, "some text with words in it"),
    ({"type": "integer"}, 42),
    ({"type": "boolean"}, True),
    ({"type": "string", "enum": ["red", "green", "blue"]}, "green"),
    ({"type": "array", "items": {"type": "string"}}, ["alpha", "beta gamma"]),
)


def vocabulary() -> Vocabulary:
    """Return a vocabulary of every byte, pieces of JSON, and words; the last two ids end a text."""
    source = random.Random(0)
    tokens = {bytes([byte]) for byte in range(256)} | {piece.encode() for piece in _JSON}
    while len(tokens) < SIZE - 1_000:
        word = "".join(source.choices(_SYLLABLES, k=source.randint(1, 4)))
        tokens.add((source.choice(("", " ")) + source.choice((word, word, word.title(), f"{word},"))).encode())
    words = tuple(sorted(tokens))
    return Vocabulary((*words, b"", b""), SIZE, (len(words), len(words) + 1))


def example(fields: int = 20) -> tuple[dict[str, Any], str]:
    """Return a schema, and a value of it as JSON text."""
    chosen = {f"field_{number}": _VALUES[number % len(_VALUES)] for number in range(fields)}
    properties = {name: schema for name, (schema, _) in chosen.items()}
    schema = {"type": "object", "properties": properties, "required": list(chosen), "additionalProperties": False}
    return schema, json.dumps({name: value for name, (_, value) in chosen.items()})


def tokenize(text: str, words: Vocabulary) -> list[int]:
    """Split a text into the longest token at each place."""
    known = {token: number for number, token in enumerate(words.tokens) if token}
    data, at, ids = text.encode(), 0, []
    while at < len(data):
        size = next(size for size in range(24, 0, -1) if data[at : at + size] in known)
        ids.append(known[data[at : at + size]])
        at += len(data[at : at + size])
    return ids


def measure(backend: GrammarBackend, schema: dict[str, Any], ids: Sequence[int], rounds: int = 5) -> str:
    """Return one line of figures; `ids` are a value of the schema."""
    began = time.perf_counter()
    data = backend.compile(GrammarSpec(form=Json(schema)))
    compiled = time.perf_counter()
    first = backend.load(data)
    loaded = time.perf_counter()
    fills, steps = [], []
    mask = np.zeros((1, backend.vocabulary.words), np.int32)
    for _ in range(rounds):
        grammar = first.fork()
        for token in ids:
            start = time.perf_counter()
            backend.fill([grammar], mask)
            fills.append(time.perf_counter() - start)
            if not grammar.accept([token]):
                raise RuntimeError("the backend refuses a value that fits the schema")
            steps.append(time.perf_counter() - start)
    half, most = np.percentile(fills, [50, 90]) * 1e6
    return (
        f"compile {1e3 * (compiled - began):.0f} ms, load {1e3 * (loaded - compiled):.0f} ms ({len(data)} bytes), mask "
        f"p50 {half:.0f} µs, p90 {most:.0f} µs; mask and token, mean {1e6 * float(np.mean(steps)):.0f} µs"
    )


def forced(backend: GrammarBackend, spec: GrammarSpec, text: str) -> float:
    """Return the share of a text's bytes that the bytes before them determine: all allowed tokens begin with them."""
    tokens = backend.vocabulary.tokens
    firsts = np.array([token[0] if token else 256 for token in tokens])  # 256: the text may end
    ids = {token: number for number, token in enumerate(tokens)}
    mask = np.zeros((1, backend.vocabulary.words), np.int32)
    grammar, count = backend.load(backend.compile(spec)), 0
    for byte in text.encode():
        grammar.fill(mask[0])
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(tokens)].astype(bool)
        count += len(set(firsts[allowed])) == 1
        if not grammar.accept([ids[bytes([byte])]]):
            raise RuntimeError("the backend refuses a value that fits the schema")
    return count / len(text.encode())


def memory(backend: GrammarBackend, name: str, count: int) -> None:
    """Print the resident memory while `count` requests, each with another schema, follow a value of it: ten lines of
    figures.
    """
    grammars = Grammars(lambda _: backend)
    print(f"{name}: {_resident_mib():.0f} MiB before the first request", flush=True)
    for number in range(1, count + 1):
        schema, text = example()
        schema["properties"]["field_0"] = {"type": "string", "pattern": f"^.{{1,{number % 50 + 20}}}x{number}$"}
        text = text.replace(_VALUES[0][1], f"ax{number}", 1)
        data = backend.compile(GrammarSpec(form=Json(schema)))
        compiled = CompiledGrammar(backend=name, digest=hashlib.sha256(data).digest(), data=data)
        grammars.prepare(compiled).result()
        ids = tokenize(text, backend.vocabulary)
        sampling = TokenSampling(seed=0, max_tokens=1)
        grammars.apply(
            (0,),
            [Admit(slot=0, id="r", epoch=1, known_ids=tuple(ids), num_prompt=0, work=sampling, grammar=compiled)],
        )
        masks = grammars.masks(
            [Chunk(slot=0, id="r", epoch=1, start=0, count=1, ends="sample")], backend.vocabulary.words
        )
        if masks is None or masks.result().errors:
            raise RuntimeError("the backend refuses a value that fits the schema")
        if number % max(1, count // 10) == 0:
            print(f"{name}: {_resident_mib():.0f} MiB after {number} schemas", flush=True)
    grammars.close()


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["guidance", "xgrammar"])
    parser.add_argument("--distinct", type=int, default=0, help="Number of schemas for the measurement of memory.")
    parser.add_argument("--forced", action="store_true", help="How much of the text a grammar determines.")
    arguments = parser.parse_args()
    words, plugins, (schema, text) = vocabulary(), discover(), example()
    ids = tokenize(text, words)
    for name in arguments.backends:
        began = time.perf_counter()
        backend = plugins.make("guided_decoding", name, words)
        opened = time.perf_counter() - began
        if arguments.distinct:
            memory(backend, name, arguments.distinct)
            continue
        if arguments.forced:
            print(f"{name}: bytes forced {forced(backend, GrammarSpec(form=Json(schema)), text):.0%}", flush=True)
            continue
        print(f"{name}: open {opened:.1f} s, {measure(backend, schema, ids)}", flush=True)


if __name__ == "__main__":
    main()
