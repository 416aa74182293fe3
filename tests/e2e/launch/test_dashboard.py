"""The dashboard asks for what a server shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ferrule_testkit import server as servers
from tools import ROOT

FILE = ROOT / "docs" / "dashboards" / "ferrule.json"
OF_PROMETHEUS = {"instance", "job"}  # labels that the scrape adds
WORDS = {
    *("sum", "max", "by", "rate", "increase", "histogram_quantile", "vector", "or", "time", "le"),
    *("__rate_interval", "model", "instance"),
}


@pytest.fixture(scope="module")
def shown(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name → labels of every sample, of a server with two API processes."""
    args = [str(tiny_llama), *servers.WITHOUT_MODEL, "-asc", "2"]
    with servers.running(args, tmp_path_factory.mktemp("dashboard") / "log", {"OMP_NUM_THREADS": "1"}) as server:
        text = httpx.get(f"{server.url}/metrics", timeout=240).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    return list(json.loads(FILE.read_text(encoding="utf-8"))["panels"])


def expressions() -> list[tuple[str, str]]:
    return [(target["expr"], target["legendFormat"]) for panel in panels() for target in panel.get("targets", ())]


def test_every_name_and_label_is_served(shown: dict[str, set[str]]) -> None:
    assert len(expressions()) > 40
    for expression, legend in expressions():
        names = set(re.findall(r"\b(?:vllm:|http_|process_)\w+", expression))
        assert names, expression
        assert names <= set(shown), f"{names - set(shown)} in {expression}"
        labels = set(re.findall(r"(\w+)=~?\"", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            labels |= set(group.replace(" ", "").split(","))
        labels |= set(re.findall(r"{{(\w+)}}", legend))
        for name in names:
            assert labels <= shown[name] | OF_PROMETHEUS | {"le"}, f"{labels - shown[name]} in {expression}"
        rest = set(re.findall(r"[a-z_]\w*", re.sub(r"\"[^\"]*\"|\b(?:vllm:|http_|process_)\w+", "", expression)))
        assert rest <= WORDS | labels, rest - WORDS - labels
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]"))


def test_variables_ask_for_labels_that_are_there(shown: dict[str, set[str]]) -> None:
    variables = json.loads(FILE.read_text(encoding="utf-8"))["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "model", "instance"]
    for variable in variables[1:]:
        asked = re.fullmatch(r"label_values\(([\w:]+)(?:{.*})?, (\w+)\)", variable["query"]["query"])
        assert asked is not None
        assert asked[2] in shown[asked[1]] | OF_PROMETHEUS


def test_panels_fit_and_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        place = panel["gridPos"]
        covers = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covers & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= covers
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
    titles = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert titles == ["Now", "Traffic", "Latency", "Queue and cache", "Tokens", "HTTP", "Processes"]
