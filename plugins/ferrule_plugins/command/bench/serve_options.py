"""Options of `ferrule bench serve`, with the names and meanings of the documented `bench serve`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ferrule.config.option import opt
from ferrule.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
_GOALS = ("ttft", "tpot", "e2el")
_ROUTES = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_IDS = "prompts are token ids, or the server counts their tokens, so that no tokenizer is needed"


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """Options of the load on a running server."""

    base_url: str = opt("", "URL of the server. Default: http://HOST:PORT.", common=True)
    host: str = opt("127.0.0.1", "Host of the server.")
    port: int = opt(8000, "Port of the server.", ge=1, le=65535)
    backend: str = opt(
        "openai",
        "API to call: completions with token ids (openai, vllm), or chat completions.",
        choices=tuple(_ROUTES),
        aliases=("--endpoint-type",),
        common=True,
    )
    endpoint: str = opt("", "Route of the API. Default: that of --backend.")
    model: str | None = opt(None, "Model name. Default: the first of /v1/models.", common=True)
    served_model_name: str | None = opt(None, "Model name to send in requests, if it differs from --model.")
    api_key: str | None = opt(None, "Key to send.", secret=True)
    header: tuple[str, ...] = opt((), "NAME=VALUE, headers to send.", nargs="+")
    extra_body: dict[str, Any] = opt({}, "Additional JSON fields of each request.", json=True)
    temperature: float = opt(0.0, "Sampling temperature.", ge=0)
    ignore_eos: bool = opt(True, "Continue after the end-of-sequence token, so that outputs have the requested length.")
    num_prompts: int = opt(100, "Requests to send.", ge=1, common=True)
    request_rate: float | None = opt(
        None,
        "Arrivals per second. Default, and inf or 0: as fast as the concurrency allows.",
        ge=0,
        opens=("inf",),
        common=True,
    )
    burstiness: float = opt(1.0, "Shape of the gamma-distributed gaps: 1 Poisson, below 1 in bursts.", gt=0)
    max_concurrency: int | None = opt(
        None, "Highest number of requests in flight. Default: no limit.", ge=1, common=True
    )
    dataset_name: str = opt(
        "random",
        "Source of the prompts: random token ids, or a file. sharegpt: a JSON list of conversations; the first turn is "
        "the prompt, the second says how long the answer is. custom: JSONL with a prompt in each row.",
        choices=("random", "sharegpt", "custom"),
    )
    dataset_path: str = opt("", "File with the prompts of --dataset-name sharegpt or custom.")
    disable_shuffle: bool = opt(False, "Take the prompts of a file in its order.")
    no_oversample: bool = opt(False, "Send fewer requests if a file has fewer prompts, instead of repeating some.")
    sharegpt_output_len: int | None = opt(None, "Output tokens. Default: as many as the second turn has.", ge=1)
    custom_output_len: int = opt(256, "Output tokens of requests of --dataset-name custom.", ge=1)
    custom_skip_chat_template: bool = opt(False, "Send prompts of --dataset-name custom as they are to completions.")
    random_input_len: int = opt(128, "Prompt tokens.", ge=1, common=True)
    random_output_len: int = opt(128, "Output tokens.", ge=1, common=True)
    random_range_ratio: float = opt(
        0.0,
        "Relative spread of input and output lengths: 0.5 means from half to one and a half times the length.",
        ge=0,
        le=1,
    )
    random_prefix_len: int = opt(0, "Length of a prefix that all prompts share, added to the input length.", ge=0)
    min_token_id: int = opt(100, "Lowest id in random prompts.", ge=0)
    max_token_id: int = opt(1000, "Ids in random prompts are below this.", ge=1)
    num_warmups: int = opt(1, "Warm-up requests, which are not measured.", ge=0)
    seed: int = opt(0, "Seed of prompts and arrivals.")
    percentile_metrics: str = opt(",".join(METRICS), "Times to report, separated by commas: ttft, tpot, itl, e2el.")
    metric_percentiles: str = opt("50,90,99", "Percentiles to report, separated by commas.")
    goodput: tuple[str, ...] = opt(
        (),
        "NAME:MS pairs: also report requests per second that keep these limits (ms). Names: ttft, tpot, e2el.",
        nargs="+",
    )
    checkpoint: str | None = opt(
        None, "Folder of the served model, to compute shares of the machine's limits. Default: root in /v1/models."
    )
    output_json: str | None = opt(None, "File to which the figures are written, as JSON.", common=True)
    save_result: bool = opt(False, "Write the figures and the settings to a new file.", common=True)
    result_dir: str = opt(".", "Folder of the file that --save-result writes.")
    result_filename: str = opt(
        "", "Name of the file that --save-result writes. Default: made from model, rate and date."
    )
    metadata: tuple[str, ...] = opt((), "NAME=VALUE pairs to add to the file that --save-result writes.", nargs="+")
    tokenizer: str | None = opt(None, "A tokenizer.", inert=_IDS)
    tokenizer_mode: str = opt("auto", "Kind of tokenizer.", inert=_IDS)
    skip_tokenizer_init: bool = opt(False, "Load none.", inert=_IDS)
    trust_remote_code: bool = opt(False, "Allow Python code of the tokenizer.", inert=_IDS)
    disable_tqdm: bool = opt(False, "Do not show a progress bar.", inert="there is none")

    def check(self) -> None:
        """Raise ConfigError for a value, or a combination of options, that cannot be used."""
        if unknown := [name for name in self.shown if name not in METRICS]:
            raise ConfigError(f"--percentile-metrics: {unknown[0]!r} is none of {', '.join(METRICS)}.")
        if not self.percentiles or not all(0 <= q <= 100 for q in self.percentiles):
            raise ConfigError("--metric-percentiles takes numbers from 0 to 100, with commas between them.")
        if self.endpoint and not self.endpoint.startswith("/"):
            raise ConfigError(f"--endpoint {self.endpoint!r} is not a path.", f"For example {_ROUTES[self.backend]}.")
        if not self.save_result and (self.result_filename or self.metadata or self.result_dir != "."):
            raise ConfigError("--result-filename, --result-dir and --metadata need --save-result.")
        if self.save_result and self.output_json:
            raise ConfigError("--save-result and --output-json name two files.", "Give one of them.")
        _pairs("--metadata", self.metadata)
        _pairs("--header", self.header)
        self._check_dataset()
        _ = self.goals

    def _check_dataset(self) -> None:
        name = self.dataset_name
        if (name == "random") == bool(self.dataset_path):
            raise ConfigError("--dataset-path is the file of --dataset-name sharegpt or custom: they go together.")
        if self.sharegpt_output_len is not None and name != "sharegpt":
            raise ConfigError("--sharegpt-output-len needs --dataset-name sharegpt.")

    @property
    def goals(self) -> dict[str, float]:
        """The largest allowed time in milliseconds, by name. Raises ConfigError."""
        found = {}
        for word in self.goodput:
            name, _, value = word.partition(":")
            if name not in _GOALS:
                raise ConfigError(
                    f"--goodput: {name!r} is none of {', '.join(_GOALS)}.", "For example ttft:200 tpot:50."
                )
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if not 0 <= found[name] < math.inf:
                raise ConfigError(f"--goodput: {word!r} has no number of milliseconds behind the colon.")
        return found

    @property
    def chats(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def route(self) -> str:
        return self.endpoint or _ROUTES[self.backend]

    @property
    def shown(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to show; empty when one of the words is not a number."""
        try:
            return tuple(float(number) for number in self.metric_percentiles.split(","))
        except ValueError:
            return ()

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | _pairs("--header", self.header)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of every request, beside the model, the prompt and its length."""
        return {
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
        }

    def told(self, model: str) -> dict[str, Any]:
        """Return the options of the run, under the names that scripts look for."""
        return {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "backend": self.backend,
            "model_id": model,
            "num_prompts": self.num_prompts,
            "request_rate": self.request_rate or "inf",
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
            **_pairs("--metadata", self.metadata),
        }

    def file(self, model: str) -> str | None:
        """Return the path to which the figures are written, or None. Makes the folder of a saved result."""
        if not self.save_result:
            return self.output_json
        folder = Path(self.result_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rate = f"{self.request_rate:g}" if self.request_rate else "inf"
        many = f"-concurrency{self.max_concurrency}" if self.max_concurrency else ""
        name = re.sub(r"[^\w.-]", "_", model.rsplit("/", 1)[-1])
        date = datetime.now().strftime("%Y%m%d-%H%M%S")
        return str(folder / (self.result_filename or f"{self.backend}-{rate}qps{many}-{name}-{date}.json"))


def _pairs(option: str, words: tuple[str, ...]) -> dict[str, str]:
    """Return the values of NAME=VALUE words by name. Raises ConfigError."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ConfigError(f"{option}: {word!r} is not NAME=VALUE.")
        found[name] = value
    return found
