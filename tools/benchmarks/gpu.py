"""What Ferrule does on a GPU, in one file of JSON: `python -m tools.benchmarks.gpu --name h200`.

Measured are the machine's limits, every kernel beside them, and per model: output tokens a second, one stream, a long
prompt, the idle share of the device, the start, and transformers' continuous batching with the same requests. Each part
has a process and a time limit of its own; one that fails is a line in the file, and the others go on. `--dry` tries all
of it on a CPU with a tiny model. `--parts` measures some of it and keeps what the file has of the rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.benchmarks.gpu_models import SHAPES
from tools.benchmarks.gpu_parts import PARTS

SCHEMA = 1
_SECONDS = 1500.0  # for everything
_PART_SECONDS = 420.0
_TAIL = 4000  # characters of a failed part's output that are printed
_LINE = 400  # and that are kept
_DECODE = re.compile(r"decode.*\b64\b.*\b(4k|4096)\b")
_PACKAGES = ("ferrule", "torch", "triton", "transformers", "nvidia-cublas-cu12", "nvidia-cublas")


@dataclass(frozen=True)
class Goal:
    """A figure that is wanted: where it stands in the report, and its bound."""

    text: str
    find: Callable[[Mapping[str, Any]], float | None]
    bound: float
    least: bool = True  # else: at most


def _of(model: str, field: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda report: report["models"].get(model, {}).get("ferrule", {}).get(field)


def _kernel(report: Mapping[str, Any]) -> float | None:
    """Return the share of the limit of a decode step's attention, 64 requests with 4096 tokens each in bfloat16; the
    least of several models.
    """
    ran = [r for r in report["kernels"] if r["module"].startswith("attention") and not r["error"]]
    shares = [r["limit_share"] for r in ran if _DECODE.search(r["name"]) and "8 bits" not in r["name"]]
    return min(shares, default=None)


GOALS = (
    Goal("single stream, Llama 3.1 8B: share of the bandwidth's limit", _of("llama-3.1-8b", "decode_share"), 0.75),
    Goal("single stream, Qwen3 14B: share of the bandwidth's limit", _of("qwen3-14b", "decode_share"), 0.75),
    Goal("prompt of 8192 tokens, Llama 3.1 8B: share of the products' rate", _of("llama-3.1-8b", "prefill_share"), 0.6),
    Goal("prompt of 8192 tokens, Qwen3 14B: share of the products' rate", _of("qwen3-14b", "prefill_share"), 0.6),
    Goal("attention of 64 x 4096 tokens: share of the copy bandwidth", _kernel, 0.8),
    Goal("idle share of the device, Qwen3 0.6B", _of("qwen3-0.6b", "idle_share"), 0.05, least=False),
    Goal("idle share of the device, Llama 3.1 8B", _of("llama-3.1-8b", "idle_share"), 0.05, least=False),
    Goal("seconds to start, Qwen3 0.6B", _of("qwen3-0.6b", "startup_seconds"), 15.0, least=False),
)


def empty(name: str, *, dry: bool) -> dict[str, Any]:
    """Return a report without figures."""
    return {
        "schema": SCHEMA,
        "name": name,
        "dry": dry,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {package: version for package in _PACKAGES if (version := _version(package)) is not None},
        "limits": None,
        "kernels": [],
        "models": {},
        "failures": [],
        "goals": [],
        "seconds": 0.0,
    }


def plan(parts: Sequence[str], models: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (part, model) in the order of measurement: Ferrule's own parts come first."""
    yield from ((part, None) for part in ("limits", "kernels") if part in parts)
    yield from ((part, model) for part in ("ferrule", "transformers") if part in parts for model in models)


