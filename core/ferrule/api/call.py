"""One call as the layers around the application know it. Each layer finds the call in the scope and adds its
findings.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ferrule.api.budget import Claim
from ferrule.api.intake import Intake, Message, Receive
from ferrule.api.lifecycle import Exchange
from ferrule.api.paths import Entry
from ferrule.api.respond import Responder, Send
from ferrule.api_keys import Caller

CALL = "ferrule.call"  # key of the ASGI scope

Scope = Message
App = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]  # as ASGI's, and a coroutine: it can be a task


@dataclass(slots=True)
class HttpCall:
    """One HTTP call. `CallerCheck` sets `entry` and `caller` once the caller is authorised and the route is found."""

    path: str  # as it came, without the server's root
    headers: dict[str, str]
    methods: Mapping[str, Entry]  # of the path
    exchange: Exchange
    claim: Claim
    intake: Intake
    answer: Responder
    entry: Entry = field(init=False)
    template: str = "none"  # the path of the route, for figures
    caller: Caller | None = None


def call_of(scope: Mapping[str, Any]) -> HttpCall:
    """Return the call of a scope that has passed `Limits`."""
    call: HttpCall = scope[CALL]
    return call
