"""The files of deploy/ and the Dockerfile are valid for their programs, and agree with the server."""

import json
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from jsonschema import Draft202012Validator

from infer.cli.subcommands import infer
from infer.serving.server.app import ROUTES
from infer.serving.server.server_settings import ServerSettings

ROOT = Path(__file__).parents[3]
SCHEMAS = ROOT / "tests" / "data"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "infer.service").read_text(encoding="utf-8")
PATHS = {route.path for route in ROUTES}


@cache
def manifest(kind: str) -> Any:
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8"))
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def options_of(command: str) -> dict[str, click.Parameter]:
    return {name: option for option in infer.commands[command].params for name in option.opts}


def server_flags(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def instructions(name: str) -> list[str]:
    """Return the arguments of a Dockerfile's instruction, lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


@pytest.mark.parametrize("kind", ["Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_the_manifest_has_the_fields_of_kubernetes_and_no_others(kind: str) -> None:
    components = json.loads((SCHEMAS / "kubernetes-schemas.json").read_text(encoding="utf-8"))["components"]
    Draft202012Validator({"$ref": f"#/components/schemas/{kind}", "components": components}).validate(manifest(kind))


def test_the_manifest_fits_the_server() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    port = container["ports"][0]
    assert port["containerPort"] == ServerSettings().port
    assert manifest("Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert manifest("Service")["spec"]["selector"] == manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    for probe in (container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")):
        assert probe["httpGet"]["path"] in PATHS
        assert min(probe["timeoutSeconds"], probe["failureThreshold"]) >= 3
    assert set(server_flags(container["args"])) <= options_of("serve").keys()
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > wait + ServerSettings().drain_seconds


def test_the_pods_are_reached_at_their_port_alone_and_leave_one_at_a_time() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    port = manifest("Deployment")["spec"]["template"]["spec"]["containers"][0]["ports"][0]
    policy, budget = manifest("NetworkPolicy")["spec"], manifest("PodDisruptionBudget")["spec"]
    assert policy["podSelector"] == budget["selector"] == {"matchLabels": labels}
    assert [each["ports"] for each in policy["ingress"]] == [[{"port": port["name"]}]]
    assert (set(policy["policyTypes"]), policy["egress"]) == ({"Ingress", "Egress"}, [])
    assert budget["maxUnavailable"] == 1


def test_a_container_has_no_rights() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    user, security = pod["securityContext"], pod["containers"][0]["securityContext"]
    assert (user["runAsNonRoot"], security["allowPrivilegeEscalation"]) == (True, False)
    assert (security["readOnlyRootFilesystem"], security["capabilities"]) == (True, {"drop": ["ALL"]})
    assert instructions("USER") == [f"{user['runAsUser']}:{user['runAsGroup']}"]
    (service,) = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_compose_fits_the_server() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    (service,) = content["services"].values()
    assert set(server_flags(service["command"])) <= options_of("serve").keys()
    assert float(service["stop_grace_period"].removesuffix("s")) > ServerSettings().drain_seconds
    assert set(service["secrets"]) == content["secrets"].keys()
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
    assert named == content["volumes"].keys()


def test_the_image_starts_the_server_and_asks_for_its_health() -> None:
    (entrypoint,) = map(json.loads, instructions("ENTRYPOINT"))
    assert entrypoint[:2] == ["infer", "serve"]
    assert set(server_flags(entrypoint)) <= options_of("serve").keys()
    port = entrypoint[entrypoint.index("--port") + 1]
    assert instructions("EXPOSE") == [port]
    (check,) = instructions("HEALTHCHECK")
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert (url[0], url[1] in PATHS) == (port, True)
    compile(json.loads(check[check.index("CMD ") + 4 :])[2], "HEALTHCHECK", "exec")


def test_the_image_has_the_torch_of_the_package_and_every_file_it_copies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = [each for each in project["dependencies"] if each.startswith("torch")]
    assert f'TORCH="{torch}"' in instructions("ARG")
    copied = [name for line in instructions("COPY") if "--from" not in line for name in line.split()[:-1]]
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [name for name in copied if not (ROOT / name).exists() or f"!{name}" not in kept] == []
    assert project["readme"] in copied
    extras = re.search(r'"\.\[(.*)\]"', DOCKERFILE)
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()


def test_the_unit_fits_the_server() -> None:
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    assert set(server_flags(start.split())) <= options_of("serve").keys()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert float(stop) > ServerSettings().drain_seconds


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("hardware: no systemd on this machine")
    unit = tmp_path / "infer.service"
    unit.write_text(UNIT.replace("/opt/infer/bin/infer", "/bin/true"))
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
