"""The files under deploy/, each read by the tool it is for where that is installed; and all of them by rowmill."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from yamllint import linter
from yamllint.config import YamlLintConfig

from rowmill.cli import app
from rowmill.engine.processes.child import MARGIN
from rowmill.otel import _Meter
from rowmill.prometheus import RunCounters

DEPLOY = Path(__file__).parents[2] / "deploy"
ROOT = DEPLOY.parent
COMPOSE = ROOT / "docker-compose.yml"
YAML = [*sorted(DEPLOY.rglob("*.yaml")), COMPOSE]
RULES = YamlLintConfig("extends: default\nrules: {line-length: {max: 140}, document-start: disable}")
GAUGES = {
    "rowmill_up", "rowmill_rows", "rowmill_oldest_ready_seconds", "rowmill_held_keys", "rowmill_workers",
    "rowmill_gate_wait_seconds", "rowmill_stuck_seconds", "rowmill_budget_used", "rowmill_budget_limit",
}  # fmt: skip


def tool(name: str, *words: str) -> str:
    """What a tool says; a machine without it leaves this test out."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    ended = subprocess.run([name, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def documents(name: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all((DEPLOY / name).read_text()) if found]


def words_of(line: str) -> list[str]:
    return shlex.split(line.partition("rowmill ")[2] if "rowmill " in line else line)


