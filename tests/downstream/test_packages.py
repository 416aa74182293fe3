"""The packages import public names only, and their plugins keep what the conformance kits ask of every plugin."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrule.plugin import discover
from ferrule_testkit.kits import kit_of
from ferrule_testkit.kits.base import promises
from ferrule_testkit.kits.run import FAILED, OK, run_kit
from ferrule_testkit.public import PUBLIC, is_public, main, private_imports

HERE = Path(__file__).parent
# Promises that take longest, which built-in plugins of each kind keep in `make test`.
LONG = frozenset(
    (
        *("test_a_change_of_any_weight_changes_the_answer", "test_ranks_compute_what_one_does"),
        *("test_windows_soft_caps_slopes_and_sinks", "test_types", "test_long_rows"),
        *("test_work_is_linear", "test_short_texts_in_every_cut", "test_any_cut_gives_the_same"),
        "test_no_value_of_a_field_is_the_servers_fault",
    )
)
PACKAGES = ("acme_memory", "acme_npu", "acme_pipe", "acme_protocol")


@pytest.mark.parametrize("name", PACKAGES)
def test_strangers_import_public_names_only(name: str) -> None:
    assert list(private_imports(HERE / name)) == []
    sources = "".join(file.read_text() for file in (HERE / name).rglob("*.py"))
    assert "from ferrule.interfaces." in sources  # the check has something to look at


@pytest.mark.parametrize(
    "line",
    [
        "import ferrule.engine.cache",
        "from ferrule.runner.step import Rows",
        "from ferrule import engine",
        "from ferrule.config import sections",
        "from ferrule.types import _hidden",
        "from ferrule.interfaces import _x",
        "import ferrule_plugins",
        "from ferrule_kernels.attention import visible",
    ],
)
def test_private_names_are_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(f"import ferrulex\nfrom ferrule import SamplingParams\n{line}\n")
    (found,) = private_imports(tmp_path)
    assert found.startswith("x.py:3: ferrule")
    assert main([str(tmp_path)]) == 1
    assert main([str(HERE / "acme_memory")]) == 0
    assert main([]) == 2


def test_the_page_lists_the_public_modules() -> None:
    page = (HERE.parents[1] / "docs" / "plugins.md").read_text()
    section = page.partition("## What a plugin may import")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(ferrule[\w.*]*)`", "".join(re.findall(r"^- .*:", section, re.MULTILINE))))
    assert listed == set(PUBLIC)
    assert is_public("ferrule.interfaces.model")
    assert not is_public("ferrule.interfacesx")


@pytest.mark.parametrize("left_out", [LONG, pytest.param(frozenset(), marks=pytest.mark.slow)], ids=["most", "all"])
@pytest.mark.parametrize(
    ("package", "kind", "name"),
    [
        ("acme_memory", "model", "AcmeMemoryForCausalLM"),
        ("acme_npu", "attention", "acme_paged"),
        ("acme_npu", "platform", "acme_npu"),
        # It starts a worker, which imports torch, for each promise: test_kits_planted.py has one that is quick.
        pytest.param("acme_pipe", "executor", "acme_pipe", marks=pytest.mark.slow),
        ("acme_protocol", "logits_processor", "acme_rehearsal"),
        ("acme_protocol", "router", "acme"),
        ("acme_protocol", "router", "acme_dialogue"),
        ("acme_protocol", "tool_parser", "acme"),
    ],
)
def test_strangers_keep_the_promises_of_their_kind(
    package: str, kind: str, name: str, left_out: frozenset[str], on_path: Callable[[str], None]
) -> None:
    on_path(package)
    kit, plugin = kit_of(kind), discover().load(kind, name)
    methods = [method for method, _ in promises(kit) if method not in left_out]
    outcomes = [outcome for method in methods for outcome in run_kit(kit, plugin, only=method)]
    assert [(outcome.name, outcome.reason) for outcome in outcomes if outcome.result == FAILED] == []
    assert sum(outcome.result == OK for outcome in outcomes) >= 3
