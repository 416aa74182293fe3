"""YAML 1.2's core schema: what plain scalars are, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from ferrule.errors import CheckpointError
from ferrule.yaml_text import YamlError, keys_of, read_yaml, value_of


def written(folder: Path, text: str) -> Path:
    file = folder / "some.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def value(folder: Path, text: str) -> Any:
    node = read_yaml(written(folder, text), "file")
    assert node is not None
    return value_of(node)


# The examples of https://yaml.org/spec/1.2.2/#103-core-schema, and what YAML 1.1 takes for something else.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((word, None) for word in ("null", "Null", "NULL", "~", "", "!!null ''")),
        *((word, True) for word in ("true", "True", "TRUE", "!!bool 'true'")),
        *((word, False) for word in ("false", "False", "FALSE")),
        *((word, word) for word in ("yes", "no", "on", "off", "y", "N", "Yes", "tRUE", "nULL", "none")),
        *(("0", 0), ("-19", -19), ("+12", 12), ("0512", 512), ("08", 8), ("0o17", 15), ("0x1F", 31), ("0xff", 255)),
        *((word, word) for word in ("0b1", "1_000", "12:30", "190:20:30", "-0x1", "0o8", "0x", "1,000")),
        *(("0.", 0.0), ("-0.0", -0.0), (".5", 0.5), ("+12e03", 12000.0), ("-2E+05", -200000.0), ("1e6", 1e6)),
        *((".inf", math.inf), ("-.Inf", -math.inf), ("+.INF", math.inf), ("!!float 3", 3.0)),
        *((word, word) for word in ("1e", ".", "e3", "inf", "nan", "1.2.3", "-.nan", "١")),
        *((word, word) for word in ("2020-01-01", "2001-12-14t21:59:43.10-05:00", "=")),
        *(('"1e6"', "1e6"), ("'true'", "true"), ("!!str 12", "12"), ("!!str", "")),
        ("{1: a, true: b, ~: c, 0x10: d, 1.0: e}", {"1": "a", "true": "b", "~": "c", "0x10": "d", "1.0": "e"}),
        ("[&a {b: 1}, *a, *a]", [{"b": 1}] * 3),
        ('{"a":1,"b":[true,null,1.5e3,"x\\/\\u00e9"]}', {"a": 1, "b": [True, None, 1500.0, "x/é"]}),
        ("a: 1\n'<<': 2", {"a": 1, "<<": 2}),
    ],
)
def test_values(tmp_path: Path, text: str, expected: Any) -> None:
    found = value(tmp_path, "- " + text)[0] if "\n" not in text else value(tmp_path, text)
    assert found == expected
    assert type(found) is type(expected)


def test_not_a_number(tmp_path: Path) -> None:
    assert all(map(math.isnan, value(tmp_path, "[.nan, .NaN, .NAN]")))


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", 5, "a key is given twice, first in line 3"),
        ("- {a: 1}\n- {a: 1, 'a': 2}\n", 2, "a key is given twice, first in line 2"),
        ("a: 1\n[b]: 2\n", 2, "a key is not a text"),
        ("a: &x [1]\nb: {<<: *x}\n", 2, "YAML 1.2 has no merge key '<<'"),
        ("a: 1\nb: !!int x\n", 2, "the value is not what its YAML tag says"),
        ("a: !!bool yes\n", 1, "the value is not what its YAML tag says"),
        ("a: !!set {b}\n", 1, "a tag that is not in YAML 1.2's core schema"),
        ("a: !!binary aaaa\n", 1, "a tag that is not in YAML 1.2's core schema"),
        ("a: !!map [b]\n", 1, "a tag that is not in YAML 1.2's core schema"),
        ("a: !mine b\n", 1, "a tag that is not in YAML 1.2's core schema"),
        ("!mine a: b\n", 1, "a tag that is not in YAML 1.2's core schema"),
        ("a: 1\nb: &b\n  c: *b\n", 2, "a recursive alias"),
        ("a: " + "1" * 5000, 1, "an integer has more than 100 digits"),
        ("a: 1\nb: [\n", 3, "not YAML"),
        ("a: \x07\n", None, "not YAML"),
        ("[" * 5000, None, "nested too deeply"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, line: int | None, problem: str) -> None:
    with pytest.raises(YamlError) as error:
        read_yaml(written(tmp_path, text), "file")
    assert error.value.problem == problem
    assert error.value.line == line


def test_aliases_of_aliases_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    rows = ["- &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"- &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30)]
    with pytest.raises(YamlError, match="more than 100000 values"):
        read_yaml(written(tmp_path, "\n".join(rows)), "file")


def test_files_that_are_none_or_too_large(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "# nothing\n"), "file") is None
    with pytest.raises(CheckpointError, match="no list of things is larger"):
        read_yaml(written(tmp_path, "#" * (1 << 20) + "\n"), "list of things")
    with pytest.raises(CheckpointError, match="not a file"):
        read_yaml(tmp_path, "file")


def test_what_libraries_do_to_the_shared_loader_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml.SafeLoader, "yaml_implicit_resolvers", {})
    monkeypatch.setattr(yaml.SafeLoader, "yaml_constructors", {})
    assert value(tmp_path, "{a: 1, b: true}") == {"a": 1, "b": True}


def test_the_lines_of_keys(tmp_path: Path) -> None:
    node = read_yaml(written(tmp_path, "a: 1\nb:\n  c:\n    d: [1]\n  e: 2\n"), "file")
    assert node is not None
    assert dict(keys_of(node)) == {("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", "d"): 4, ("b", "e"): 5}
