"""The metrics: one table that `/metrics`, the reference page and the tests read.

`API` is the version of the documented surface that is served. A name that was deprecated in X.Y is shown in X.Y, hidden
in X.Y+1, where `--show-hidden-metrics-for-version=X.Y` shows it again, and is to be gone in X.Y+2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from ferrule.interfaces.stats import RequestStats
from ferrule.types import EngineStats, FinishReason

API = "0.9"
HIDDEN_BUT_HERE = "0.8"  # what was deprecated then is hidden now

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_MILLISECONDS = (
    *(1.0, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0, 30.0, 50.0, 80.0, 100.0, 200.0, 300.0, 500.0, 800.0, 1000.0, 2000.0, 3000.0),
)
_STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))  # 1, 8, 16 … 16384
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_HTTP_FINE = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0),
    60.0,
)
_SIZES = tuple(float(1 << power) for power in range(6, 27, 2))  # 64 bytes … 64 MiB
_STALL = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKENS = (-1.0,)  # stands for 1, 2, 5, 10 … up to the longest context

Values = Mapping[tuple[str, ...], float]  # values of a metric's own labels → figure

STEP_TOKENS = "vllm:iteration_tokens_total"
FIRST_TOKEN = "vllm:time_to_first_token_seconds"
GAP = "vllm:inter_token_latency_seconds"
SUCCESS = "vllm:request_success_total"
TOOLS = "vllm:tool_call_parser_invocations_total"
REJECTED = "vllm:admission_rejections_total"
KEY_CHOICES = "ferrule:key_choices_total"
KEY_PROMPT = "ferrule:key_prompt_tokens_total"
KEY_GENERATION = "ferrule:key_generation_tokens_total"
CACHE_INFO = "vllm:cache_config_info"
CALLS = "http_requests_total"
DURATION = "http_request_duration_seconds"
DURATION_FINE = "http_request_duration_highr_seconds"
RECEIVED = "http_request_size_bytes"
SENT = "http_response_size_bytes"
STALL = "ferrule:event_loop_stall_seconds"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The description of one metric.

    `engine` reads it off an engine's figures, `choice` off a finished choice (None: nothing to count). `values` lists
    what the metric's own labels may be; None: series appear as they happen.
    """

    name: str
    kind: str  # gauge, counter, histogram
    doc: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] | None = ((),)
    common: tuple[str, ...] = ("model_name", "engine")
    buckets: tuple[float, ...] = ()
    engine: Callable[[EngineStats], Values] | None = None
    choice: Callable[[RequestStats], float | None] | None = None
    same_as: str = ""  # another name of the same figures
    deprecated: str = ""


def _engine(name: str, kind: str, doc: str, field: str) -> Metric:
    full = name if ":" in name else f"vllm:{name}"
    return Metric(name=full, kind=kind, doc=doc, engine=lambda stats: {(): getattr(stats, field)})


def _choice(name: str, doc: str, buckets: tuple[float, ...], read: Callable[[RequestStats], float | None]) -> Metric:
    return Metric(name=f"vllm:{name}", kind="histogram", doc=doc, buckets=buckets, choice=read)


def _of_key(name: str, doc: str) -> Metric:
    return Metric(name=name, kind="counter", doc=doc, labels=("key",), values=None, common=("model_name",))


def _alias(name: str, doc: str, metric: Metric, deprecated: str = "") -> Metric:
    return Metric(
        name=f"vllm:{name}",
        kind=metric.kind,
        doc=doc,
        buckets=metric.buckets,
        same_as=metric.name,
        deprecated=deprecated,
    )


def _milliseconds(name: str, doc: str) -> Metric:
    return Metric(
        name=f"vllm:{name}",
        kind="histogram",
        doc=doc,
        buckets=_MILLISECONDS,
        choice=lambda stats: 1e3 * stats.inference_time,
        deprecated=HIDDEN_BUT_HERE,
    )


def prompt_tokens(stats: RequestStats) -> int:
    """Return the number of the prompt's tokens, which count with the first token of the choice."""
    return stats.prompt_tokens if stats.generation_tokens else 0


def _computed_tokens(stats: RequestStats) -> int:
    return stats.prompt_tokens - stats.cached_tokens if stats.generation_tokens else 0


def _mean_gap(stats: RequestStats) -> float | None:
    return stats.decode_time / (stats.generation_tokens - 1) if stats.generation_tokens > 1 else None


def _hit_rate(stats: EngineStats) -> Values:
    return {(): stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0}


def _by_place(stats: EngineStats) -> Values:
    return {(str(place),): count for place, count in enumerate(stats.accepted_by_place)}


