"""`granite`: reasoning of Granite 3.2, which sentences open and close.

With `thinking` the chat template asks the model to write its thoughts after "Here is my thought process:" and its
response after "Here is my response:"; the model also writes "Here's". Without `thinking` it writes its response alone.
https://huggingface.co/ibm-granite/granite-3.2-8b-instruct, chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Granite(ThinkingParser):
    """The format "Here is my thought process: … Here is my response: …"; the block is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:GRANITE"
    open_tag = ("Here is my thought process:", "Here's my thought process:")
    close_tag = ("Here is my response:", "Here's my response:")
