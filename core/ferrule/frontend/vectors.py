"""`Vectors`: the service's requests whose answers are vectors. They pass the same gate as those that generate."""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from contextlib import aclosing

from ferrule.api_keys import CALLER
from ferrule.config import Resolved
from ferrule.errors import EngineDead, FerruleError, RequestError, RequestFailed, UnavailableError
from ferrule.frontend.admission.admit import PromptReader
from ferrule.frontend.admission.ledger import Account, Reservation
from ferrule.frontend.admission.validate import (
    check_count,
    check_labels,
    check_pooled,
    check_task,
    scoped,
)
from ferrule.frontend.model_tokens import AllTokens
from ferrule.frontend.operations import Operations
from ferrule.hooks import HEADERS
from ferrule.interfaces.hooks import Arrival
from ferrule.interfaces.service import ChatPrompt, Pool, Pooled, Prompt, ReadPrompt, Service
from ferrule.types import Adapter, EngineRequest, FinishReason, Pooling, RequestDelta


class Vectors(Operations, Service):
    """The part of a service that computes vectors; it needs these attributes."""

    _config: Resolved
    _tokens: AllTokens

    async def pool(self, request: Pool) -> list[Pooled]:
        """See `ferrule.interfaces.service.Service.pool`."""
        arrival = time.monotonic()
        with self._telling_refusals(request.model or self.names[0], arrival):
            admitted = await self._admit_pooled(request, arrival)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._vector(one, account)) for one, account in admitted]
        except* FerruleError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _admit_pooled(self, request: Pool, arrival: float) -> list[tuple[EngineRequest, Account]]:
        """Check a request and read its prompts. Return the engine's request of each, with an account. Raises what
        `pool` raises.
        """
        self._check_available()
        check_task("embed", self.model)
        served = await self._adapters.for_vectors(request.model)
        adapter, reader = None if served is None else served.adapter, (await self._tokens.of(served)).reader
        check_count(len(request.prompts), 1, self._config.limits.max_prompts)
        priority, salt = check_labels(request.priority, request.cache_salt)
        caller = CALLER.get()
        salt = scoped(salt, caller, self._config.cache.cache_scope)
        with self.ledger.reserve(len(request.prompts)) as reservation:
            read_from = time.monotonic()
            read = [await self._read_pooled(prompt, reservation, reader) for prompt in request.prompts]
            read_at = time.monotonic()
            self._check_available()
            asked = [
                EngineRequest(
                    id=secrets.token_hex(16),
                    prompt_ids=prompt.ids,
                    work=Pooling(normalize=request.normalize),
                    arrival=arrival,
                    priority=priority,
                    adapter=adapter,
                    cache_salt=salt,
                    key_name="" if caller is None else caller.name,
                )
                for prompt in read
            ]
            told = Arrival(
                at=arrival,
                headers=HEADERS.get(),
                chat=isinstance(request.prompts[0], ChatPrompt),
                num_prompts=len(asked),
                num_choices=len(asked),
                read_from=read_from,
                rendered=read[-1].rendered_at,
                read=read_at,
                submitted=time.monotonic(),
            )
            return [(one, self._account(one, reservation, told)) for one in asked]

    async def _read_pooled(
        self, prompt: Prompt | ChatPrompt, reservation: Reservation, reader: PromptReader
    ) -> ReadPrompt:
        if isinstance(prompt, Prompt) and prompt.embeds is not None:
            raise RequestError("Vectors are computed of texts and token ids, not of prompt_embeds.", "prompt_embeds")
        read = await reader.read(prompt)
        check_pooled(read.ids, reader.rules, "messages" if isinstance(prompt, ChatPrompt) else "prompt")
        reservation.add_tokens(len(read.ids))
        return read

    def _account(self, request: EngineRequest, reservation: Reservation, arrival: Arrival) -> Account:
        prompt = len(request.prompt_ids)
        account = Account(request.arrival, prompt, 0, 1, weight=prompt, id=request.id, caller=CALLER.get())
        reservation.turn(account)
        self.ledger.loggers.hooks.request_admitted(request.id, self._title(request.adapter), prompt, None, arrival)
        return account

    def _title(self, adapter: Adapter | None) -> str:
        """Return what answers call the model, or the adapter that is used beside it."""
        return self.names[0] if adapter is None else adapter.title

    async def _vector(self, request: EngineRequest, account: Account) -> Pooled:
        last: RequestDelta | None = None
        try:
            async with aclosing(self._client.generate(request)) as stream:  # type: ignore[type-var]
                last = await anext(stream)  # there is one delta
            if last.vector is not None:
                account.cached = last.cached
                self.ledger.pooled(account)
        except EngineDead:
            raise UnavailableError("The engine is not running.") from None
        finally:
            self.ledger.settle(account, (last and last.finish) or FinishReason.ABORT, last)
        if last.vector is None:
            said = last.error or "The request ended without a vector."
            raise RequestError(said) if last.invalid else RequestFailed(said)
        vector = struct.unpack(f"<{len(last.vector) // 4}f", last.vector)
        return Pooled(vector=vector, prompt_ids=request.prompt_ids, cached_tokens=last.cached)
