"""Functions that cross a process by their import path, and those that cannot."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from ferrule.errors import RequestError
from ferrule.wire.functions import find_function, import_path


class Scale:
    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    def method(self) -> None: ...


@pytest.mark.parametrize("function", [json.dumps, Scale, Scale.double])
def test_the_path_of_a_function_leads_to_it(function: Any) -> None:
    assert find_function(import_path(function, "f")) is function


@pytest.mark.parametrize("function", [lambda x: x, partial(json.dumps), Scale().method])
def test_what_another_process_cannot_import_is_refused(function: Any) -> None:
    with pytest.raises(RequestError, match="cannot import .* top level of a module") as caught:
        import_path(function, "func")
    assert caught.value.param == "func"


def test_a_function_of_the_main_program_is_refused() -> None:
    def main() -> None: ...

    main.__module__, main.__qualname__ = "__main__", "main"
    with pytest.raises(RequestError, match="'main'"):
        import_path(main, "func")


def test_a_dotted_path_names_one_attribute_of_a_module() -> None:
    assert find_function("json.dumps") is json.dumps
    for path in ("json.decoder.JSONDecoder.decode", "json.codecs.open", "dumps", "json.no_such"):
        with pytest.raises((ImportError, AttributeError)):
            find_function(path)
