"""The child side of guided decoding: one backend, for the vocabulary of the served model, compiles constraints."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from ferrule.forms import GrammarSpec
from ferrule.interfaces.guided_decoding import GrammarBackend, Vocabulary
from ferrule.plugin import Plugins


class Setup(Struct, frozen=True):
    """The first message to a child, which names the backend that the child runs."""

    plugins: Plugins
    backend: str
    vocabulary: Vocabulary


class CompileTask:
    """A child's task, called with a `Setup` first, then with one constraint at a time."""

    def __init__(self) -> None:
        self._backend: GrammarBackend | None = None

    def __call__(self, request: Any) -> Any:
        """Return ["data", compiled]; ["refused", reason] when this backend cannot enforce the constraint; ["wrong",
        reason].
        """
        if self._backend is None:
            setup = msgspec.convert(request, Setup)
            self._backend = setup.plugins.make("guided_decoding", setup.backend, setup.vocabulary)
            return None
        spec = msgspec.convert(request, GrammarSpec)
        try:
            if (refusal := self._backend.refuses(spec)) is not None:
                return ["refused", refusal]
            data = self._backend.compile(spec)
        except ValueError as error:
            return ["wrong", str(error)]
        from ferrule.frontend.guided.probe import probe  # numpy, which only the child needs

        try:
            fault = probe(self._backend.load(data), self._backend.vocabulary)
        except ValueError as error:
            fault = str(error)
        return ["data", data] if fault is None else ["refused", fault]
