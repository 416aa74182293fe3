"""What an answer says of body fields that did nothing."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel

from ferrule.errors import nearest
from ferrule.interfaces.http import RequestInfo


class Warnings(BaseModel):
    """The field `ferrule` of answers: fields of the request that did nothing, and why."""

    warnings: list[str]

    @classmethod
    def of(cls, body: BaseModel, info: RequestInfo) -> Self | None:
        """For fields that the body's model does not declare; None when there are none."""
        names = type(body).model_fields
        found = [f"{name}: unknown, ignored.{nearest(name, names)}" for name in info.unknown_fields]
        return cls(warnings=found) if found else None
