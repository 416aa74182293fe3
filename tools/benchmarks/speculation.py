"""What guessing brings: tokens a second with and without it, in turns, and how many guesses hold.

    python -m tools.benchmarks.speculation all                      the tables of docs/benchmarks, in some ten minutes
    python -m tools.benchmarks.speculation pair                     the sibling, with the embedded model as its draft
    python -m tools.benchmarks.speculation long                     the same, prompts that answers copy from
    python -m tools.benchmarks.speculation copying                  the embedded model, prompts that answers copy from
    python -m tools.benchmarks.speculation copying --method suffix
    python -m tools.benchmarks.speculation random                   random weights: guesses that cost and bring nothing
    python -m tools.benchmarks.speculation random --model tools/tiny/sibling --method draft_model
    python -m tools.benchmarks.speculation pair --set disable_by_batch_size=8 --fixed

Both servers run in this process, on prompts that are new in each round, greedily, to the end of each answer; prompts
count in the time. Random weights say one of all tokens, so answers are drawn, and as long as is asked for. One stream
asks for one answer after the other. A draft model is the embedded one, unless `--set model=FOLDER` says another. With
`--fixed` the number of guesses is not adapted to what they bring. It prints a table, and how many answers of a server
that guesses are other ones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from ferrule import LLM, SamplingParams
from ferrule.env import before_libraries
from ferrule_contrib import tiny
from tools.benchmarks.turns import in_turns, numbers
from tools.tiny import chat, dialogues

SIBLING = Path(__file__).parents[1] / "tiny" / "sibling"
HEADING = """\
| method | k | streams | tokens/s without | with | ratio | guesses that hold | tokens a step |
|---|--:|--:|--:|--:|--:|--:|--:|"""
DRAFTS, GUESSES, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))


def asked(seed: str) -> Iterator[str]:
    """Yield prompts of all kinds that the embedded model has learnt."""
    template = chat.load_template()
    for dialogue in dialogues.stream(f"speculation {seed}", dict(dialogues.HELD_OUT_COUNTS)):
        yield chat.prompt_of(dialogue, template)


def copying(seed: str) -> Iterator[str]:
    """Yield conversations in which the user asks once more for something long that was said before."""
    template, rng = chat.load_template(), Random(f"copying {seed}")
    while True:
        dialogue = dialogues.echo(rng)
        if len(str(dialogue.answer["content"])) > 100:
            messages = (*dialogue.messages, dialogue.answer, *dialogue.messages)
            yield template.render(messages=messages, tools=None, enable_thinking=False, add_generation_prompt=True)


@dataclass(frozen=True)
class Case:
    """A model, how it guesses, and what it is asked. `method` may be replaced."""

    model: Path
    method: str
    prompts: Callable[[str], Iterator[str]]
    trained: bool = True


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "pair": Case(SIBLING, "draft_model", asked),
        "long": Case(SIBLING, "draft_model", copying),
        "copying": Case(tiny.path(), "ngram", copying),
        "random": Case(tiny.path(), "ngram", asked, trained=False),
    }
)


ALL = (
    "long --k 1,2,3,5 --fixed",
    "long --k 5",
    "pair --k 3 --prompts 24",
    "copying --k 2,4,8",
    "copying --k 8 --fixed",
    "random --k 4 --rounds 5",
    "copying --k 8 --streams 32 --prompts 64",
)
SHORT = ("--streams", "1", "--prompts", "12", "--rounds", "3")  # what each of these has unless it says otherwise


def short(run: str) -> list[str]:
    """Return the arguments of one of `ALL`."""
    case, *rest = run.split()
    return [case, *SHORT, *rest]


@dataclass
class Figures:
    """The figures of one server."""

    llm: LLM
    answers: dict[str, tuple[int, ...]]

    def rate(self, prompts: Sequence[str], streams: int, trained: bool) -> float:
        """Answer prompts, so many at a time, and return tokens a second."""
        drawn = SamplingParams(temperature=1.0, seed=1, max_tokens=64, ignore_eos=True)
        params = SamplingParams(temperature=0, max_tokens=200) if trained else drawn
        tokens, begun = 0, time.perf_counter()
        for start in range(0, len(prompts), streams):
            for output in self.llm.generate(prompts[start : start + streams], params, use_tqdm=False):
                self.answers[output.prompt or ""] = tuple(output.outputs[0].token_ids)
                tokens += len(output.outputs[0].token_ids)
        return tokens / (time.perf_counter() - begun)

    def counters(self) -> dict[str, float]:
        """Return the counters of guesses."""
        return {metric.name: getattr(metric, "value", 0.0) for metric in self.llm.get_metrics()}


def _told(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Describe the guesses between two readings of the counters."""
    drafts, guesses, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in (DRAFTS, GUESSES, ACCEPTED))
    if not drafts:
        return "none made | 1.00"
    return f"{accepted / max(1.0, guesses):.0%} of {guesses:.0f} | {1 + accepted / drafts:.2f}"


