"""How docstrings begin: a function's with a verb in the imperative, a class's with a noun, none within a sentence.

Ruff's D401 knows a few hundred verbs and finds their other forms. This rule finds what has no verb at all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tools.architecture.source import Module, Rule, Violation

# Words that begin a clause without its head ("What X takes", "Of a field that …").
_CLAUSE = re.compile(
    "What|How|Where|Of|Which|Who|Whom|Whose|Why|When|That|For|By|As|In|With|At|From|To|If|Than|Without|Behind|Around|On|"
    "Between|Beyond|Over|Under|Because|While|Until|Before|After|Not"
)
# Words that begin a noun, or a clause that stands for one: for classes and properties.
_NOUN = re.compile(
    "The|A|An|One|Each|Every|All|Any|Some|Those|These|This|No|Its|Two|Three|Several|Both|Everything|Nothing|None|Only|"
    "Another|Other|Text|Half|True|False|Bytes|Empty|Whole|First|Last|Same|More|Most|Least|Whether"
)
_WORD = re.compile(r"[A-Z][a-z]+(-[a-z]+)?")
# Forms that are not imperatives, and imperatives that look like them.
_FORM = re.compile(".*(s|ed|ing)")
_IMPERATIVE = re.compile(
    ".*(ss|ias|ocus)|Need|Feed|Embed|Proceed|Seed|Exceed|Succeed|Bring|Shed|Speed|Wed|Ring|Sing|String|Ping|Bypass"
)


def docstring_heads(modules: Sequence[Module]) -> list[Violation]:
    """Return the docstrings of functions without a verb at the front, and of classes and properties without a noun."""
    return [violation for module in modules for violation in _of(module)]


def _of(module: Module) -> Iterator[Violation]:
    for node in module.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            first = text.split(maxsplit=1)[0].rstrip(".,:;")
            if not isinstance(node, ast.ClassDef) and not _is_property(node):
                if not _may_be_imperative(first):
                    yield module.violation(node, f"{node.name}: the docstring begins with {first!r}, not with a verb")
            elif _CLAUSE.fullmatch(first):
                yield module.violation(node, f"{node.name}: the docstring begins with {first!r}, not with a noun")


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _may_be_imperative(word: str) -> bool:
    if not _WORD.fullmatch(word) or _CLAUSE.fullmatch(word) or _NOUN.fullmatch(word):
        return False
    return not _FORM.fullmatch(word) or bool(_IMPERATIVE.fullmatch(word))


ENGLISH_RULES: dict[str, Rule] = {"docstring-heads": docstring_heads}
