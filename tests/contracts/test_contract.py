"""The plugin contract does not change by accident: a snapshot of its names, signatures and promises."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import ferrule
from ferrule.plugin import CONTRACT
from ferrule.plugin.kinds import KINDS, READABLE
from ferrule_testkit.public import PUBLIC
from tools.contract import breaking, contract, describe, main, recorded, refusal, snapshot

HERE = Path(__file__).parent
SNAPSHOT = HERE / f"v{CONTRACT}.txt"
PAGE = HERE.parents[1] / "docs" / "plugin-api-changes.md"

ADVICE = f"""\
The plugin contract differs from its snapshot. Plugins of others are written against it. If the change is meant:
1. say what changes for whom in docs/plugin-api-changes.md, in an entry under version {CONTRACT};
2. python -m tools.contract --write tests/contracts/{SNAPSHOT.name} docs/plugin-api-changes.md
   It says when that may not be, and the page says what to do then.
"""


def test_the_contract_is_the_one_of_the_snapshot() -> None:
    old, new = SNAPSHOT.read_text().splitlines(), snapshot(PAGE.read_text()).splitlines()
    if old != new:
        pytest.fail("\n".join([ADVICE, *difflib.unified_diff(old, new, "snapshot", "code", lineterm="")]), False)


def test_public_names() -> None:
    assert ferrule.__all__ == [
        "LLM",
        "AsyncEngineArgs",
        "AsyncLLM",
        "AsyncLLMEngine",
        "BeamSearchParams",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "EngineArgs",
        "GuidedDecodingParams",
        "LLMEngine",
        "LoRARequest",
        "PoolingParams",
        "PromptAdapterRequest",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
        "__version__",
    ]


def test_the_support_policy() -> None:
    """Read the current and the previous version, each with a snapshot, a heading, and adapters if need be."""
    assert CONTRACT in READABLE
    assert {CONTRACT, CONTRACT - 1} >= READABLE
    for version in READABLE:
        assert (HERE / f"v{version}.txt").is_file()
        recorded(PAGE.read_text(), version)
    for kind in KINDS.values():
        assert set(kind.earlier) <= READABLE - {CONTRACT}
        for version in kind.earlier:
            assert isinstance(kind.load_base(version), type)


def test_everything_public_is_in_the_snapshot() -> None:
    """Leave out built-in plugins that may be derived from, which the interface of their kind binds."""
    text = contract()
    modules = {entry for entry in PUBLIC if not entry.endswith(".*")}
    named = {module for module in modules if f"module {module}\n" in text or f"names of {module}\n" in text}
    assert {module for module in modules - named if not module.startswith("ferrule_plugins.")} == set()
    for hook in (
        "def authorise(self, access: AccessRequest) -> bool | None",
        "class CallArguments(",
        "[rows, max_blocks]",
    ):
        assert hook in text


CLASS = """
class Policy(ABC):
    name: str = "x"  # what it is called
    _private: int = 0

    @abstractmethod
    def key(
        self,
        view: View,  # of one request
        now: float,
    ) -> tuple[float, ...]:
        '''Sort key.'''

    def _helper(self) -> None: ...
"""
OPTIONAL = "    def budget(self) -> int:\n        return 1\n"


@pytest.mark.parametrize(
    ("before", "after", "seen", "breaks"),
    [
        ("now: float", "now: int", True, True),
        ("self,\n", "self,\n        extra: int,\n", True, True),
        ("-> tuple[float, ...]", "-> float", True, True),
        ("    @abstractmethod\n", "", True, True),
        ('str = "x"', 'str = "y"', True, True),
        ("(ABC)", "(Struct, frozen=True)", True, True),
        ("class Policy", "class Order", True, True),
        ("    def _helper", f"    @abstractmethod\n{OPTIONAL}\n    def _helper", True, True),
        ("    def _helper", f"{OPTIONAL}\n    def _helper", True, False),
        ("\nclass Policy", "\nclass View: ...\n\nclass Policy", True, False),
        ("'''Sort key.'''", "'''Another promise.'''", True, False),
        ("# of one request", "# of all requests", True, False),
        ("# what it is called", "", True, False),
        ("_helper(self)", "_other(self, x)", False, False),
        ("_private: int", "_private: str", False, False),
    ],
)
def test_what_counts_as_a_change_and_what_breaks_plugins(before: str, after: str, seen: bool, breaks: bool) -> None:
    assert before in CLASS
    old, new = ("\n".join(["module m", *describe(text)]) for text in (CLASS, CLASS.replace(before, after)))
    assert (old != new) is seen
    assert bool(breaking(old, new)) is breaks


def test_equal_lines_of_different_classes_are_told_apart() -> None:
    one = "module m\nclass A()\n    x: int\nclass B()\n    y: int\n"
    other = "module m\nclass A()\n    y: int\nclass B()\n    x: int\n"
    assert len(breaking(one, other)) == 2


def page(state: str, entries: int) -> str:
    return f"## Version {CONTRACT}{state}\n\nText.\n\n" + "- Entry.\n" * entries + "\n## Version 0\n\n- Old.\n"


@pytest.mark.parametrize(
    ("state", "entries", "before", "after", "refused"),
    [
        (" (not released)", 3, "", "", None),
        (" (not released)", 3, "x: int", "x: str", None),
        (" (not released)", 2, "x: int", "x: str", "Say first"),
        ("", 3, "x: int", "x: str", r"would break:\n- m.A: x: int"),
        ("", 3, "    x: int\n", "", "would break"),
        ("", 3, "    x: int", "    x: int\n    y: int = 0", None),
        ("", 2, "    x: int", "    x: int\n    y: int = 0", "Say first"),
    ],
)
def test_when_a_snapshot_may_be_renewed(state: str, entries: int, before: str, after: str, refused: str | None) -> None:
    text = "module m\nclass A()\n    x: int\n"
    old = f"entries in plugin-api-changes.md: 2\n{text}"
    new = f"entries in plugin-api-changes.md: {entries}\n{text.replace(before, after)}"
    why = refusal(old, new, page(state, entries))
    if refused is None:
        assert why is None
    else:
        assert refused.replace("\\n", "\n") in (why or "")


def test_the_page_of_changes_is_read() -> None:
    assert recorded(page(" (not released)", 3), CONTRACT) == (False, 3)
    assert recorded(page("", 0), CONTRACT) == (True, 0)
    with pytest.raises(ValueError, match="no heading"):
        recorded(page("", 1), CONTRACT + 1)


def test_the_snapshot_is_renewed_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, changes = tmp_path / "v.txt", tmp_path / "changes.md"
    changes.write_text(page(" (not released)", 1))
    write = ["--write", str(target), str(changes)]
    assert main(write) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == target.read_text().partition("\n")[2]
    assert main(write) == 1
    assert "Say first" in capsys.readouterr().err
    changes.write_text(page(" (not released)", 2))
    assert main(write) == 0
    target.write_text(target.read_text().replace("arrival: float\n", "arrival: float\n    gone: int\n"))
    changes.write_text(page("", 3))
    assert main(write) == 1
    assert "gone: int" in capsys.readouterr().err
    assert main(["--what"]) == 2