@contextmanager
def opened(
    case: Case, streams: int, settings: Mapping[str, Any] | None, options: argparse.Namespace
) -> Iterator[Figures]:
    """Run a server that has room for so many streams, with settings of speculation or without."""
    same: dict[str, Any] = {
        "dtype": options.dtype,
        "max_num_seqs": streams,
        "max_model_len": 2048,
        "num_gpu_blocks_override": 2 + streams * 48,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
        "load_format": "auto" if case.trained else "dummy",
    }
    if settings is not None:
        same["speculative_config"] = dict(settings)
    with LLM(str(options.model or case.model), **same) as llm:
        yield Figures(llm, {})


def compare(case: Case, options: argparse.Namespace) -> None:
    """Print a row for each number of guesses and of streams."""
    method, most = options.method or case.method, max(options.streams)
    own = dict(pair.split("=", 1) for pair in options.set)
    shared = {"model": str(tiny.path())} if method == "draft_model" else {}
    settings = {"method": method, **shared, **{key: _value(value) for key, value in own.items()}}
    if options.fixed:
        settings["adaptive"] = False
    print(HEADING)
    with opened(case, most, None, options) as plain:
        for k in options.k:
            with opened(case, most, {**settings, "num_speculative_tokens": k}, options) as guessing:
                for streams in options.streams:
                    row = _row(case, plain, guessing, streams, options)
                    print(f"| {method} | {k} | {streams} | {row} |", flush=True)
                other = sum(plain.answers[prompt] != answer for prompt, answer in guessing.answers.items())
                print(f"  of {len(guessing.answers)} answers, {other} are other ones with guesses", flush=True)


def _row(case: Case, plain: Figures, guessing: Figures, streams: int, options: argparse.Namespace) -> str:
    count = max(options.prompts, 2 * streams) // streams * streams

    def measured(figures: Figures) -> Callable[[int], float]:
        return lambda number: figures.rate(
            list(islice(case.prompts(f"{streams} {number}"), count)), streams, case.trained
        )

    before = guessing.counters()
    pairs = in_turns(options.rounds, measured(plain), measured(guessing))
    return f"{pairs} | {_told(before, guessing.counters())}"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=(*CASES, "all"))
    parser.add_argument("--model", type=Path, help="another model than the case's")
    parser.add_argument("--method", help="another method than the case's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of --speculative-config")
    parser.add_argument("--fixed", action="store_true", help="make as many guesses as k says, whatever they bring")
    parser.add_argument("--k", type=numbers, default=[1, 2, 3, 4, 6, 8], help="most guesses in a step: 1,2,4")
    parser.add_argument("--streams", type=numbers, default=[1, 32])
    parser.add_argument("--prompts", type=int, default=24, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    return parser


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments()
    options = parser.parse_args(given)
    if options.case in CASES:
        compare(CASES[options.case], options)
        return
    for run in ALL:
        print(f"\n{run}", flush=True)
        options = parser.parse_args(short(run))
        compare(CASES[options.case], options)


if __name__ == "__main__":
    before_libraries()
    main()
