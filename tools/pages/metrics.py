"""The reference page of metrics."""

from __future__ import annotations

from collections.abc import Iterable

from ferrule_plugins.stat_logger import catalog
from ferrule_plugins.stat_logger.catalog import Metric

_HEAD = f"""# Metrics

`GET /metrics` answers in Prometheus' text format. The names are those that vLLM's dashboards and autoscalers know, of
the documents' version {catalog.API} and of newer ones; where a name has changed, both are there. A
[Grafana dashboard](../dashboards/index.md) shows them. `python -m tools.pages` writes this page from
the table that the server itself reads.

Figures count *choices*: a request with two prompts and `n = 3` has six. Labels come from closed sets: `model_name` is
the first served name, `engine` the engine's number, `handler` a route template or `none`; nothing that a client sends
makes a series. Series whose labels are known are there from the first scrape, at zero. With `--disable-log-stats` there
are no `vllm:*` names.

With `--api-server-count` above one, whichever process is scraped shows the sum over all of them, and the engine's
figures once; the engine's are at most a second old. The `process_*` figures then have the label `process`, and the
`python_gc_*` figures are left out.
"""

_HIDDEN = f"""
## Deprecated names

A name that is deprecated in X.Y of the documents is still shown in X.Y, hidden in X.Y+1 and gone in X.Y+2.
`--show-hidden-metrics-for-version=X.Y` shows again what was deprecated in X.Y or is hidden since X.Y or later: with
`0.8` or `0.9` all of these. X.Y is the documents' version; this server serves that of {catalog.API}.

| name | type | deprecated | hidden | gone | meaning |
|---|---|---|---|---|---|
"""

_ABSENT = """
## Documented names that are not here

Nothing would be true of them. Each comes with its feature.

| name | type | feature |
|---|---|---|
"""

_TITLES = (
    ("The engine", catalog.ENGINE),
    ("Requests", catalog.REQUESTS),
    ("HTTP", catalog.HTTP),
)


def page() -> str:
    parts = [_HEAD]
    for title, metrics in _TITLES:
        parts.append(f"\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n")
        parts += [_row(metric) for metric in metrics]
    parts.append("\n## The process\n\n| name | type | labels | meaning |\n|---|---|---|---|\n")
    for name, kind, labels, doc in catalog.PROCESS:
        parts.append(f"| `{name}` | {kind} | {_labels(labels)} | {doc} |\n")
    parts.append("\n## Buckets\n\n| histogram | upper bounds |\n|---|---|\n")
    every = [metric for _, metrics in _TITLES for metric in metrics if metric.kind == "histogram"]
    by_bounds: dict[tuple[float, ...], list[str]] = {}
    for metric in (*every, *(metric for metric in catalog.DEPRECATED if metric.kind == "histogram")):
        by_bounds.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    for bounds, names in by_bounds.items():
        shown = (
            "1, 2, 5, 10, 20, 50 … up to the longest context"
            if bounds is catalog.TOKENS
            else ", ".join(f"{bound:.10g}" for bound in bounds)
        )
        parts.append(f"| {', '.join(names)} | {shown} |\n")
    parts.append(_HIDDEN)
    for metric in catalog.DEPRECATED:
        major, minor = catalog.parse_version(metric.deprecated)
        life = f"{metric.deprecated} | {major}.{minor + 1} | {major}.{minor + 2}"
        parts.append(f"| `{metric.name}` | {metric.kind} | {life} | {metric.doc} |\n")
    parts.append(_ABSENT)
    parts += [f"| `{name}` | {kind} | {feature} |\n" for name, kind, feature in catalog.ABSENT]
    return "".join(parts)


def _row(metric: Metric) -> str:
    doc = metric.doc
    if metric.values and metric.labels:
        options = [sorted({values[place] for values in metric.values}) for place in range(len(metric.labels))]
        shown = (f"`{label}`: {', '.join(found)}" for label, found in zip(metric.labels, options, strict=True))
        doc += " " + "; ".join(shown) + "."
    if metric.same_as:
        doc += f" Now: `{metric.same_as}`."
    return f"| `{metric.name}` | {metric.kind} | {_labels((*metric.common, *metric.labels))} | {doc} |\n"


def _labels(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels) or "–"
