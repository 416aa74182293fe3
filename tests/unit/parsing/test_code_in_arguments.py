"""Code that a model was made to write as an argument is a text, for every built-in tool parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.parsing.test_published import CASES, read

NAMES = sorted({name for name, *_ in CASES})
CODES = ("__import__('os').mkdir('canary')", '__import__("os").mkdir("canary")')
OWN = {  # for parsers whose published outputs have no such text
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="clock"><｜DSML｜parameter name="zone" string="true">'
    "UTC</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
    "llama4_json": '{"name": "clock", "parameters": {"zone": "UTC"}}',
    "llama4_pythonic": "<|python_start|>[clock(zone='UTC')]<|python_end|>",
    "olmo3": "<function_calls>clock(zone='UTC')</function_calls>",
    "pythonic": "[clock(zone='UTC')]",
    "qwen3_xml": "<tool_call><function=clock><parameter=zone>UTC</parameter></function></tool_call>",
    "seed_oss": "<seed:tool_call><function=clock><parameter=zone>UTC</parameter></function></seed:tool_call>",
}
QUOTED = ("Oslo", "UTC", '"Oslo"', "'Oslo'", '"UTC"', "'UTC'", "37", "42")


@pytest.mark.advisory("CVE-2025-9141", "CVE-2026-61539")
@pytest.mark.parametrize("name", NAMES)
def test_code_is_not_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put code in place of a text within each published output, and of a text with its quotes."""
    monkeypatch.chdir(tmp_path)
    texts = [*(text for own, text, *_ in CASES if own == name), OWN.get(name, "")]
    told = 0
    for text, value, code in ((text, value, code) for text in texts for value in QUOTED for code in CODES):
        if value in text:
            found = read(name, text.replace(value, code), 7)
            told += any(code in call.arguments or json.dumps(code)[1:-1] in call.arguments for call in found.calls)
    assert list(tmp_path.iterdir()) == []
    assert told, "no output of this parser had the code as an argument"