def _acceptance_rate(stats: EngineStats) -> Values:
    return {(): stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else 0.0}


def _efficiency(stats: EngineStats) -> Values:
    most = stats.draft_tokens + stats.drafts
    return {(): (stats.accepted_tokens + stats.drafts) / most if most else 0.0}


def _nothing(stats: EngineStats) -> Values:
    return {(): 0.0}


_USAGE = _engine("kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1.", "cache_usage")
_QUERIES = _engine(
    "prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", "prefix_queries"
)
_HITS = _engine("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", "prefix_hits")
_GAPS = Metric(name=GAP, kind="histogram", doc="Seconds between two output tokens of a choice.", buckets=_GAP)
_QUEUED = _choice(
    "request_queue_time_seconds", "Seconds that a choice waited in the queue.", _LATENCY, lambda stats: stats.queue_time
)
_SLEEP = ("awake", "weights_offloaded", "discard_all")

ENGINE = (
    _engine("num_requests_running", "gauge", "Requests that are running.", "running"),
    _engine("num_requests_waiting", "gauge", "Requests that wait in the engine's queue.", "waiting"),
    Metric(
        name="vllm:num_requests_waiting_by_reason",
        kind="gauge",
        doc="Waiting requests by reason. Deferred are those whose output is not read.",
        labels=("reason",),
        values=(("capacity",), ("deferred",)),
        engine=lambda stats: {("capacity",): stats.waiting - stats.paused, ("deferred",): stats.paused},
    ),
    Metric(
        name="vllm:engine_sleep_state",
        kind="gauge",
        doc="1 for the current sleep state of the engine, else 0.",
        labels=("sleep_state",),
        values=tuple((state,) for state in _SLEEP),
        engine=lambda stats: {(state,): float(level == stats.sleep_level) for level, state in enumerate(_SLEEP)},
    ),
    _USAGE,
    _engine("spec_decode_num_drafts_total", "counter", "Rows of steps that had guesses of next tokens.", "drafts"),
    _engine("spec_decode_num_draft_tokens_total", "counter", "Guesses of next tokens.", "draft_tokens"),
    _engine("spec_decode_num_accepted_tokens_total", "counter", "Guesses that were right.", "accepted_tokens"),
    Metric(
        name="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        kind="counter",
        doc="Guesses that were right, by their position among those of a row, from 0 on.",
        labels=("position",),
        values=None,
        engine=_by_place,
    ),
    Metric(
        name="vllm:spec_decode_num_emitted_tokens_total",
        kind="counter",
        doc="Output tokens of rows with guesses: right guesses, and one more in each row.",
        engine=lambda stats: {(): stats.accepted_tokens + stats.drafts},
    ),
    Metric(
        name="vllm:spec_decode_draft_acceptance_rate",
        kind="gauge",
        doc="Share of guesses that were right, since the start.",
        engine=_acceptance_rate,
    ),
    Metric(
        name="vllm:spec_decode_efficiency",
        kind="gauge",
        doc="Output tokens of rows with guesses, in those if all guesses had been right, since the start.",
        engine=_efficiency,
    ),
    Metric(
        name="ferrule:buffered_bytes",
        kind="gauge",
        doc="Memory, about, that API processes keep for bodies, prompts in the queue and unread output.",
        engine=lambda stats: {(): stats.buffered_bytes},
    ),
    Metric(
        name="ferrule:state_snapshots",
        kind="gauge",
        doc="Saved states of recurrent layers, at the ends of cached prefixes.",
        engine=lambda stats: {(): stats.snapshots},
    ),
    _alias("gpu_cache_usage_perc", "Former name of kv_cache_usage_perc.", _USAGE),
    Metric(
        name=CACHE_INFO,
        kind="gauge",
        doc="Settings of the KV cache as labels; the value is always 1.",
        labels=(
            *("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks"),
            *("num_gpu_blocks_override", "prefix_caching_hash_algo"),
        ),
        values=(),
    ),
    _engine("ferrule:engine_restarts_total", "counter", "Engines that were started after one had died.", "restarts"),
    _engine("num_preemptions_total", "counter", "Preemptions of requests.", "preemptions"),
    _engine("prompt_tokens_total", "counter", "Prompt tokens of choices with a first token.", "choice_prompt_tokens"),
    _engine(
        "prompt_tokens_cached_total",
        "counter",
        "Prompt tokens of choices with a first token that came from the prefix cache.",
        "choice_prompt_cached",
    ),
    Metric(
        name="vllm:prompt_tokens_by_source_total",
        kind="counter",
        doc="Prompt tokens of choices with a first token, by the source of their keys and values.",
        labels=("source",),
        values=(("local_compute",), ("local_cache_hit",), ("external_kv_transfer",)),
        engine=lambda stats: {
            ("local_compute",): stats.choice_prompt_tokens - stats.choice_prompt_cached,
            ("local_cache_hit",): stats.choice_prompt_cached,
            ("external_kv_transfer",): 0,
        },
    ),
    _engine(
        "generation_tokens_total",
        "counter",
        "Tokens generated, read or not.",
        "choice_generation_tokens",
    ),
    Metric(name=STEP_TOKENS, kind="histogram", doc="Tokens per engine step.", buckets=_STEP_TOKENS),
    _QUERIES,
    _HITS,
    _alias("gpu_prefix_cache_queries_total", "Former name of prefix_cache_queries_total.", _QUERIES),
    _alias("gpu_prefix_cache_hits_total", "Former name of prefix_cache_hits_total.", _HITS),
    _engine(
        "corrupted_requests_total", "counter", "Requests ended by logits that were not finite.", "corrupted_requests"
    ),
)

