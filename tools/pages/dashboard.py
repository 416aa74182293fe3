"""The Grafana dashboard: ``python -m tools.pages.dashboard --write docs/dashboards/ferrule.json``.

A table of panels becomes the file that Grafana imports. Queries name metrics of `catalog` only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_MODEL = 'model_name=~"$model", instance=~"$instance"'
_SERVER = 'instance=~"$instance"'  # what has no model: HTTP and processes


@dataclass(frozen=True)
class Panel:
    """`queries` are (expression, legend).

    In them ``M`` and ``S`` stand for the matchers of the dashboard's variables, ``R`` for the range of a rate.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    about: str = ""
    stacked: bool = False
    most: float | None = None


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({share / 100}, sum by (le) (rate({metric}_bucket{{M}}[R])))", f"p{share}")
        for share in (50, 90, 99)
    )


def _mean(metric: str) -> str:
    return f"sum(rate({metric}_sum{{M}}[R])) / sum(rate({metric}_count{{M}}[R]))"


def _spread(title: str, metric: str) -> Panel:
    query = f"sum by (le) (increase({metric}_bucket{{M}}[R]))"
    return Panel(title, ((query, "{{le}}"),), kind="heatmap", width=12)


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel("Running", (("sum(vllm:num_requests_running{M})", ""),), kind="stat", width=4),
            Panel("Waiting", (("sum(vllm:num_requests_waiting{M})", ""),), kind="stat", width=4),
            Panel("Generated", (("sum(rate(vllm:generation_tokens_total{M}[R]))", ""),), "tokens/s", "stat", 4),
            Panel(
                "First token, p95",
                (("histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{M}[R])))", ""),),
                "s",
                "stat",
                4,
            ),
            Panel("KV cache", (("max(vllm:kv_cache_usage_perc{M})", ""),), "percentunit", "gauge", 4, most=1),
            Panel(
                "HTTP 5xx",
                (('sum(rate(http_requests_total{status="5xx", S}[R])) or vector(0)', ""),),
                "reqps",
                "stat",
                4,
            ),
        ),
    ),
    (
        "Traffic",
        (
            Panel(
                "Choices finished, by reason",
                (("sum by (finished_reason) (rate(vllm:request_success_total{M}[R]))", "{{finished_reason}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "In the engine",
                (
                    ("sum(vllm:num_requests_running{M})", "running"),
                    ("sum(vllm:num_requests_waiting{M})", "waiting"),
                ),
            ),
            Panel(
                "Refused with 429, by limit",
                (("sum by (reason) (rate(vllm:admission_rejections_total{M}[R]))", "{{reason}}"),),
                "reqps",
            ),
            Panel(
                "Tool parsers",
                (
                    (
                        "sum by (mode, outcome) (rate(vllm:tool_call_parser_invocations_total{M}[R]))",
                        "{{mode}} {{outcome}}",
                    ),
                ),
                "reqps",
                width=12,
            ),
            Panel(
                "n and max_tokens of requests, mean",
                (
                    (_mean("vllm:request_params_n"), "n"),
                    (_mean("vllm:request_params_max_tokens"), "max_tokens"),
                ),
                width=12,
            ),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", _quantiles("vllm:time_to_first_token_seconds"), "s"),
            Panel("Between tokens", _quantiles("vllm:inter_token_latency_seconds"), "s"),
            Panel("End to end", _quantiles("vllm:e2e_request_latency_seconds"), "s"),
            Panel(
                "Where the time goes, mean",
                (
                    (_mean("vllm:request_queue_time_seconds"), "queue"),
                    (_mean("vllm:request_prefill_time_seconds"), "prefill"),
                    (_mean("vllm:request_decode_time_seconds"), "decode"),
                ),
                "s",
                stacked=True,
            ),
            Panel("In the queue", _quantiles("vllm:request_queue_time_seconds"), "s"),
            Panel("Per output token, of whole choices", _quantiles("vllm:request_time_per_output_token_seconds"), "s"),
        ),
    ),
    (
        "Queue and cache",
        (
            Panel(
                "KV cache in use",
                (("max by (instance, engine) (vllm:kv_cache_usage_perc{M})", "{{instance}} {{engine}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Prompt tokens found in the prefix cache",
                (
                    (
                        "sum(rate(vllm:prefix_cache_hits_total{M}[R])) / "
                        "sum(rate(vllm:prefix_cache_queries_total{M}[R]))",
                        "share",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel("Waiting, by reason", (("sum by (reason) (vllm:num_requests_waiting_by_reason{M})", "{{reason}}"),)),
            Panel("Preemptions", (("sum(rate(vllm:num_preemptions_total{M}[R]))", "preemptions"),), "ops"),
            Panel(
                "Prompt tokens, by source",
                (("sum by (source) (rate(vllm:prompt_tokens_by_source_total{M}[R]))", "{{source}}"),),
                "tokens/s",
                stacked=True,
            ),
            Panel(
                "Sleep", (("max by (sleep_state) (vllm:engine_sleep_state{M})", "{{sleep_state}}"),), kind="timeseries"
            ),
        ),
    ),
    (
        "Tokens",
        (
            Panel(
                "Throughput",
                (
                    ("sum(rate(vllm:prompt_tokens_total{M}[R]))", "prompt"),
                    ("sum(rate(vllm:generation_tokens_total{M}[R]))", "generated"),
                ),
                "tokens/s",
                width=12,
            ),
            Panel("Tokens per step", _quantiles("vllm:iteration_tokens_total"), width=12),
            _spread("Prompt lengths", "vllm:request_prompt_tokens"),
            _spread("Answer lengths", "vllm:request_generation_tokens"),
            Panel(
                "Ended by logits that were not finite",
                (("sum(increase(vllm:corrupted_requests_total{M}[R]))", "requests"),),
                width=24,
                about="Anything above zero is a fault of the model, its weights or the device.",
            ),
        ),
    ),
    (
        "HTTP",
        (
            Panel(
                "Calls, by status",
                (("sum by (status) (rate(http_requests_total{S}[R]))", "{{status}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Calls, by route",
                (("sum by (method, handler) (rate(http_requests_total{S}[R]))", "{{method}} {{handler}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "p95, by route",
                (
                    (
                        "histogram_quantile(0.95, "
                        "sum by (handler, le) (rate(http_request_duration_seconds_bucket{S}[R])))",
                        "{{handler}}",
                    ),
                ),
                "s",
            ),
            Panel(
                "All routes",
                tuple(
                    (
                        f"histogram_quantile({share / 100}, "
                        "sum by (le) (rate(http_request_duration_highr_seconds_bucket{S}[R])))",
                        f"p{share}",
                    )
                    for share in (50, 90, 99)
                ),
                "s",
                width=12,
            ),
            Panel(
                "Bytes",
                (
                    ("sum(rate(http_request_size_bytes_sum{S}[R]))", "in"),
                    ("sum(rate(http_response_size_bytes_sum{S}[R]))", "out"),
                ),
                "Bps",
                width=12,
            ),
        ),
    ),
    (
        "Processes",
        (
            Panel("CPU", (("rate(process_cpu_seconds_total{S}[R])", "{{instance}} {{process}}"),), "percentunit"),
            Panel("Memory", (("process_resident_memory_bytes{S}", "{{instance}} {{process}}"),), "bytes"),
            Panel("Open files", (("process_open_fds{S}", "{{instance}} {{process}}"),)),
            Panel("Up for", (("time() - process_start_time_seconds{S}", "{{instance}} {{process}}"),), "s", width=12),
            Panel("Settings of the cache", (("vllm:cache_config_info{M}", ""),), kind="table", width=12),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON, schema version 39 (Grafana 11 and later)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        )
        x, y = 0, y + 1
        height = 4 if title == "Now" else 8
        for panel in row:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            panels.append(_panel(panel, len(panels) + 1, {"h": height, "w": panel.width, "x": x, "y": y}))
            x += panel.width
        y += height
    return {
        "uid": "ferrule",
        "title": "Ferrule",
        "description": "An LLM server: traffic, latency, queue, cache, tokens, HTTP and processes.",
        "tags": ["llm", "ferrule", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    def labels(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values({query}, {label})", "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "hide": 0,
            "options": [],
        }

    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    running = "vllm:num_requests_running"
    return [
        {**source, "hide": 0, "includeAll": False, "multi": False, "options": []},
        labels("model", "model_name", running),
        labels("instance", "instance", running + '{model_name=~"$model"}'),
    ]


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": _unit(panel.unit), "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        fill = 30 if panel.stacked else 10
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": fill, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [_target(panel, place, query, legend) for place, (query, legend) in enumerate(panel.queries)],
    }


def _unit(unit: str) -> str:
    """Grafana writes a unit that it does not know behind the number."""
    return f"suffix: {unit}" if unit == "tokens/s" else unit


def _options(kind: str) -> dict[str, Any]:
    reduced = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    shapes: dict[str, dict[str, Any]] = {
        "timeseries": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "stat": {**reduced, "colorMode": "value", "graphMode": "area", "textMode": "auto"},
        "gauge": {**reduced, "showThresholdLabels": False, "showThresholdMarkers": True},
        "heatmap": {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5},
            "legend": {"show": True},
            "tooltip": {"mode": "single"},
            "yAxis": {"axisPlacement": "left"},
        },
        "table": {"showHeader": True},
    }
    return shapes[kind]


def _target(panel: Panel, place: int, query: str, legend: str) -> dict[str, Any]:
    now = panel.kind == "table"
    expression = query.replace("[R]", "[$__rate_interval]")
    for short, matchers in (("M", _MODEL), ("S", _SERVER)):
        expression = expression.replace(f"{{{short}}}", f"{{{matchers}}}").replace(f", {short}}}", f", {matchers}}}")
    return {
        "refId": chr(ord("A") + place),
        "datasource": _SOURCE,
        "expr": expression,
        "legendFormat": legend or "__auto",
        "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        "instant": now,
        "range": not now,
        "editorMode": "code",
    }


def main(argv: Sequence[str]) -> int:
    """Print the dashboard, or write it to the file behind --write."""
    text = json.dumps(dashboard(), indent=2) + "\n"
    match list(argv):
        case []:
            print(text, end="")
        case ["--write", file]:
            Path(file).write_text(text, encoding="utf-8")
        case _:
            print("usage: python -m tools.pages.dashboard [--write FILE]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
