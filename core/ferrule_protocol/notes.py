"""Fields of a request that have no effect: the warnings about them, with the reasons. None is ignored in silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pydantic import BaseModel
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from ferrule import log
from ferrule.errors import RequestError, nearest
from ferrule.frontend.text.messages import ChatMessage, TemplateFields, other_keys
from ferrule.interfaces.service import Service
from ferrule.schema import known_names, printable

_logger = log.get("protocol")
_MAX_NAME = 64  # characters of an unknown name that are repeated
_NONE: Mapping[str, Collection[str]] = MappingProxyType({})
MAX_NOTES = 16  # fields of one sort that an answer names
NOTES_HEADER = "x-ferrule-ignored-fields"


class Extension(TypedDict):
    """The part of an answer that a protocol's own shapes have no place for.

    `warnings` are about fields of the request that had no effect, with the reasons.
    """

    warnings: list[str]


@dataclass
class Notes:
    """The fields of one request that have no effect, each with the reason."""

    known: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, unknown_fields: Sequence[str], body: type[BaseModel]) -> Notes:
        """Return the notes on any body: the fields that its type does not know."""
        return cls(unknown=_unknown(unknown_fields, body) if unknown_fields else [])

    @property
    def extension(self) -> Extension | None:
        """The extension of the answer; None when there is nothing to report."""
        told = (*self.unknown, *self.known)
        return {"warnings": [f"{name}: {why}" for name, why in told]} if told else None

    @property
    def headers(self) -> dict[str, str]:
        """The header about known fields; the frame sets a header of the same name for the unknown ones."""
        return {NOTES_HEADER: ", ".join(name for name, _ in self.known)} if self.known else {}

    def settle(self, strict: bool) -> None:
        """Log the known fields, or refuse them when the server is strict."""
        if self.known and strict:
            name, why = self.known[0]
            raise RequestError(f"{name}: {why} This server refuses fields without effect.", name)
        if self.known:
            _logger.warning("fields without effect", fields=",".join(name for name, _ in self.known))


def extended(extension: Extension | None, warnings: Sequence[str]) -> Extension | None:
    """Return the extension with more warnings; None when there is nothing to report."""
    told = [*(extension["warnings"] if extension is not None else ()), *warnings]
    return {"warnings": told} if told else None


def _unknown(paths: Sequence[str], body: type[BaseModel]) -> list[tuple[str, str]]:
    shown = [path[:_MAX_NAME] for path in paths[:MAX_NOTES]]
    names = known_names(body)  # the first time this takes some 30 ms
    return [(path, f"unknown, ignored.{nearest(path.rpartition('.')[2], names)}") for path in shown]


def unread_by_template(
    messages: Sequence[Mapping[str, object]],
    fields: TemplateFields,
    service: Service,
    shows_tools: bool = True,
    others: Mapping[str, Collection[str]] = _NONE,
) -> list[tuple[str, str]]:
    """Name the parts of a conversation and its variables that the server's template does not read, where that is known.

    `shows_tools` tells whether the template was to show the tools; `others` has further fields that only templates
    read, each with the names of the variables that it sets.
    """
    if fields.chat_template is not None:
        return []
    notes = _unread_keys(messages, service.template_keys)
    reads = service.template_reads
    if reads is None:
        return notes
    notes += [
        (name, "the chat template does not show them to the model.")
        for name in ("tools", "documents")
        if getattr(fields, name) and name not in reads and (shows_tools or name != "tools")
    ]
    notes += [(name, "the chat template does not read it.") for name, sets in others.items() if not reads & {*sets}]
    if idle := sorted(set(fields.chat_template_kwargs or ()) - reads):
        names = ", ".join(repr(name[:_MAX_NAME]) for name in idle[:MAX_NOTES])
        notes.append(("chat_template_kwargs", f"the chat template does not read {names}."))
    return notes


def _unread_keys(messages: Sequence[Mapping[str, object]], read: frozenset[str] | None) -> list[tuple[str, str]]:
    """Name the keys of messages that are not documented and that the server's template does not read, as far as is
    known.
    """
    notes = []
    for number, message in enumerate(messages):
        for key in other_keys(message) - (read or frozenset()):
            meant = nearest(key[:_MAX_NAME], ChatMessage.model_fields)
            notes.append((printable(f"messages[{number}].{key}"), f"the chat template does not read it.{meant}"))
            if len(notes) == MAX_NOTES:
                return notes
    return notes
