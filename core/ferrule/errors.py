"""The exception tree, all of it.

    FerruleError
    ├── StartupError            one readable block on stderr, exit status 1
    │   ├── ConfigError         a flag, file key or environment variable is wrong: exit status 2
    │   ├── PluginError         a plugin that was asked for cannot be used
    │   └── CheckpointError     a model folder or weight file is wrong or cannot be obtained
    ├── RequestError            ends one request with a 4xx; the message is fit for the client
    │   ├── NotFoundError       404
    │   ├── ForbiddenError      403
    │   ├── UnauthorisedError   401
    │   ├── TooLargeError       413
    │   ├── MethodError         405, with the methods that are allowed
    │   ├── TooSlowError        408
    │   ├── HeadersTooLargeError 431
    │   └── OverloadedError     429
    ├── UnavailableError        503: starting, draining, engine dead
    │   └── AsleepError         the model's weights are needed, and it sleeps
    ├── RequestFailed           an admitted request ended with a server error (500, or an in-stream event)
    └── EngineDead              fatal: the process exits, non-zero

Messages of request errors never contain another exception's text, a path, an address, or
another tenant's data.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Self

from ferrule.alike import alike


class FerruleError(Exception):
    """Base of all errors that Ferrule raises on purpose."""


class StartupError(FerruleError):
    """A failure that stops the start. `hint` says what to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ConfigError(StartupError):
    """An error in a flag, a key of the configuration file or an environment variable."""


class PluginError(StartupError):
    """A failure of a plugin that the user named: it is missing, broken, ambiguous or denied."""


class CheckpointError(StartupError):
    """A fault of a model folder, its configuration or a weight file, which is missing, damaged or does not fit the
    model.
    """


class RequestError(FerruleError):
    """An error that is the client's fault. `param` names the field; `status` is the HTTP status."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def about(self, param: str | None) -> Self:
        """Return a copy of this error with another name of the field, also where the message begins with it. This error
        stays as it is: several requests may have it.
        """
        made = copy(self)
        if param and self.param and self.message.startswith(f"{self.param} "):
            made.message = param + self.message[len(self.param) :]
        made.param = param
        return made


class NotFoundError(RequestError):
    status = 404
    kind = "NotFoundError"


class ForbiddenError(RequestError):
    status = 403
    kind = "ForbiddenError"


class UnauthorisedError(RequestError):
    status = 401
    kind = "AuthenticationError"


class TooLargeError(RequestError):
    status = 413
    kind = "RequestTooLargeError"


class MethodError(RequestError):
    """A method that the path does not have. `allow` are those that it has."""

    status = 405
    kind = "MethodNotAllowedError"

    def __init__(self, message: str, allow: Iterable[str]) -> None:
        super().__init__(message)
        self.allow = tuple(allow)


class TooSlowError(RequestError):
    status = 408
    kind = "RequestTimeoutError"


class HeadersTooLargeError(RequestError):
    status = 431
    kind = "RequestHeaderFieldsTooLargeError"


class OverloadedError(RequestError):
    """A refusal because of too many requests. `retry_after` is in seconds."""

    status = 429
    kind = "RateLimitError"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(FerruleError):
    """A refusal while the server cannot take work. `retry_after` is in seconds."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class AsleepError(UnavailableError):
    """A failure because the model's weights are not there now."""


class RequestFailed(FerruleError):
    """A server error that ended an admitted request."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineDead(FerruleError):
    """The death of the engine or one of its workers. The first cause is kept."""


class StepTooLarge(EngineDead):
    """A step's failure to get the memory that it needs. The step may be computed again for fewer requests."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest choice, or an empty string."""
    match = alike(name, choices, most=1)
    return f" Did you mean '{match[0]}'?" if match else ""


def exit_status(error: BaseException) -> int:
    """Return the status of a process that this error ends: 2 where the command line or a setting is wrong, else 1."""
    return 2 if isinstance(error, ConfigError) else 1
