"""What a plugin's class states of itself, read without an import; the orders of `auto` that follow from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ferrule.plugin import discover
from ferrule.plugin.stated import stated
from tools.wheels import Distribution

SOURCE = """
raise RuntimeError("imported")

class Base:
    first = 1

class Found(Base):
    first = -3
    second: int = 5
    third = first + 1
"""


@pytest.mark.parametrize(
    ("target", "attribute", "value"),
    [
        ("stated_acme.inner:Found", "first", -3),
        ("stated_acme.inner:Found", "second", 5),
        ("stated_acme.inner:Found", "third", None),  # not a literal
        ("stated_acme.inner:Found", "fourth", None),
        ("stated_acme:Handed", "first", -3),  # by the package
        ("stated_acme:Missing", "first", None),
        ("stated_acme.broken:Found", "first", None),
        ("no.such.module:Found", "first", None),
    ],
)
def test_literals_are_read_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, attribute: str, value: object
) -> None:
    package = tmp_path / "stated_acme"
    package.mkdir()
    (package / "__init__.py").write_text("from stated_acme.inner import Found as Handed\n")
    (package / "inner.py").write_text(SOURCE)
    (package / "broken.py").write_text("class Found(")
    monkeypatch.syspath_prepend(tmp_path)
    assert stated(target, attribute) == value
    assert not [name for name in sys.modules if name.startswith("stated_acme")]


def test_auto_asks_in_the_order_that_plugins_state(site: Any) -> None:
    source = "class A:\n    auto_order = -2\n\nclass B:\n    pass\n"
    entries = {"ferrule.v1.guided_decoding": {"a": "acme_order:A", "b": "acme_order:B"}}
    site.install(Distribution(name="acme-order", version="1", entry_points=entries, files={"acme_order.py": source}))
    names = site.discover().defaults("guided_decoding")
    assert names == ("guidance", "xgrammar", "a", "outlines", "lm-format-enforcer", "b")


def test_the_processor_is_the_last_platform_and_one_model_serves_any_architecture() -> None:
    plugins = discover()
    assert plugins.defaults("platform")[-1] == "cpu"
    general = [name for name in plugins.names("model") if plugins.stated("model", name, "any_architecture")]
    assert general == ["transformers"]