def measure(
    report: dict[str, Any], steps: Sequence[tuple[str, str | None]], seconds: float, save: Callable[[], None]
) -> None:
    """Run the parts and fill the report, which is saved after each. `seconds` are for all of them."""
    began, before = time.monotonic(), report["seconds"]
    for part, model in steps:
        left = min(_PART_SECONDS, seconds - (time.monotonic() - began))
        asked = {"part": part, "model": model, "dry": report["dry"], "limits": report["limits"], "began": time.time()}
        report["failures"] = [f for f in report["failures"] if (f["part"], f["model"]) != (part, model)]
        print(f"{part} {model or ''}".rstrip(), "...", file=sys.stderr, flush=True)
        try:
            if part != "limits" and report["limits"] is None:
                raise RuntimeError("the machine's limits are not known")
            found = run_part(asked, left)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            last = str(error).strip().splitlines()[-1][-_LINE:]  # what came before may name folders of the machine
            report["failures"].append({"part": part, "model": model, "error": last})
            print(f"failed: {error}", file=sys.stderr, flush=True)
        else:
            _put(report, part, model, found)
        report["goals"] = [_judge(goal, report) for goal in GOALS]
        report["seconds"] = round(before + time.monotonic() - began, 1)
        save()


def run_part(asked: Mapping[str, Any], seconds: float) -> Any:
    """Run a part in a separate process and return its result. Raises RuntimeError with the end of its output."""
    if seconds <= 0:
        raise RuntimeError("there was no time left")
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "tools.benchmarks.gpu_parts", str(question), str(answer)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
        if done.returncode != 0 or not answer.exists():
            raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-_TAIL:].strip()}")
        return json.loads(answer.read_text())


def _put(report: dict[str, Any], part: str, model: str | None, found: Any) -> None:
    if model is None:
        report[part] = found
    else:
        report["models"].setdefault(model, {})[part] = found


def _judge(goal: Goal, report: Mapping[str, Any]) -> dict[str, Any]:
    found = goal.find(report)
    met = None if found is None else (found >= goal.bound if goal.least else found <= goal.bound)
    return {"goal": goal.text, "bound": goal.bound, "least": goal.least, "found": found, "met": met}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def table(report: Mapping[str, Any]) -> str:
    """Format the figures that matter as Markdown."""
    lines = ["| model | tokens/s | transformers | limit | one stream | long prompt | idle | start |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for model, found in report["models"].items():
        ours, theirs = found.get("ferrule", {}), found.get("transformers", {})
        rates = (
            ours.get("output_tokens_per_second"),
            theirs.get("output_tokens_per_second"),
            ours.get("limit_tokens_per_second"),
        )
        shares = ours.get("decode_share"), ours.get("prefill_share"), ours.get("idle_share")
        cells = [_cell(rate, "{:,.0f}") for rate in rates] + [_cell(share, "{:.1%}") for share in shares]
        lines.append(f"| {model} | {' | '.join(cells)} | {_cell(ours.get('startup_seconds'), '{:.1f} s')} |")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.gpu", description="Measure on a GPU.")
    parser.add_argument("--name", required=True, help="of the machine: the file is gpu-NAME.json")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="the file's folder")
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), help="measure these, and keep the others' figures")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), help="default: all")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="time for everything")
    parser.add_argument("--dry", action="store_true", help="try it with a tiny model, on a CPU too")
    options = parser.parse_args(argv)
    file: Path = options.out / f"gpu-{options.name}.json"
    report = empty(options.name, dry=options.dry)
    if (options.parts or options.models) and file.exists():
        kept = json.loads(file.read_text())
        if (kept["schema"], kept["dry"]) != (SCHEMA, options.dry):
            parser.error(f"{file} is another kind of report: give another --name")
        report = {**report, **{key: kept[key] for key in ("limits", "kernels", "models", "failures", "seconds")}}
    steps = [*plan(options.parts or tuple(PARTS), ("tiny",) if options.dry else options.models or tuple(SHAPES))]
    file.parent.mkdir(parents=True, exist_ok=True)
    measure(report, steps, options.seconds, lambda: _write(file, report))
    print(table(report))
    for goal in report["goals"]:
        print(
            f"{_cell(goal['found'], '{:.3f}'):>8} {'>=' if goal['least'] else '<='} {goal['bound']:<5} {goal['goal']}"
        )
    print(file)
    return 1 if report["failures"] else 0


def _write(file: Path, report: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
