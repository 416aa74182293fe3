"""`ferrule plugins new KIND NAME`: a package to begin with, with a test that already passes.

`templates/plugin/KIND` of the repository, shipped as package data, is a package itself, in which everything is called
`example`: ``ferrule-example``, ``ferrule_example``, ``ExamplePolicy``, ``example``. The name takes that word's place.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ferrule.config.option import opt
from ferrule.errors import ConfigError, PluginError, nearest
from ferrule.interfaces.plugins import Plugins
from ferrule.plugin import KINDS

_TEMPLATES = Path(__file__).with_name("plugin_templates")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[_-][A-Za-z0-9]+)*")
_LONGEST = 64
_LEFTOVERS = ("__pycache__", ".pytest_cache", "build", "dist")  # of whoever worked inside a template
_CLASS = re.compile(r"\bclass (Example\w*)\(")


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Options of `ferrule plugins new`."""

    kind: str = opt("", "Kind of plugin; the first word without a dash.")
    name: str = opt("", "What users will type to choose it; the second word.")
    dir: str = opt("", "Folder of the new package, which must not exist or be empty. Default: the distribution's name.")


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of one plugin in each place. `Names.of` raises ConfigError for a name that cannot be used."""

    entry: str  # what users type
    distribution: str
    module: str
    cls: str  # without the kind's suffix

    @classmethod
    def of(cls, name: str) -> Names:
        if not _NAME.fullmatch(name) or len(name) > _LONGEST:
            raise ConfigError(
                f"{name!r} cannot be a plugin's name.",
                "A name is letters and digits, begins with a letter, and may have single '_' or '-' inside; "
                f"at most {_LONGEST} characters.",
            )
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+", name)
        stem = "-".join(words).lower()
        distribution = stem if stem.startswith("ferrule-") else f"ferrule-{stem}"
        pascal = "".join(word[0].upper() + word[1:] for word in words)
        return cls(entry=name, distribution=distribution, module=distribution.replace("-", "_"), cls=pascal)


def arguments(argv: Sequence[str]) -> list[str]:
    """Turn ``KIND NAME …`` into options: the parser knows one word without a dash, and that is the name."""
    if argv and not argv[0].startswith("-"):
        return ["--kind", *argv]
    return list(argv)


def new(plugins: Plugins, options: NewOptions) -> int:
    """Write the package and print what to do next.

    Raises ConfigError for wrong names, PluginError for a folder or a name that is taken.
    """
    if options.kind not in KINDS:
        problem = f"{options.kind!r} is not a kind of plugin." if options.kind else "The kind is missing."
        raise ConfigError(
            f"ferrule plugins new KIND NAME: {problem}{nearest(options.kind, KINDS)}", f"Kinds: {', '.join(KINDS)}"
        )
    if not options.name:
        raise ConfigError(f"ferrule plugins new {options.kind} NAME: the name is missing.")
    names = Names.of(options.name)
    _check_free(plugins, options.kind, names)
    folder = Path(options.dir or names.distribution)
    _write(_files(options.kind, names), folder)
    print(_next_steps(options.kind, names, folder))
    return 0


def _check_free(plugins: Plugins, kind: str, names: Names) -> None:
    if names.entry in plugins.names(kind):
        raise PluginError(
            f"{kind}:{names.entry} is offered by {plugins.origin(kind, names.entry)} already.",
            "Two distributions that offer one name are a conflict for whoever installs both; take another.",
        )
    if importlib.util.find_spec(names.module) is not None:
        raise PluginError(f"A package {names.module} is installed already.", "Take another name.")


def _files(kind: str, names: Names) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of each file of the new package."""
    template = _TEMPLATES / kind
    paths = [file.relative_to(template) for file in sorted(template.rglob("*")) if file.is_file()]
    texts = {
        path: (template / path).read_text(encoding="utf-8")
        for path in paths
        if not any(part in _LEFTOVERS or part.endswith(".egg-info") for part in path.parts)
    }
    whole = "\n".join(texts.values())
    old_class = max(_CLASS.findall(whole), key=len)
    new_class = old_class.replace("Example", names.cls, 1)
    if keyword.iskeyword(new_class) or re.search(rf"\b{new_class}\b", whole):
        new_class = f"My{new_class}"  # the template imports or means something else by this word
    words = {
        old_class: new_class,
        "ferrule-example": names.distribution,
        "ferrule_example": names.module,
        "example": names.entry,
    }
    pattern = re.compile("|".join(rf"\b{word}\b" for word in words))
    for path, text in texts.items():
        yield Path(_renamed(str(path), pattern, words)), _renamed(text, pattern, words)


def _renamed(text: str, pattern: re.Pattern[str], words: Mapping[str, str]) -> str:
    return pattern.sub(lambda found: words[found[0]], text)


def _write(files: Iterator[tuple[Path, str]], folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise PluginError(f"{folder} exists already; nothing was written.", "Say --dir FOLDER for another place.")
        for path, text in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error


def _next_steps(kind: str, names: Names, folder: Path) -> str:
    return f"""\
{folder} is a package with the plugin {kind}:{names.entry}. Next:

  cd {folder}
  pip install -e '.[test]'
  pytest                                     # the conformance kit of its kind
  ferrule plugins why {kind}:{names.entry}

Its code is in src/{names.module}/__init__.py; README.md says how it is chosen."""
