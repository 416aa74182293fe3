"""The whole campaign: ``python -m tools.campaign [--quick] [--again] [--write docs/reliability.md] [GOAL …]``.

Every goal of `goals` that this build has the features for is proved by its commands, one after the other, with an hour
for all of them (ten minutes with `--quick`). What was proved is kept in tools/campaign/proofs.json, so a run that was
interrupted goes on where it was, on any machine; `--again` begins anew. Where a quick run is a smaller version, what it
proved counts for quick runs only. At the end there is a table, and the exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tools import ROOT
from tools.campaign.goals import GROUPS, Command, Goal
from tools.campaign.victim import BOUND, longest_gap

_KEPT = ROOT / "tools" / "campaign" / "proofs.json"
_MOST = 5400.0  # seconds for one command: the longest is a soak of an hour
_SHOWN = 160  # characters of a figure
_INTRO = """# What the server survives

Each line is a goal, and what `make campaign` found when it last ran it. The goals are the faults that servers of this
kind are publicly known to have had. A goal is proved by tests, or by drivers in `tools/campaign` that start a real
server, attack it, and measure; the figure is the last line of what they print. `make campaign` runs all of them, which
takes some three hours on two cores, and `make campaign QUICK=1` a smaller version of each in half an hour. A run that
was interrupted goes on where it was.

Beside attacks that a server must survive there is a victim: another client that streams one long answer after another.
A goal is missed when a stream of it breaks, is another text than alone, or is answered 5xx. "victim" is its longest
time between two pieces of an answer in seconds, on the machine that the attackers use, too; above 0.25 it is in bold.
"""


class Proof(msgspec.Struct, frozen=True):
    """The result of a goal's commands. `figure` is the last line of each; `gap` the longest of a victim beside them, in
    seconds, None without a victim.
    """

    holds: bool
    figure: str
    seconds: float
    quick: bool = True  # by the commands of a quick run
    date: str = ""
    gap: float | None = None

    @property
    def shown_gap(self) -> str:
        if self.gap is None:
            return ""
        return f"**{self.gap:.2f}**" if self.gap > BOUND else f"{self.gap:.2f}"


def prove(goal: Goal, quick: bool) -> Proof:
    """Run the commands of a goal; the first that fails ends it."""
    began, figures, gaps, holds = time.monotonic(), [], list[float](), True
    for command in goal.quick if quick or not goal.full else goal.full:
        holds, figure, gap = _run(command)
        figures.append(figure)
        gaps += [] if gap is None else [gap]
        if not holds:
            break
    today, smaller = str(datetime.now(UTC).date()), quick and bool(goal.full)
    return Proof(holds, "; ".join(figures), time.monotonic() - began, smaller, today, max(gaps, default=None))


def _run(words: Command) -> tuple[bool, str, float | None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_MOST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {_MOST:.0f} s: {' '.join(words)}", None
    lines = [line.strip("= ") for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    if done.returncode:
        print("".join(f"    | {line}\n" for line in lines[-30:]), flush=True)
    figure = (lines or ["it said nothing"])[-1][:_SHOWN]
    proved = words[0] != "pytest" or " passed" in figure  # tests that were skipped prove nothing
    return done.returncode == 0 and proved, figure, longest_gap(lines)


def table(proofs: Mapping[str, Proof]) -> str:
    """Format the page of the documentation."""
    proved = sum(proof.holds for proof in proofs.values())
    smaller = sum(proof.holds and proof.quick for proof in proofs.values())
    waiting = sum(bool(goal.waits_for) for goals in GROUPS.values() for goal in goals)
    missed = len(proofs) - proved
    counts = f"{proved} goals hold, {smaller} of them by the smaller version; {missed} do not; {waiting} wait.\n"
    parts = [_INTRO, counts]
    for title, goals in GROUPS.items():
        parts.append(f"## {title}\n\n| goal | what happens | bound | victim | found |\n|---|---|---|---|---|")
        parts += [_row(goal, proofs.get(goal.id)) for goal in goals]
        parts.append("")
    return "\n".join(parts)


def _row(goal: Goal, proof: Proof | None) -> str:
    gap = "" if proof is None else proof.shown_gap
    return f"| {goal.id} | {goal.what} | {goal.bound} | {gap} | {_found(goal, proof)} |"


def _found(goal: Goal, proof: Proof | None) -> str:
    if goal.waits_for:
        return f"waits for {goal.waits_for}"
    if proof is None:
        return "not run"
    how = f" ({'smaller, ' if proof.quick else ''}{proof.date})"
    return f"{'holds' if proof.holds else '**missed**'}{how}: {proof.figure.replace('|', '/')}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign")
    parser.add_argument("--quick", action="store_true", help="a smaller version of each goal")
    parser.add_argument("--again", action="store_true", help="prove again what was proved")
    parser.add_argument("--write", type=Path, help="the page to write the table to")
    parser.add_argument("goals", nargs="*", metavar="GOAL", help="such as G-F1; default: all")
    args = parser.parse_args(argv)
    proofs = {} if args.again or not _KEPT.exists() else msgspec.json.decode(_KEPT.read_bytes(), type=dict[str, Proof])
    for goal in (goal for goals in GROUPS.values() for goal in goals):
        if goal.waits_for or (args.goals and goal.id not in args.goals):
            continue
        proof = proofs.get(goal.id)
        if args.goals or proof is None or not proof.holds or (proof.quick and not args.quick):
            proof = proofs[goal.id] = prove(goal, args.quick)
            _KEPT.write_text(json.dumps(msgspec.to_builtins(proofs), indent=1) + "\n")
            gap = f" (victim's longest gap {proof.gap:.2f} s)" if (proof.gap or 0.0) > BOUND else ""
            print(
                f"{'holds ' if proof.holds else 'MISSED'} {proof.seconds:6.0f} s  {goal.id:6} {proof.figure}{gap}",
                flush=True,
            )
    if args.write is not None:
        args.write.write_text(table(proofs), encoding="utf-8")
    missed = [name for name, proof in proofs.items() if not proof.holds]
    print(f"{len(proofs) - len(missed)} of {len(proofs)} goals hold{': missed ' + ', '.join(missed) if missed else ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
