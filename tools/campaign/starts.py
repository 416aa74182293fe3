"""Starts that something is wrong with: ``python -m tools.campaign.starts [WORD ...]``, of all cases with the words.

It prints a line for each and exits with 1 if one did not come to what it must; what it wrote is shown then.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.campaign.bad_models import MODELS
from tools.campaign.bad_places import PLACES
from tools.campaign.case import Case, run

CASES = (*PLACES, *MODELS)


def main(words: Sequence[str]) -> int:
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    failed = [case.name for case in chosen if not passes(case)]
    missed = f"; not: {', '.join(failed)}" if failed else ""
    print(f"{len(chosen) - len(failed)} of {len(chosen)} starts came to what they must{missed}")
    return 1 if failed or not chosen else 0


def passes(case: Case) -> bool:
    with tempfile.TemporaryDirectory(prefix="starts-") as folder:
        result = run(case, Path(folder))
    print(
        f"{'FAILED' if result.problem else 'ok    '} {result.seconds:6.1f} s  {case.name}  {result.problem}", flush=True
    )
    if result.problem:
        print("".join(f"    | {line}\n" for line in result.text.splitlines()[-40:]), flush=True)
    return not result.problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