REQUESTS = (
    Metric(name=FIRST_TOKEN, kind="histogram", doc="Seconds from arrival to the first output token.", buckets=_TTFT),
    _GAPS,
    _alias("time_per_output_token_seconds", "Former name of inter_token_latency_seconds.", _GAPS),
    _choice("request_time_per_output_token_seconds", "Mean seconds per output token of a choice.", _GAP, _mean_gap),
    _choice(
        "e2e_request_latency_seconds",
        "Seconds from arrival to the last output token.",
        _LATENCY,
        lambda stats: stats.end_to_end,
    ),
    _QUEUED,
    _choice(
        "request_inference_time_seconds",
        "Seconds from admission by the engine to the last output token.",
        _LATENCY,
        lambda stats: stats.inference_time,
    ),
    _choice(
        "request_prefill_time_seconds",
        "Seconds from admission by the engine to the first output token.",
        _LATENCY,
        lambda stats: stats.prefill_time,
    ),
    _choice(
        "request_decode_time_seconds",
        "Seconds from the first to the last output token.",
        _LATENCY,
        lambda stats: stats.decode_time,
    ),
    _choice("request_prompt_tokens", "Prompt tokens per choice; 0 without a first token.", TOKENS, prompt_tokens),
    _choice("request_generation_tokens", "Generated tokens per choice.", TOKENS, lambda stats: stats.generation_tokens),
    _choice(
        "request_max_num_generation_tokens",
        "Generated tokens of the longest choice of a prompt.",
        TOKENS,
        lambda stats: stats.longest,
    ),
    _choice(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens per choice that were not in the prefix cache and had to be computed; 0 without a first token.",
        TOKENS,
        _computed_tokens,
    ),
    _choice(
        "request_params_n",
        "Parameter n of the request, per prompt.",
        _CHOICES,
        lambda stats: None if stats.longest is None else stats.n,
    ),
    _choice(
        "request_params_max_tokens",
        "Parameter max_tokens of the request, per choice.",
        TOKENS,
        lambda stats: stats.max_tokens,
    ),
    _choice(
        "request_num_preemptions", "Preemptions per choice.", (0.0, *_CHOICES), lambda stats: stats.num_preemptions
    ),
    Metric(
        name=SUCCESS,
        kind="counter",
        doc="Finished choices by finish reason.",
        labels=("finished_reason",),
        values=tuple((reason.value,) for reason in FinishReason),
    ),
    Metric(
        name=REJECTED,
        kind="counter",
        doc="Requests refused with 429 because the queue was full, by the limit that was reached.",
        labels=("reason",),
        values=(("max_num_queued_reqs",), ("max_num_queued_tokens",)),
        common=("model_name",),
    ),
    Metric(
        name=TOOLS,
        kind="counter",
        doc="Choices that were parsed for tool calls, by outcome.",
        labels=("mode", "outcome", "request_type"),
        values=tuple(product(("streaming", "non_streaming"), ("tool_call", "no_tool_call"), ("chat_completions",))),
        common=("model_name",),
    ),
    _of_key(KEY_CHOICES, "Choices that ended, by the name of the API key; there is no series without keys."),
    _of_key(KEY_PROMPT, "Prompt tokens of those of them with a first token, by the name of the API key."),
    _of_key(KEY_GENERATION, "Generated tokens of these choices, by the name of the API key."),
)

