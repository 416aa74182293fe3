"""The templates that an option means, and those that come with Ferrule: what each says of itself, and its names.

A template begins with a comment of ``key: value`` lines, which `read_header` reads:

    {#-
    about: one line, for lists
    models: whose format it is
    parser: the tool parser that reads the calls; left out by templates without tools
    also: further names, separated by commas
    format: where the format is published
    -#}
"""

from __future__ import annotations

from pathlib import Path, PurePath

from msgspec import Struct

from ferrule.errors import ConfigError, nearest

_FOLDER = Path(__file__).with_name("chat_templates")  # templates/chat of the repository, as package data
_PREFIXES = ("tool_chat_template_", "template_")  # of the files in vLLM's folder of examples
_ENDING = ".jinja"

Templates = dict[str, str]
"""Name → template text; "default" is the usual one, "tool_use" the one for requests with tools."""


def choose_templates(option: str | None, own: str | dict[str, str] | None) -> Templates:
    """Return the templates that ``--chat-template`` means: a name among the tokenizer's `own`, a file, a built-in
    template, or a text.

    Without the option these are the tokenizer's own; there may be none. Raises ConfigError.
    """
    named = {"default": own} if isinstance(own, str) else dict(own or {})
    if option is None:
        return named
    if option in named:
        return {"default": named[option]}
    inline = any(mark in option for mark in ("{{", "{%", "{#"))
    file = None if inline else Path(option) if _is_file(option) else builtin_file(option)
    if file is not None:
        try:
            return {"default": file.read_text("utf-8")}
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"--chat-template: {option} cannot be read as UTF-8 text.") from None
    if inline:  # on one line, a line break is written \n
        return {"default": option.replace("\\n", "\n")}
    names = [*named, *builtin_templates()]
    raise ConfigError(
        f"--chat-template: {option!r} is neither a file nor a known template.{nearest(option, names)}",
        f"Known names: {', '.join(names)}. A template's text must hold {{{{ or {{%.",
    )


def builtin_file(option: str) -> Path | None:
    """Return the file of the built-in template that ``--chat-template`` names; None where it names something else."""
    found = None if _is_file(option) else find_builtin(option)
    return None if found is None else found.file


def _is_file(option: str) -> bool:
    try:
        return Path(option).is_file()
    except OSError:  # too long for a file name
        return False


class BuiltinTemplate(Struct, frozen=True, kw_only=True):
    name: str
    file: Path
    about: str
    models: str
    parser: str = ""  # name of the tool parser; "" for a template without tools
    also: tuple[str, ...] = ()
    format: str = ""  # address

    @property
    def text(self) -> str:
        return self.file.read_text("utf-8")


def builtin_templates() -> dict[str, BuiltinTemplate]:
    """Return the built-in templates by name, in the order of names."""
    found = {}
    for file in sorted(_FOLDER.glob(f"*{_ENDING}")):
        header = read_header(file.read_text("utf-8"))
        also = tuple(header.pop("also", "").replace(",", " ").split())
        found[file.stem] = BuiltinTemplate(name=file.stem, file=file, also=also, **header)
    return found


def read_header(text: str) -> dict[str, str]:
    """Read the ``key: value`` lines of the comment at the beginning of a template."""
    comment = text.partition("{#-")[2].partition("-#}")[0]
    pairs = (line.partition(":") for line in comment.splitlines() if line.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def find_builtin(option: str) -> BuiltinTemplate | None:
    """Return the template of a name, or of a file's name in vLLM's documents; None without one.

    Such file names are ``[FOLDER/]tool_chat_template_NAME.jinja`` and ``[FOLDER/]template_NAME.jinja``: folder,
    beginning and ending are left out. Any other name of a file names nothing here.
    """
    templates = builtin_templates()
    name = _documented_name(option) or option
    if name in templates:
        return templates[name]
    return next((template for template in templates.values() if name in template.also), None)


def fitting(parser: str) -> list[str]:
    """Return the names of the templates whose calls a tool parser reads; `parser` may also be a further name of the
    template.
    """
    templates = builtin_templates().values()
    return [template.name for template in templates if parser and parser in (template.parser, *template.also)]


def _documented_name(option: str) -> str | None:
    file = PurePath(option).name
    for prefix in _PREFIXES:
        if file.startswith(prefix) and file.endswith(_ENDING):
            return file.removeprefix(prefix).removesuffix(_ENDING)
    return None
