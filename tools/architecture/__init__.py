"""The rules that the source of this project keeps, each a function from modules to violations.

`tests/architecture` runs them over the repository and plants a fault for each, to show that it can fail.
"""

from tools.architecture.bans import BANS
from tools.architecture.english import ENGLISH_RULES
from tools.architecture.imports import IMPORT_RULES
from tools.architecture.shape import SHAPE_RULES
from tools.architecture.source import Module, Rule, Violation, read_modules

RULES: dict[str, Rule] = {**IMPORT_RULES, **SHAPE_RULES, **BANS, **ENGLISH_RULES}

__all__ = ["RULES", "Module", "Rule", "Violation", "read_modules"]
