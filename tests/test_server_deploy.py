"""What the documentation says about deploying the service is valid, and speaks of what there is."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from click.testing import CliRunner

from cachemgr.cli import cli
from cachemgr.cli.serve import PORT
from cachemgr.settings import TABLE
from tests.pods import ROOT, documents
from tests.serving import SECRETS, local_replica, report_of, started

DEPLOY = ROOT / "docs" / "deploy"
SERVICE = documents(DEPLOY / "service.yaml")


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_the_manifests_are_valid(version: str) -> None:
    kinds = sorted(kind for kind, _name in SERVICE)
    assert kinds == ["CronJob", "Deployment", "Service", "ServiceMonitor"]
    for (kind, _name), document in SERVICE.items():
        if kind != "ServiceMonitor":  # of an operator, whose schema Kubernetes does not have
            kubernetes_validate.validate(document, version, strict=True)


def _pods() -> list[dict[str, Any]]:
    deployment = SERVICE["Deployment", "cachemgr-api"]["spec"]["template"]["spec"]
    job = SERVICE["CronJob", "cachemgr-prune"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return [deployment, job]


@pytest.mark.parametrize("pod", _pods(), ids=["Deployment", "CronJob"])
def test_pods_are_confined_and_say_what_the_command_line_knows(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    known = {setting.variable for setting in TABLE}
    ours = {each["name"] for each in container["env"] if each["name"].startswith("CACHEMGR_")}
    assert ours <= known
    command, *words = container["args"]
    listed = CliRunner().invoke(cli, [command, "--help"]).output
    assert [word for word in words if word.startswith("--") and word not in listed] == []


def test_probes_and_ports_are_those_of_the_server() -> None:
    (container,) = _pods()[0]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} == {
        "/readyz",
        "/healthz",
    }
    service = SERVICE["Service", "cachemgr-api"]
    monitor = SERVICE["ServiceMonitor", "cachemgr-api"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["endpoints"]] == [each["name"] for each in service["spec"]["ports"]]


def test_every_metric_of_the_dashboard_is_told(tmp_path: Path) -> None:
    one = local_replica(tmp_path)
    launch = started("one", phases={"publish": 2.0, "run": 1.0}, published="sha256:" + "1" * 64, errors={"x": 1})
    one.ask("POST", "/v1/launches", json=report_of(launch))
    one.get("/v1/artifacts")
    app: Any = one.client
    text = app.get("/metrics", headers={"Authorization": f"Bearer {SECRETS['admin']}"}).text
    one.backend.catalogue.close()
    told = set(re.findall(r"^(cachemgr_\w+?)(?:\{| )", text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"cachemgr_\w+", target["expr"])
    }
    assert len(asked) > 10
    assert asked <= told
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    unit = DEPLOY / "cachemgr.service"
    sections = re.findall(r"^\[(\w+)\]$", unit.read_text(), re.MULTILINE)
    assert sections == ["Unit", "Service", "Install"]
    assert f"--port {PORT}" in unit.read_text()
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace("/opt/cachemgr/bin/cachemgr", "/bin/true"))
    done = subprocess.run([analyze, "verify", str(here)], capture_output=True, text=True, check=False)
    assert (done.returncode, unit.name in done.stderr) == (0, False), done.stderr
