"""For developers of Ferrule: benchmarks, page generators, architecture rules. Not part of the wheel."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
