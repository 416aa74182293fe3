"""Every file of the repository that is written from the code, behind one command, so that none is forgotten.

``python -m tools.pages`` in the repository's root renews them; ``--check`` names those that are not current
and changes nothing. The snapshot of the contract is not among them: it is renewed on purpose, see CONTRIBUTING.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tools.pages import advisories as advisories_page
from tools.pages import cli as cli_page
from tools.pages import console as console_page
from tools.pages import http as http_page
from tools.pages import kinds as kind_pages
from tools.pages import metrics as metrics_page
from tools.pages import public as public_page

# File → its text.
FILES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "docs/reference/cli.md": cli_page.page,
        "docs/reference/http.md": lambda: http_page.page(http_page.spec()),
        "docs/reference/metrics.md": metrics_page.page,
        "docs/advisories.md": advisories_page.page,
    }
)
_PUBLIC = Path("docs/plugins.md")
_KINDS = Path("docs/reference/plugins")  # written as a whole: a page that does not belong to a kind is removed


def texts(root: Path, *, console: bool = True) -> Iterator[tuple[Path, str]]:
    """Yield each file and its correct content. Without `console`, the pages that must run commands are left out."""
    for name, made in FILES.items():
        yield root / name, made()
    for kind, text in kind_pages.pages(root / "templates" / "plugin").items():
        yield root / _KINDS / f"{kind}.md", text
    yield root / _PUBLIC, public_page.renewed(root / _PUBLIC)
    for name in console_page.WORLDS if console else ():
        yield root / "docs" / name, console_page.renew(root / "docs" / name)


def stale(root: Path, *, console: bool = True) -> dict[Path, str | None]:
    """Return the files with wrong content, each with its correct content; None for a file that should not exist."""
    found: dict[Path, str | None] = dict(texts(root, console=console))
    found |= {file: None for file in (root / _KINDS).glob("*.md") if file not in found}
    return {file: text for file, text in found.items() if text is None or not file.is_file() or _read(file) != text}


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def main(argv: Sequence[str], root: Path | None = None) -> int:
    root = root or Path.cwd()
    if list(argv) not in ([], ["--check"]) or not (root / "mkdocs.yml").is_file():
        print("usage, in the repository's root: python -m tools.pages [--check]", file=sys.stderr)
        return 2
    found = stale(root)
    for file, text in found.items():
        print(file.relative_to(root))
        if argv:
            continue
        if text is None:
            file.unlink()
        else:
            file.write_text(text, encoding="utf-8")
    return 1 if argv and found else 0
