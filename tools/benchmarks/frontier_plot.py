"""The tables of `tools.benchmarks.frontier` as a picture: a curve for each server, a point for each of its settings.

    python -m tools.benchmarks.frontier --server "A=…" --server "A, 512=…" --server "B=…" | tee tables.md
    python -m tools.benchmarks.frontier_plot < tables.md > docs/benchmarks/frontier-zen5.svg

A row's name is the server's, and behind a comma the setting's. Further left and further down is better.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

COLOURS = ("#0a7d38", "#b5361f", "#2456a6", "#8a5a00")
FEW = ("four prompts of 1,024", "documents among chats")  # of whose gaps too few are long for a p99
TICKS = (30, 50, 100, 200, 500, 1000, 2000, 5000, 20000, 50000)  # milliseconds
SIDES = (14, -7, 26, -19, 38, -31, 50, -43)  # how far below its point a label's line may be, in the order of preference
LETTER, LINE = 6.0, 11  # a letter's width, and the height of a line
WIDTH, HEIGHT = 242, 174  # of a plot's area
COLUMN, ROW = 360, 250  # from one plot to the next


class Point(NamedTuple):
    setting: str
    gap: float  # milliseconds
    first: float  # seconds


def tables(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, list[Point]]]]:
    """Each workload with the points of its servers."""
    title, servers = "", defaultdict[str, list[Point]](list)
    for line in (*map(str.strip, lines), "end"):
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if line and not line.startswith("|"):
            if servers:
                yield title, dict(servers)
            title, servers = line.strip("*# "), defaultdict(list)
        elif len(cells) == 8 and cells[1][:1].isdigit():
            name, _, setting = cells[0].partition(", ")
            gap = cells[6 if title in FEW else 5].replace(",", "")
            servers[name].append(Point(setting or "default", float(gap), float(cells[2])))


def steps(most: float) -> Iterator[float]:
    """From 0 to `most`, in three to six even steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most))
    size = next(part * power for part in (0.2, 0.5, 1, 2) if most / (part * power) < 6)
    yield from (number * size for number in range(int(most / size) + 1))


def place(at: float, up: float, text: str, taken: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Where a point's label is beside none of those that are there; `taken` are their beginnings, ends and lines."""
    begin, end = at + 6, at + 6 + LETTER * len(text)
    for side in SIDES:
        if all(end < left or right < begin or abs(up + side - line) >= LINE for left, right, line in taken):
            break
    taken.append((begin, end, up + side))
    return begin, up + side


def plot(title: str, servers: Mapping[str, Sequence[Point]], left: float, top: float) -> Iterator[str]:
    """The elements of one plot: gaps to the right, on a logarithmic scale, first tokens upwards."""
    points = [point for each in servers.values() for point in each]
    low, high = min(point.gap for point in points) / 1.5, max(point.gap for point in points) * 1.8
    most, bottom = 1.15 * max(point.first for point in points), top + HEIGHT

    def x(gap: float) -> float:
        return left + WIDTH * math.log(gap / low) / math.log(high / low)

    def y(first: float) -> float:
        return bottom - HEIGHT * first / most

    what = "longest gap" if title in FEW else "p99 of gaps"
    yield f'<text x="{left + WIDTH / 2}" y="{top - 16}" text-anchor="middle" font-weight="bold">{title}</text>'
    yield f'<path d="M{left} {top}V{bottom}H{left + WIDTH}" fill="none" stroke="#444"/>'
    for tick in (each for each in TICKS if low <= each <= high):
        yield f'<path d="M{x(tick):.1f} {bottom}v4" stroke="#444"/>'
        yield f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,}</text>'
    for first in steps(most):
        yield f'<path d="M{left} {y(first):.1f}h-4" stroke="#444"/>'
        yield f'<text x="{left - 7}" y="{y(first) + 4:.1f}" text-anchor="end">{first:g}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{bottom + 32}" text-anchor="middle">{what}, ms</text>'
    middle = f"translate({left - 34} {top + HEIGHT / 2}) rotate(-90)"
    yield f'<text transform="{middle}" text-anchor="middle">first token, p50, s</text>'
    taken = [(x(point.gap) - 4, x(point.gap) + 4, y(point.first) + 4) for point in points]
    taken += [(left, left + WIDTH, bottom + down) for down in (6, 16)]  # the axis and its numbers
    for colour, each in zip(COLOURS, servers.values(), strict=False):
        curve = sorted(each, key=lambda point: point.gap)
        path = " ".join(f"{x(point.gap):.1f},{y(point.first):.1f}" for point in curve)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}"/>'
        for point in curve:
            at, up = x(point.gap), y(point.first)
            yield f'<circle cx="{at:.1f}" cy="{up:.1f}" r="3.5" fill="{colour}"/>'
            right, line = place(at, up, point.setting, taken)
            yield f'<text x="{right:.1f}" y="{line:.1f}" fill="{colour}">{point.setting}</text>'


def picture(workloads: Sequence[tuple[str, Mapping[str, Sequence[Point]]]]) -> Iterator[str]:
    """The lines of an SVG file: two plots in a row, and whose the colours are."""
    height = ROW * -(-len(workloads) // 2) + 24
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * COLUMN} {height}" font-family="sans-serif" '
    yield f'{head}font-size="11">'
    yield '<rect width="100%" height="100%" fill="white"/>'
    for number, (title, servers) in enumerate(workloads):
        yield from plot(title, servers, 48 + COLUMN * (number % 2), 34 + ROW * (number // 2))
    names = dict.fromkeys(name for _, servers in workloads for name in servers)
    for number, (colour, name) in enumerate(zip(COLOURS, names, strict=False)):
        yield f'<text x="{48 + 120 * number}" y="{height - 8}" font-weight="bold" fill="{colour}">{name}</text>'
    yield "</svg>"


def main() -> None:
    print("\n".join(picture(list(tables(sys.stdin)))))


if __name__ == "__main__":
    main()