def commands() -> dict[str, list[str]]:
    """How each file starts a worker."""
    (unit,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "rowmill.service").read_text(), re.MULTILINE)
    (image,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    fly = tomllib.loads((DEPLOY / "fly.toml").read_text())
    worker = documents("kubernetes/worker.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    return {
        "systemd": words_of(unit), "container": json.loads(image), "fly": words_of(fly["processes"]["worker"]),
        "kubernetes": worker["args"],
    }  # fmt: skip


@pytest.mark.parametrize("where", ["systemd", "container", "fly", "kubernetes"])
def test_every_file_starts_a_worker_with_options_that_there_are(where: str) -> None:
    """X2: and waits for longer than the worker needs to end in good order."""
    verb, *words = commands()[where]
    group: Any = typer.main.get_command(app)
    context = group.commands[verb].make_context(verb, list(words))
    assert context.params["metrics_port"] == 9100
    pod = documents("kubernetes/worker.yaml")[0]["spec"]["template"]["spec"]
    patience = {
        "systemd": re.findall(r"TimeoutStopSec=(\d+)", (DEPLOY / "rowmill.service").read_text())[0],
        "fly": tomllib.loads((DEPLOY / "fly.toml").read_text())["kill_timeout"].rstrip("s"),
        "kubernetes": pod["terminationGracePeriodSeconds"],
    }  # fmt: skip
    if where in patience:
        assert float(patience[where]) > context.params["grace"] + MARGIN


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    """X2: nothing in it is misspelled or unknown."""
    unit = (DEPLOY / "rowmill.service").read_text()
    path = tmp_path / "rowmill.service"
    path.write_text(unit.replace("/srv/shop/.venv/bin/rowmill", sys.executable))
    said = tool("systemd-analyze", "verify", str(path))
    assert "rowmill.service" not in said, said


def test_the_alert_rules_fire_when_they_should() -> None:
    """E8: promtool reads them, and plays their tests."""
    tool("promtool", "check", "rules", str(DEPLOY / "prometheus/rules.yaml"))
    tool("promtool", "test", "rules", str(DEPLOY / "prometheus/rules_test.yaml"))


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_every_yaml_file_is_tidy(path: Path) -> None:
    """E8: yamllint has nothing to say."""
    found = list(linter.run(path.read_text(), RULES))
    assert not found, [str(problem) for problem in found]


@pytest.mark.parametrize("name", ["kubernetes/worker.yaml", "kubernetes/hpa.yaml"])
def test_kubernetes_would_take_every_object(name: str) -> None:
    """X2: by the schema of a version that people run, strictly: no field that does not exist."""
    for document in documents(name):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_what_scales_and_what_is_scaled_go_together() -> None:
    """E8: a mistyped name would scale nothing, silently."""
    worker, service = documents("kubernetes/worker.yaml")
    labels = worker["spec"]["template"]["metadata"]["labels"]
    assert worker["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    for name in ("kubernetes/keda.yaml", "kubernetes/hpa.yaml"):
        (scaler,) = documents(name)
        assert scaler["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    (keda,) = documents("kubernetes/keda.yaml")
    assert keda["kind"] == "ScaledObject"
    assert keda["spec"]["triggers"][0]["metadata"]["threshold"].isdigit()


def test_every_metric_that_a_file_names_is_one_that_rowmill_has() -> None:
    """E8: in alert rules, on the dashboard, and where workers are scaled."""
    registry = CollectorRegistry()
    RunCounters(registry)
    known = set(GAUGES)
    for family in registry.collect():
        endings = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("_total",)
        known |= {family.name + ending for ending in endings}
    named: dict[str, set[str]] = {}
    for path in [*YAML, DEPLOY / "grafana/rowmill.json"]:
        text = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
        named[path.name] = set(re.findall(r"\browmill_[a-z_]+", text))
    assert {name: found - known for name, found in named.items() if found - known} == {}
    assert named["rowmill.json"] >= GAUGES | {"rowmill_outcomes_total", "rowmill_run_seconds_bucket"}
    assert "rowmill_oldest_ready_seconds" in named["keda.yaml"] & named["hpa.yaml"]


def test_the_dashboard_for_opentelemetry_asks_for_what_is_measured() -> None:
    """Issue 25, point 3: names as a collector writes them into Prometheus."""
    reader = InMemoryMetricReader()
    meter = _Meter(MeterProvider([reader]))
    instruments = {instrument.name for instrument in [meter._consumed, meter._duration, meter._outcomes, meter._dead]}
    known = {name.replace(".", "_") for name in instruments | {each.name for each in meter._counted.values()}}
    asked = set(re.findall(r"\b((?:rowmill|messaging)_[a-z_]+)\{", (DEPLOY / "grafana/rowmill-otel.json").read_text()))
    assert {re.sub(r"(_seconds_(bucket|count|sum)|_total)$", "", name) for name in asked} == known
    meter._provider.shutdown()


@pytest.mark.parametrize("name", ["rowmill.json", "rowmill-otel.json"])
def test_the_dashboard_is_one_that_grafana_can_read(name: str, tmp_path: Path) -> None:
    """E8: every panel has a place of its own and a question that Prometheus can read."""
    dashboard = json.loads((DEPLOY / "grafana" / name).read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    if shutil.which("promtool"):
        for variable, value in (("$__rate_interval", "5m"), ("$environment", ".*"), ("$lane", ".*")):
            asked = [text.replace(variable, value) for text in asked]
        rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(asked)]
        path = tmp_path / "panels.yaml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
        tool("promtool", "check", "rules", str(path))


def test_the_container_runs_as_nobody_in_particular() -> None:
    """X2: a numbered user, and a worker that gets the signals itself."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("FROM ")
    assert "USER 10001" in lines
    assert json.loads(lines[-2].removeprefix("ENTRYPOINT ")) == ["rowmill"]
    spec = documents("kubernetes/worker.yaml")[0]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == 10001


# -- the five applications: docker-compose.yml, deploy/apps.Dockerfile, .env.example

APPS = {"analysis", "enrichment", "ocr", "prices", "registre"}
#: What the two files may use of the specification of Compose: a misspelled key would be ignored, or refused on site.
KEYS = {"build", "command", "depends_on", "entrypoint", "env_file", "environment", "healthcheck", "image", "ports",
        "profiles", "restart", "shm_size", "stop_grace_period", "volumes"}  # fmt: skip
CONDITIONS = {"service_healthy", "service_completed_successfully"}


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def settings_of_apps() -> set[str]:
    """Every environment variable that an application or rowmill reads."""
    from apps.analysis.settings import Settings as Analysis
    from apps.enrichment.settings import Settings as Enrichment
    from apps.ocr.settings import Settings as Ocr
    from apps.prices.settings import Settings as Prices
    from apps.registre import settings as registre
    from apps.registre.sites import COMPANIES, LAND, RIGHTS

    known = {"ROWMILL_DATABASE_URL", "ROWMILL_APP", "ENVIRONMENTS", "ENV_FILE", "STORAGE_URL", "SENTRY_DSN"}
    known |= {f"ANALYSIS_{field.name.upper()}" for field in dataclasses.fields(Analysis)}
    known |= {f"ENRICHMENT_{field.name.upper()}" for field in dataclasses.fields(Enrichment)}
    known |= {field.metadata["variable"] for field in dataclasses.fields(Ocr)}
    known |= {field.name.upper() for field in dataclasses.fields(Prices)}
    known |= {*registre.DEFAULTS, *registre.ENVIRONMENTS.values()}
    return known | {f"{site.prefix}_{end}" for site in (LAND, COMPANIES, RIGHTS) for end in ("URL", "USER", "PASSWORD")}


def test_every_application_has_a_service_that_is_set_up_before_it_starts() -> None:
    """X2, X3: keys that Compose has, volumes and services that are declared, and time to stop in order."""
    given = compose()
    services = given["services"]
    assert {service["build"]["args"]["APP"] for service in services.values() if "build" in service} == APPS
    for name, service in services.items():
        assert set(service) <= KEYS, name
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] in CONDITIONS
            assert other in services
            if profiles := set(services[other].get("profiles", ())):
                assert set(service["profiles"]) <= profiles, f"{name} needs {other}, which its profile leaves out"
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in given["volumes"]
        if service.get("restart") != "no" and "build" in service:
            (before,) = service["depends_on"]
            assert services[before]["restart"] == "no", "a set-up that ends"
            assert float(service["stop_grace_period"].rstrip("s")) > 30 + MARGIN
    assert services["prices"]["environment"]["CACHE_DIR"] == "/var/cache/prices"


def test_every_path_module_command_and_variable_of_the_containers_exists() -> None:
    """X3: as far as can be told without a Docker engine."""
    image = (DEPLOY / "apps.Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", image, re.MULTILINE):
        assert all((ROOT / path).exists() for path in line.split()), line
    assert set(re.findall(r"[a-z]+", re.search(r"APP is (.*?)\.", image)[1])) - {"or"} == APPS  # type: ignore[index]
    directories = re.search(r"install --directory --owner 10001 (.*)", image)[1].split()  # type: ignore[index]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "apps" in project["dependency-groups"]
    (extras,) = re.findall(r"'\.\[(.*)\]'", image)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    group: Any = typer.main.get_command(app)
    default = json.loads(re.findall(r"^CMD (\[.*\])$", image, re.MULTILINE)[0])
    known = settings_of_apps()
    for name, service in compose()["services"].items():
        if "build" not in service:
            continue
        assert (ROOT / service["build"]["dockerfile"]).exists()
        assert set(service["environment"]) <= known, name
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[2] in directories
        match service.get("entrypoint", ["rowmill"]):
            case ["rowmill"]:
                verb, *words = service.get("command", default)
                group.commands[verb].make_context(verb, list(words))
            case ["python", "-m", module, *words]:
                assert importlib.util.find_spec(f"{module}.__main__"), name
                assert words in (["run"], ["setup", service["build"]["args"]["APP"]])
            case ["uvicorn", *words]:
                reference = next(word for word in words if ":" in word)
                assert importlib.util.find_spec(reference.partition(":")[0]), name
            case other:
                raise AssertionError(other)
    example = re.findall(r"^([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert set(example) - known == {"POSTGRES_PASSWORD"}
    interpolated = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE.read_text()))
    assert interpolated <= set(example)
