"""The Grafana board and Prometheus' configuration name only what the server exposes, and find data there under load."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from engine.client import InProcessClient
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import scripted_info
from support.tier_chunks import FakeTier
from support.tiered import Tiered, tokens
from support.toy_decoder import CONTEXT, VOCAB, ToyDecoder

MONITORING = Path(__file__).parent.parent / "monitoring"
BOARD = json.loads((MONITORING / "grafana" / "boards" / "cellserve.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(panel["title"], target, id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
KEY = "first"
START_S = 30.0

Series = dict[str, str]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Has tiers, has served, refused and been left by clients, and has begun with prefixes from the tree and a tier."""
    engine = Tiered(ToyDecoder(), FakeTier())
    info = scripted_info(max_model_len=CONTEXT, vocab_size=VOCAB, kv_cells=255, eos_token_ids=())
    client = InProcessClient(lambda progress: (engine.loop, info))
    settings = Settings(access_log=False, api_key=(SecretStr(KEY),))
    with live_server(client, settings) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        load(server)
        yield server
    engine.store.close()


def load(server: LiveServer) -> None:
    for _ in range(2):
        for first in (1, 5):
            body = {"prompt": tokens(first, 40), "max_tokens": 4, "n": 2, "seed": 1, "stream": False}
            assert server.http.post("/v1/completions", json=body).status_code == 200
        server.http.post("/reset_prefix_cache").raise_for_status()
    refused = server.http.post("/v1/completions", json={"prompt": tokens(1, 4), "max_tokens": 1, "n": 9})
    assert refused.status_code == 400, refused.text


def scrape(server: LiveServer) -> dict[str, list[Series]]:
    """Sample name -> the labels of each of its series."""
    found: dict[str, list[Series]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def filled(expression: str) -> str:
    """As Grafana fills its variables, for all models and a rate over a minute."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(metric, [(label, operator, value)]) of each selector; what is left of an expression without its other words."""
    without = re.sub(r"\[[^\]]*\]", "", expression)
    without = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", without)
    found = []
    for name, matchers in re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{[^}]*\})?(?![a-zA-Z0-9_:(]|\s*\()", without):
        if name not in ("or", "and", "unless", "bool", "offset", "vector", "le"):
            found.append((name, re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers)))
    return found


def suits(labels: Series, matchers: list[tuple[str, str, str]]) -> bool:
    checks = {
        "=": lambda value, asked: value == asked,
        "!=": lambda value, asked: value != asked,
        "=~": lambda value, asked: re.fullmatch(asked, value) is not None,
        "!~": lambda value, asked: re.fullmatch(asked, value) is None,
    }
    return all(checks[operator](labels.get(label, ""), asked) for label, operator, asked in matchers)


def test_selectors_are_found_in_an_expression() -> None:
    found = selectors('sum by (status) (rate(a:b_total{c=~"d", e!="f"}[5m])) / histogram_quantile(0.5, g_bucket) or h')
    assert found == [("a:b_total", [("c", "=~", "d"), ("e", "!=", "f")]), ("g_bucket", []), ("h", [])]


@pytest.mark.parametrize(("title", "target"), QUERIES)
def test_each_query_names_series_that_there_are(server: LiveServer, title: str, target: dict[str, Any]) -> None:
    expression = filled(target["expr"])
    found = scrape(server)
    named = selectors(expression)
    assert named, expression
    grouped = {label for part in re.findall(r"\bby\s*\(([^)]*)\)", expression) for label in part.split(",")}
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert shown <= {label.strip() for label in grouped}
    for metric, matchers in named:
        of_errors = [matcher for matcher in matchers if matcher == ("status", "=~", "5..")]
        series = [
            labels for labels in found.get(metric, ()) if suits(labels, [m for m in matchers if m not in of_errors])
        ]
        assert series, f"{title}: no series of {metric} {matchers}"
        for label in {label.strip() for label in grouped} | {label for label, _, _ in matchers}:
            assert all(label in labels for labels in series), f"{title}: {metric} has no label {label}"


def test_the_board_covers_what_an_operator_asks_for() -> None:
    text = json.dumps(BOARD)
    for metric in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:admission_rejections_total",
        "cellserve:cells_shared",
        "cellserve:method_calls_total",
        "cellserve:kv_tier_loaded_bytes_total",
        "cellserve:engine_restarts_total",
    ):
        assert metric in text


