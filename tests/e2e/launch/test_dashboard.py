"""The dashboard asks for what a server shows, and the files around it bring both together."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ferrule_testkit import server as servers
from tools import ROOT

FOLDER = ROOT / "docs" / "dashboards"
FILE = FOLDER / "ferrule.json"
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


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_the_containers_are_given_the_files_and_find_each_other() -> None:
    services = read("compose.yaml")["services"]
    mounts = [mount.split(":") for service in services.values() for mount in service["volumes"]]
    files = {source: target for source, target, *_ in mounts if source.startswith(".")}
    assert all((FOLDER / source).is_file() for source in files)
    (source,) = read("grafana/datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]
    (provider,) = read("grafana/dashboards.yaml")["providers"]
    assert files["./ferrule.json"] == f"{provider['options']['path']}/ferrule.json"
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == files["./ferrule.json"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus")
def test_every_panel_has_data_in_prometheus(tiny_llama: Path, tmp_path: Path) -> None:
    """Run the real Prometheus with the file that the containers are given, but for the address and the interval."""
    args = [str(tiny_llama), *servers.WITHOUT_MODEL, "--served-model-name", "tiny"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        config = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
        config = config.replace("host.docker.internal:8000", server.url.removeprefix("http://"))
        (tmp_path / "prometheus.yml").write_text(config.replace("5s", "1s"), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        with (tmp_path / "prometheus.log").open("w") as log:
            prometheus = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log, stdout=log)
        try:
            check_panels(server, f"http://{address}/api/v1/query")
        finally:
            prometheus.terminate()
            prometheus.wait(60)


def check_panels(server: servers.Server, api: str) -> None:
    """Keep the server busy until each expression has a value; Prometheus needs to have scraped twice for a rate."""
    values = {"$model": ".*", "$instance": ".*", "$__rate_interval": "20s"}
    asked = [re.sub(r"\$\w+", lambda match: values[match[0]], expression) for expression, _ in expressions()]

    def empty() -> list[str]:
        with ThreadPoolExecutor(4) as pool:
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
            for _ in pool.map(lambda _: httpx.post(f"{server.url}/v1/completions", json=body, timeout=240), range(20)):
                pass
        found = {}
        for expression in asked:
            try:
                answer = httpx.get(api, params={"query": expression}, timeout=60).json()
            except httpx.ConnectError:  # it is still starting
                time.sleep(0.2)
                return asked
            assert answer["status"] == "success", (expression, answer)
            found[expression] = answer["data"]["result"]
        return [expression for expression, result in found.items() if not result]

    assert servers.until(lambda: not empty()), empty()
