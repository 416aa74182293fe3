"""`holo2`: reasoning of Holo 2, whose prompt opens the block unless the request says that it does not think.

https://github.com/vllm-project/vllm, the parser `holo2`
"""

from __future__ import annotations

from ferrule.interfaces.parsers import ChoiceContext
from ferrule_parsing import ThinkingParser


class Holo2(ThinkingParser):
    """The format of `deepseek_r1`; with `thinking` or `enable_thinking` false in the template's variables all is
    content.
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:DEEPSEEK_R1"
    begins_inside = True

    def begin(self, context: ChoiceContext) -> None:
        thinks = all(context.template_kwargs.get(name, True) for name in ("thinking", "enable_thinking"))
        super().begin(context)
        if not thinks:
            self._end(self._after)