def test_panels_do_not_lie_on_one_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        squares = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert taken.isdisjoint(squares), panel["title"]
        taken |= squares
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_what_is_provisioned_fits_together() -> None:
    """The board asks the data source by its uid, that asks Prometheus by its service's name, that asks the server."""
    provisioning = MONITORING / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    services = compose()["services"]
    assert source["url"] == "http://prometheus:9090"
    [job] = prometheus_config()["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["cellserve:8000"]}]
    [boards] = yaml.safe_load((provisioning / "dashboards" / "boards.yml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    assert mounts["./monitoring/grafana/boards"] == boards["options"]["path"]
    assert mounts["./monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{boards['options']['path']}/cellserve.json"
    [config] = services["prometheus"]["configs"]
    assert config == {"source": "metrics_key", "target": job["authorization"]["credentials_file"]}


def test_the_profile_is_pinned_off_by_default_and_open_to_this_machine_alone() -> None:
    for name in ("prometheus", "grafana"):
        service = compose()["services"][name]
        assert service["profiles"] == ["monitoring"]
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def compose() -> dict[str, Any]:
    content = yaml.safe_load((MONITORING.parent / "compose.yaml").read_text())
    assert isinstance(content, dict)
    return content


def prometheus_config() -> dict[str, Any]:
    content = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert isinstance(content, dict)
    return content


# --- with Prometheus itself -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prometheus(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Scrapes the server by our configuration, but for its address, four times a second."""
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "key").write_text(KEY)
    config = prometheus_config()
    config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms"}
    [job] = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / "key")
    job["static_configs"] = [{"targets": [f"{server.host}:{server.port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False)
    try:
        up_at_s = time.monotonic() + START_S
        while not asked(http, "up == 1"):
            assert time.monotonic() < up_at_s, "prometheus does not scrape the server"
            assert process.poll() is None, "prometheus ended"
            time.sleep(0.1)
        # Rates need two scrapes, with news between them.
        scrapes = "count_over_time(up[1m]) >= 3"
        until(lambda: bool(asked(http, scrapes)))
        load(server)
        until(lambda: any(value > 0 for value in asked(http, "sum(rate(vllm:generation_tokens_total[1m]))")))
        yield http
    finally:
        http.close()
        process.terminate()
        process.wait(10)


def asked(http: httpx.Client, query: str) -> list[float]:
    """The values of an instant query; none while Prometheus is not there."""
    try:
        answer = http.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    told = answer.json()
    assert told["status"] == "success", f"{query}: {told}"
    result = told["data"]["result"]
    return [float(entry["value"][1]) for entry in result]


@pytest.mark.full
@pytest.mark.parametrize(("title", "target"), QUERIES)
def test_prometheus_answers_each_query_with_a_number(
    prometheus: httpx.Client, title: str, target: dict[str, Any]
) -> None:
    values = asked(prometheus, filled(target["expr"]))
    assert any(math.isfinite(value) for value in values), f"{title}: {target['expr']} gave {values}"


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    return found


@pytest.mark.full
def test_prometheus_own_tool_takes_the_configuration(promtool: str, tmp_path: Path) -> None:
    config = prometheus_config()
    [job] = config["scrape_configs"]
    key = tmp_path / "key"  # which it looks for
    key.write_text(KEY)
    job["authorization"]["credentials_file"] = str(key)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    checked = subprocess.run([promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.full
def test_prometheus_own_tool_finds_nothing_in_what_is_exposed_but_our_colons(promtool: str, server: LiveServer) -> None:
    """Colons are of recording rules by custom; vLLM's names, which boards read, have them."""
    told = subprocess.run(
        [promtool, "check", "metrics"], input=server.http.get("/metrics").text, capture_output=True, text=True
    )
    complaints = (told.stdout + told.stderr).splitlines()
    assert complaints, "it has nothing to say about names that have a colon"
    assert [line for line in complaints if not line.endswith("metric names should not contain ':'")] == []
