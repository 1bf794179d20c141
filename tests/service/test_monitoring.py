"""The monitoring files: a real Prometheus takes them, finds the daemon, and answers what the dashboard asks."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tierkv
from tests.servers.process import free_port, mortal
from tests.service.daemon import PATIENCE_S, ROOT, SPEC, TIERS, Daemon, chain, eventually, read_back, running, store
from tierkv.service.tokens import TokenFile

CONFIGS = ROOT / "configs"
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
LABELS = dict(re.findall(r"^\| `(tierkv_\w+)` \| \w+ \| `?(\w*)`? ?\|", DOCUMENT, re.MULTILINE))
DASHBOARD = json.loads((CONFIGS / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ANNOTATIONS = [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
ALERTS = yaml.safe_load((CONFIGS / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="checked with a real Prometheus (apt install prometheus)",
)


def test_the_files_name_metrics_and_labels_that_exist() -> None:
    for query in [*QUERIES, *ANNOTATIONS, *(alert["expr"] for alert in ALERTS)]:
        names = set(re.findall(r"tierkv_\w+", query))
        assert names <= LABELS.keys(), query
        known = {LABELS[name] for name in names} | {"", "instance", "job"}
        labels = re.findall(r"by \((\w+)\)|[{,](\w+)=", query)
        assert {label for pair in labels for label in pair} <= known, query


def test_legends_name_labels_that_are_there() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], panel["title"]


def test_the_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@needs_prometheus
def test_prometheus_takes_the_configuration() -> None:
    command = ["promtool", "check", "config", str(CONFIGS / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


class Prometheus:
    """A Prometheus with the configuration of the repository, but another target and a shorter interval."""

    def __init__(self, directory: Path, daemon: Daemon, token: str) -> None:
        config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
        config["global"]["scrape_interval"] = "200ms"
        (directory / "token").write_text(token)
        job = config["scrape_configs"][0]
        job["static_configs"][0]["targets"] = [f"127.0.0.1:{daemon.tcp_port}"]
        job["authorization"] = {"credentials_file": str(directory / "token")}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(CONFIGS / "prometheus-alerts.yml", directory)
        self.address = f"127.0.0.1:{free_port()}"
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                mortal(
                    [
                        "prometheus",
                        f"--config.file={directory / 'prometheus.yml'}",
                        f"--storage.tsdb.path={directory / 'data'}",
                        f"--web.listen-address={self.address}",
                    ]
                ),
                stdout=log,
                stderr=log,
            )

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query; none while Prometheus starts."""
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return []
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        except urllib.error.URLError:
            assert self.process.poll() is None, self.log.read_text()
            return []
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, query: str) -> float | None:
        samples = self.ask(query)
        return float(samples[0]["value"][1]) if samples else None


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Prometheus]]:
    with running(TIERS) as daemon:
        daemon.stop()
        token = TokenFile(daemon.state_dir).create("watch", "operator")
        daemon.start()
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), daemon, token)
        try:
            with tierkv.connect(daemon.url, tenant="chat", token=token) as cache:
                cache.register(SPEC)
                for blocks in (4, 5, 6):
                    store(cache, chain(blocks))
                    read_back(cache, chain(blocks + 2))
                cache.flush()
            yield daemon, prometheus
        finally:
            prometheus.process.kill()
            prometheus.process.wait()


@needs_prometheus
def test_prometheus_finds_the_daemon_and_knows_its_numbers(watched: tuple[Daemon, Prometheus]) -> None:
    _, prometheus = watched
    eventually(lambda: prometheus.value('up{job="tierkv"}') == 1)
    requested = (6 + 7 + 8) * 16
    eventually(lambda: prometheus.value("tierkv_requested_tokens_total") == requested)
    hit = prometheus.value("sum(tierkv_hit_tokens_total) / sum(tierkv_requested_tokens_total)")
    assert hit == pytest.approx((4 + 5 + 6) / (6 + 7 + 8))


@needs_prometheus
def test_prometheus_answers_what_the_dashboard_asks(watched: tuple[Daemon, Prometheus]) -> None:
    """All queries are understood, and all but those about what has never happened have an answer."""
    _, prometheus = watched
    eventually(lambda: (prometheus.value("count_over_time(tierkv_uptime_seconds[1m])") or 0) > 1)
    values = {"$instance": ".*", "$__rate_interval": "1m", "$__range": "1m", "$__interval": "1m"}
    for query in QUERIES + ANNOTATIONS:
        asked = query
        for name, value in values.items():
            asked = asked.replace(name, value)
        if not prometheus.ask(asked) and query in QUERIES:
            assert not all(prometheus.ask(metric) for metric in re.findall(r"tierkv_\w+", query)), query


@needs_prometheus
def test_no_alert_is_raised_for_nothing(watched: tuple[Daemon, Prometheus]) -> None:
    _, prometheus = watched
    eventually(lambda: prometheus.value("tierkv_uptime_seconds") is not None)
    for alert in ALERTS:
        assert prometheus.ask(alert["expr"]) == [], alert["alert"]
