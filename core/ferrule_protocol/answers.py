"""What answers say of the model and its tokens, whatever their form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ferrule import __version__
from ferrule.errors import RequestError
from ferrule.interfaces.service import Service

_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


def name_in_answers(service: Service, model: str | None) -> str:
    """Return what answers call the model: the first of its names, whichever was asked for. Raises NotFoundError."""
    name = service.resolve(model)
    return service.names[0] if name in service.names else name


def fingerprint(service: Service) -> str:
    """Return a name that changes with the version, the model and how it runs."""
    digest = hashlib.sha256(msgspec.json.encode(service.model)).hexdigest()[:10]
    return f"ferrule-{__version__}-{digest}"


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, _LOWEST_LOGPROB)


@contextmanager
def constraint_named(field: str | None) -> Iterator[None]:
    """Name the field that stated a constraint in its refusals: the service knows it as structured_outputs."""
    try:
        yield
    except RequestError as error:
        if error.param == "structured_outputs":
            error.param = field or error.param
        raise
