"""`deepseek_v3`: reasoning of DeepSeek V3.1 and later models that think on demand.

The template's variable `thinking` opens the block at the end of the prompt; otherwise the prompt closes it there.
DeepSeek V3 itself does not think. https://huggingface.co/deepseek-ai/DeepSeek-V3.1, chat template
"""

from __future__ import annotations

from ferrule.interfaces.parsers import ChoiceContext
from ferrule_parsing import ThinkingParser


class DeepSeekV3(ThinkingParser):
    """The format of `deepseek_r1` with `thinking` or `enable_thinking` in the template's variables; else everything is
    content.
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:DEEPSEEK_V3"

    def begin(self, context: ChoiceContext) -> None:
        self._inside = any(context.template_kwargs.get(name) for name in ("thinking", "enable_thinking"))
        super().begin(context)
        if not self._inside and not self._over:
            self._end(self._after)


class DeepSeekV4(DeepSeekV3):
    """`deepseek_v4`: DeepSeek V4, whose calls end the block too."""

    conformance = "ferrule_testkit.samples.reasoning_parser:DEEPSEEK_V4"
    ending_tags = ("<｜DSML｜tool_calls>",)