DEPRECATED = (
    Metric(
        name="vllm:num_requests_swapped",
        kind="gauge",
        doc="Requests whose KV cache was swapped to host memory: always 0, because preempted requests are recomputed.",
        engine=_nothing,
        deprecated=HIDDEN_BUT_HERE,
    ),
    Metric(
        name="vllm:cpu_cache_usage_perc",
        kind="gauge",
        doc="Usage of a KV cache in host memory: always 0, because there is no such cache.",
        engine=_nothing,
        deprecated=HIDDEN_BUT_HERE,
    ),
    Metric(
        name="vllm:gpu_prefix_cache_hit_rate",
        kind="gauge",
        doc="Ratio of prefix_cache_hits_total to prefix_cache_queries_total since start-up.",
        engine=_hit_rate,
        deprecated=HIDDEN_BUT_HERE,
    ),
    Metric(
        name="vllm:cpu_prefix_cache_hit_rate",
        kind="gauge",
        doc="Hit rate of a prefix cache in host memory: always 0, because there is no such cache.",
        engine=_nothing,
        deprecated=HIDDEN_BUT_HERE,
    ),
    _milliseconds(
        "model_execute_time_milliseconds",
        "Milliseconds from the first step of a choice to its end, including the time between its steps.",
    ),
    _milliseconds(
        "model_forward_time_milliseconds",
        "Equal to model_execute_time_milliseconds: the forward pass is not timed separately from the step.",
    ),
    _alias("time_in_queue_requests", "Former name of request_queue_time_seconds.", _QUEUED, HIDDEN_BUT_HERE),
)

HTTP = (
    Metric(
        name=CALLS,
        kind="counter",
        doc="HTTP requests by route template, method and class of status.",
        labels=("handler", "method", "status"),
        values=None,
        common=(),
    ),
    Metric(
        name=DURATION,
        kind="histogram",
        doc="Seconds per HTTP request; for a stream, to its end.",
        labels=("handler", "method"),
        values=None,
        common=(),
        buckets=_HTTP,
    ),
    Metric(
        name=DURATION_FINE,
        kind="histogram",
        doc="Seconds per HTTP request over all routes, with finer buckets.",
        common=(),
        buckets=_HTTP_FINE,
    ),
    Metric(
        name=RECEIVED,
        kind="histogram",
        doc="Bytes read from request bodies.",
        labels=("handler",),
        values=None,
        common=(),
        buckets=_SIZES,
    ),
    Metric(
        name=SENT,
        kind="histogram",
        doc="Bytes of response bodies.",
        labels=("handler",),
        values=None,
        common=(),
        buckets=_SIZES,
    ),
    Metric(
        name=STALL,
        kind="histogram",
        doc="Seconds by which an API process's event loop was late, where they were 5 ms or more.",
        common=(),
        buckets=_STALL,
    ),
)

# Name, type, labels and meaning of what the Prometheus client says of a process by itself.
PROCESS = (
    ("process_cpu_seconds_total", "counter", (), "CPU time."),
    ("process_resident_memory_bytes", "gauge", (), "Resident memory."),
    ("process_virtual_memory_bytes", "gauge", (), "Virtual memory."),
    ("process_open_fds", "gauge", (), "Open file descriptors."),
    ("process_max_fds", "gauge", (), "Highest allowed number of open file descriptors."),
    ("process_start_time_seconds", "gauge", (), "Start time of the process, in seconds since 1970."),
    ("python_info", "gauge", ("implementation", "major", "minor", "patchlevel", "version"), "Always 1."),
    ("python_gc_objects_collected_total", "counter", ("generation",), "Objects that the garbage collector freed."),
    (
        "python_gc_objects_uncollectable_total",
        "counter",
        ("generation",),
        "Objects that the garbage collector could not free.",
    ),
    ("python_gc_collections_total", "counter", ("generation",), "Number of garbage collections."),
)

# Documented names that are not exported, with the feature that each belongs to.
ABSENT = (
    ("vllm:lora_requests_info", "gauge", "LoRA adapters"),
    ("vllm:external_prefix_cache_queries_total", "counter", "transfer of caches between servers"),
    ("vllm:external_prefix_cache_hits_total", "counter", "transfer of caches between servers"),
    ("vllm:mm_cache_queries_total", "counter", "media in prompts"),
    ("vllm:mm_cache_hits_total", "counter", "media in prompts"),
)

SERVED = (*ENGINE, *REQUESTS, *DEPRECATED)


def shown(metric: Metric, for_version: str | None) -> bool:
    """Return whether a name is exported with `--show-hidden-metrics-for-version`: X.Y shows names that are hidden since
    X.Y or later, and those that were deprecated in X.Y.
    """
    if not metric.deprecated:
        return True
    major, minor = parse_version(metric.deprecated)
    hidden = (major, minor + 1)
    if parse_version(API) < hidden:
        return True
    return for_version is not None and parse_version(for_version) <= hidden


def parse_version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (0, 9) for "0.9" or "0.9.1". Raises ValueError."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
