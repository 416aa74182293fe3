"""Parameters that only Python callers have."""

from __future__ import annotations

from typing import Any

import pytest

from ferrule import RequestOutputKind, SamplingParams
from ferrule.errors import RequestError


def halve(output_ids: list[int], logits: Any) -> Any:
    return logits / 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_new_tokens": 5}, "There is no max_new_tokens. Did you mean 'max_tokens'?"),
        ({"logits_processor": [halve]}, "There is no logits_processor. Did you mean 'logits_processors'?"),
        ({"logits_processors": halve}, "logits_processors must be a list of functions."),
        ({"logits_processors": ["json.dumps"]}, "logits_processors must be a list of functions."),
        ({"extra_args": [1]}, "extra_args must be an object, not a list."),
        ({"extra_args": {"a": halve}}, "extra_args"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert caught.value.message.startswith(said)


def test_what_is_right_is_kept() -> None:
    params = SamplingParams(
        output_kind=RequestOutputKind.DELTA, logits_processors=[halve], extra_args={"a": [1, 2.5, None, {"b": "c"}]}
    )
    copy = params.model_copy(update={"n": 2})
    assert copy.logits_processors == (halve,)
    assert (copy.output_kind, copy.extra_args) == (RequestOutputKind.DELTA, {"a": [1, 2.5, None, {"b": "c"}]})
    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE
