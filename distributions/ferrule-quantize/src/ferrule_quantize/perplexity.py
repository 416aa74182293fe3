"""Measures how well a model predicts a text, before and after quantization."""

from __future__ import annotations

import math
from pathlib import Path

from ferrule import LLM, SamplingParams
from ferrule.errors import ConfigError

_MOST = 512  # tokens of a window
_LEAST = 2  # nothing is predicted in fewer
_TEXT = """\
The river rises in the hills north of the town and runs for about forty miles before it reaches the sea. In spring the
snow melts, and for two or three weeks the water is high enough to cover the lower meadows. Farmers have learned to
wait: nothing is planted there until the end of April, when the ground is soft and dark. An old stone bridge, built by
masons who left no other trace, carries the road across at the narrowest point. It was closed twice in the last century,
once for repairs and once because a barge had struck one of its pillars.

Most people who visit come for the market, which is held on the first Saturday of the month. One can buy bread, cheese,
apples, tools and second-hand books; a man with a grey beard repairs clocks while their owners wait. If it rains, the
stalls move under the roof of the former station. "We have never cancelled it," the mayor likes to say, "and we are not
going to begin now." Trains stopped in 1964, but the timetable still hangs on the wall, and children use it to learn how
to read the time. The question that strangers ask most often is how far it is to the coast. The answer depends on
whether they want to walk, to cycle or to drive: the path along the water takes two days, the road less than an hour.
"""


def text_of(named: str) -> str | None:
    """Return the text of --evaluate; None where nothing is measured. Raises ConfigError."""
    if named in ("none", "builtin"):
        return _TEXT if named == "builtin" else None
    file = Path(named).expanduser()
    if file.exists() and not file.is_file():  # a device or a pipe might have no end
        raise ConfigError(f"--evaluate {named} is not a file.")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--evaluate {named} cannot be read: {error}.") from None
    if not text.strip():
        raise ConfigError(f"--evaluate {named} is empty.")
    return text


def perplexity(folder: Path, text: str, tokenizer_of: Path | None = None) -> float:
    """Measure the perplexity of a text, each token given those before it in a window.

    Raises StartupError, ConfigError.
    """
    named = None if tokenizer_of is None else str(tokenizer_of)
    with LLM(str(folder), tokenizer=named, use_tqdm_on_load=False, device="cpu") as llm:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{folder} has no tokenizer to measure the perplexity with.", "--evaluate none.")
        ids, width = tokenizer.encode(text), min(_MOST, llm.model.max_model_len - 1)
        windows = [ids[start : start + width] for start in range(0, len(ids), width)]
        windows = [window for window in windows if len(window) >= _LEAST]
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": window} for window in windows], asked, use_tqdm=False)
    total, count = 0.0, 0
    for window, output in zip(windows, outputs, strict=True):
        for token, position in zip(window, output.prompt_logprobs or [], strict=True):
            if position:  # the first token is given
                total, count = total - position[token].logprob, count + 1
    if not count:
        raise ConfigError("The text of --evaluate has fewer than two tokens.")
    return math.exp(total / count)
