"""Which logits processors a request may name, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from ferrule.config import LimitsConfig
from ferrule.errors import RequestError
from ferrule.frontend.admission.processors import check_functions, check_processors
from ferrule.frontend.admission.validate import AdmissionRules
from ferrule_plugins.logits_processor.python_function import PythonFunction

HERE = __name__
FUNCTION = "python_function"


class Plugin:
    def __init__(self, ids: Sequence[int] = ()) -> None:
        if not isinstance(ids, list | tuple):
            raise ValueError("ids must be a list")


def keep(output_ids: list[int], logits: Any) -> Any:
    return logits


def make(amount: int) -> Any:
    return keep


def tried(plugin: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    plugin(**arguments)


def rules(pattern: str | None, with_functions: bool = True) -> AdmissionRules:
    return AdmissionRules(
        limits=LimitsConfig(),
        vocab_size=8,
        max_model_len=8,
        context=8,
        max_logprobs=0,
        eos_ids=(),
        has_tokenizer=True,
        processor_pattern=pattern,
        processors={"ours": partial(tried, Plugin)},
        function_processor=(FUNCTION, partial(tried, PythonFunction)) if with_functions else None,
    )


@pytest.mark.advisory("CVE-2025-23310")
def test_processors_need_the_server_s_pattern() -> None:
    assert check_processors((), rules(None)) == ()
    with pytest.raises(RequestError, match="takes no"):
        check_processors(("a.b",), rules(None))

    def picky(arguments: Mapping[str, object]) -> None:
        if "y" in arguments:
            raise ValueError("it knows no 'y'")

    known = dict.fromkeys(("mine.a", "mine.b", "mine.a.b", "os.system"), picky)
    open_rules = replace(rules(r"mine\.\w+"), processors=known)
    assert check_processors(("mine.a", {"qualname": "mine.b", "kwargs": {"x": 1}}), open_rules) == (
        ("mine.a", {}),
        ("mine.b", {"x": 1}),
    )
    for wrong in (
        "mine.a.b",
        "os.system",
        "mine.c",
        ["mine.a"],
        5,
        {"name": "mine.a"},
        {"qualname": "mine.a", "args": [1]},
        {"qualname": "mine.a", "kwargs": 5},
    ):
        with pytest.raises(RequestError):
            check_processors((wrong,), open_rules)  # fmt: skip
    with pytest.raises(RequestError, match="mine.b: it knows no 'y'"):
        check_processors(({"qualname": "mine.b", "kwargs": {"y": 1}},), open_rules)


def test_names_within_the_pattern() -> None:
    given = [
        "ours",
        {"qualname": "ours", "kwargs": {"ids": [1]}},
        f"{HERE}.keep",
        {"qualname": f"{HERE}.make", "args": [3]},
        {"qualname": f"{HERE}.make", "kwargs": {"amount": 3}},
    ]
    assert check_processors(given, rules(".*")) == (
        ("ours", {}),
        ("ours", {"ids": [1]}),
        (FUNCTION, {"function": f"{HERE}.keep"}),
        (FUNCTION, {"function": f"{HERE}.make", "args": [3], "kwargs": {}}),
        (FUNCTION, {"function": f"{HERE}.make", "args": [], "kwargs": {"amount": 3}}),
    )


@pytest.mark.parametrize(
    ("pattern", "entry", "said"),
    [
        (None, "ours", "--logits-processor-pattern"),
        ("other", "ours", "does not have"),
        (r"os\.path", "os.system", "does not have"),
        (f"{FUNCTION}|ours", {"qualname": FUNCTION, "kwargs": {"function": "os.getcwd"}}, "does not have"),
        (".*", {"qualname": f"{FUNCTION}", "kwargs": {"function": "os.getcwd"}}, "does not have"),
        (".*", f"{HERE}:keep", "does not have"),
        (".*", f"{HERE}.pytest.fail", "cannot be imported"),  # not an attribute of this module
        (".*", "no_such_module.f", "cannot be imported"),
        (".*", {"qualname": f"{HERE}.make", "args": [1, 2]}, "these arguments"),
        (".*", {"qualname": f"{HERE}.make", "args": 5}, "args must be a list"),
        (".*", {"qualname": "ours", "args": [1]}, "by name"),
        (".*", {"qualname": "ours", "kwargs": {"ids": 5}}, "ids must be a list"),
        (".*", keep, "does not have"),
        (".*", {"qualname": keep}, "does not have"),
    ],
)
def test_what_is_refused(pattern: str | None, entry: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        check_processors([entry], rules(pattern))
    assert caught.value.param == "logits_processors"


def test_functions_of_an_offline_caller() -> None:
    """Pass the function itself to an engine in this process; to one in another process, its import path."""
    assert check_functions([keep], rules(None), remote=False) == ((FUNCTION, {"function": keep}),)
    assert check_functions([keep], rules(None), remote=True) == ((FUNCTION, {"function": f"{HERE}:keep"}),)
    with pytest.raises(RequestError, match="another process"):
        check_functions([lambda a, b: b], rules(None), remote=True)
    with pytest.raises(RequestError, match=r"logits_processors\[1\]: it must take"):
        check_functions([keep, lambda a: a], rules(None), remote=False)
    with pytest.raises(RequestError, match="not allowed"):
        check_functions([keep], rules(None, with_functions=False), remote=False)
