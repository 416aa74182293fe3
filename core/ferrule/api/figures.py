"""Figures of HTTP itself, in Prometheus' text format. Labels come from closed sets: no client can make a series."""

from __future__ import annotations

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
NO_ROUTE = "none"


class HttpFigures:
    """Requests by route template, method and status class; durations by route template."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        self._durations: dict[str, list[float]] = {}  # route → counts per bucket, then count and sum

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one exchange. `route` is a template of ours or NO_ROUTE; `status` 499 means that the client left."""
        key = (route, method if method in _METHODS else "OTHER", f"{status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        cells = self._durations.setdefault(route, [0.0] * (len(_BUCKETS) + 2))
        for place, bound in enumerate(_BUCKETS):
            cells[place] += seconds <= bound
        cells[-2] += 1
        cells[-1] += seconds

    def exposition(self) -> str:
        """Text to append to the engine's figures."""
        lines = [
            "# HELP http_requests_total HTTP requests by route, method and class of status.",
            "# TYPE http_requests_total counter",
        ]
        for (route, method, status), count in sorted(self._requests.items()):
            lines.append(f'http_requests_total{{handler="{route}",method="{method}",status="{status}"}} {count}')
        name = "http_request_duration_seconds"
        lines += [f"# HELP {name} Duration of HTTP requests, streams to their end.", f"# TYPE {name} histogram"]
        for route, cells in sorted(self._durations.items()):
            for bound, cell in zip(_BUCKETS, cells, strict=False):
                lines.append(f'{name}_bucket{{handler="{route}",le="{bound}"}} {cell:.0f}')
            lines.append(f'{name}_bucket{{handler="{route}",le="+Inf"}} {cells[-2]:.0f}')
            lines.append(f'{name}_count{{handler="{route}"}} {cells[-2]:.0f}')
            lines.append(f'{name}_sum{{handler="{route}"}} {cells[-1]:.6f}')
        return "\n".join(lines) + "\n"
