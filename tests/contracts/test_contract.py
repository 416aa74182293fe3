"""The plugin contract does not change by accident: a snapshot of its signatures, and of the public names."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import ferrule
from ferrule.plugin import CONTRACT
from ferrule_testkit.contract import contract, describe, main

SNAPSHOT = Path(__file__).parent / f"v{CONTRACT}.txt"

ADVICE = f"""\
The plugin contract differs from its snapshot. Plugins of others are written against it:
- if they still work (an addition with a default), renew the snapshot and say so in docs/plugin-api-changes.md:
      python -m ferrule_testkit.contract --write tests/contracts/{SNAPSHOT.name}
- if they do not, it is a new contract: raise CONTRACT in core/ferrule/plugin/kinds.py and keep reading the last one.
"""


def test_the_contract_is_the_one_of_the_snapshot():
    old, new = SNAPSHOT.read_text().splitlines(), contract().splitlines()
    if old != new:
        pytest.fail("\n".join([ADVICE, *difflib.unified_diff(old, new, "snapshot", "code", lineterm="")]), False)


def test_public_names():
    assert ferrule.__all__ == ["LLM", "SamplingParams", "__version__"]


CLASS = """
class Policy(ABC):
    name: str = "x"
    _private: int = 0

    @abstractmethod
    def key(self, view: View, now: float) -> tuple[float, ...]:
        '''Sort key.'''

    def _helper(self) -> None: ...
"""


@pytest.mark.parametrize(
    ("before", "after", "seen"),
    [
        ("now: float", "now: int", True),
        ("(self, view", "(self, extra, view", True),
        ("-> tuple[float, ...]", "-> float", True),
        ("    @abstractmethod\n", "", True),
        ('str = "x"', 'str = "y"', True),
        ("(ABC)", "(Struct, frozen=True)", True),
        ("'''Sort key.'''", "'''Another text.'''", False),
        ("_helper(self)", "_other(self, x)", False),
        ("_private: int", "_private: str", False),
    ],
)
def test_what_counts_as_a_change(before, after, seen):
    assert before in CLASS
    assert (list(describe(CLASS)) != list(describe(CLASS.replace(before, after)))) is seen


def test_the_snapshot_is_renewed_by_a_command(tmp_path, capsys):
    assert main(["--write", str(tmp_path / "v.txt")]) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == (tmp_path / "v.txt").read_text()
    assert main(["--what"]) == 2
