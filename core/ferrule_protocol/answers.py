"""Fields of answers about the model and its tokens, in any protocol."""

from __future__ import annotations

import hashlib

import msgspec

from ferrule import __version__
from ferrule.interfaces.service import Service

_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


def fingerprint(service: Service) -> str:
    """Return a name that changes with the version, the model and how it runs."""
    digest = hashlib.sha256(msgspec.json.encode(service.model)).hexdigest()[:10]
    return f"ferrule-{__version__}-{digest}"


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, _LOWEST_LOGPROB)
