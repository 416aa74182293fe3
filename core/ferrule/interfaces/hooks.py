"""`hooks`: told when something happens. Choosing one implementation by name is for the other kinds.

Derive from `Hooks` and override what you want to hear; leave out parameters that you do not need. Every process has
its own instance, made without arguments. Calls come on the thread that does the work, per request and per second at
most, so return soon and never block. A hook that raises is logged with its distribution and counted; after three
failures that plugin is not called again in that process. Third-party hooks are off until `--plugins-allow` or
FERRULE_PLUGINS names them. A class may state a literal ``only_with``, the name of an option in
`ServerSettings.observability`: then it is imported only where that option is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrule.config import ServerSettings
    from ferrule.errors import FerruleError
    from ferrule.interfaces.stats import RequestStats
    from ferrule.sampling_params import SamplingParams
    from ferrule.types import EngineStats


@dataclass(frozen=True)
class AccessRequest:
    """An HTTP call, before it is admitted. Its body has not been read. `headers` has lower-case names."""

    method: str
    path: str  # as the client sent it, without the query; it need not be the path of a route
    headers: Mapping[str, str]
    client: str = ""  # address of the peer, empty when it is not known


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrival:
    """A request on its way to the engine. All of its choices are told of with the same object.

    Instants are seconds on the machine's monotonic clock; 0.0 where a phase was left out, or is not reached.
    """

    at: float
    headers: Mapping[str, str]  # of the HTTP call, with lower-case names; offline, what the caller gives
    answer_id: str = ""  # the answer's name, as the client sees it; "" where the protocol has none
    chat: bool = False  # its prompts are conversations
    constrained: bool = False  # a grammar was compiled for its outputs, between `read` and `submitted`
    num_prompts: int = 0
    num_choices: int = 0  # that go to the engine, of all prompts
    read_from: float = 0.0  # parameters are checked: from now on prompts are rendered and tokenized
    rendered: float = 0.0  # a conversation is a text
    read: float = 0.0  # all prompts are token ids
    submitted: float = 0.0  # the choices are with the engine


class Hooks:
    """All hooks, each doing nothing. None has to be overridden: a plugin has the methods that it wants to be called."""

    def process_started(self, process: str, config: ServerSettings) -> None:
        """Note that a process has started; no model is loaded yet. `process` is its name: launcher, api-0, engine-0.

        A StartupError that is raised here stops the start.
        """

    def process_stopping(self, process: str, status: int) -> None:
        """Note that a process is about to end with this status. Not called when it is killed or dies of a fault."""

    def request_refused(self, model: str, error: FerruleError, arrival: Arrival) -> None:
        """Note that a request that was well-formed did not get to the engine (API process): a parameter or its prompt
        is wrong (RequestError), the queue is full (OverloadedError), the engine is not there (UnavailableError).
        """

    def request_admitted(
        self, request_id: str, model: str, prompt_tokens: int, params: SamplingParams | None, arrival: Arrival
    ) -> None:
        """Note that one choice of a request was handed to the engine (API process). `request_id` is ours, not the
        client's.

        `params` is None where a vector is asked for.
        """

    def request_finished(self, request_id: str, stats: RequestStats) -> None:
        """Note that a choice that was admitted has ended, for whatever reason (API process)."""

    def step_stats(self, stats: EngineStats, engine: int) -> None:
        """Take the figures of one engine, at most once a second (API process)."""

    def authorise(self, access: AccessRequest) -> bool | None:
        """Decide on a call (API process): True lets it in, False refuses it, None leaves it to the next.

        The first answer that is not None counts; when there is none, `--api-key` decides. It is not asked about the
        public probes. It fails closed: a plugin that raises here, or that is disabled after three failures, refuses.
        """
        return None

    def register_metrics(self, registry: Any) -> None:
        """Add collectors to a prometheus registry of this plugin's own (API process, once, before requests come).

        Its text follows the server's at ``/metrics``; names must not be those of the server or of another plugin.
        """

    def report_header(self, config: ServerSettings) -> Sequence[str]:
        """Return lines for the log's first screen (API process, once)."""
        return ()
