"""The files of deploy/, the Dockerfile, docs/server and `/openapi.json` are valid, and describe the server as it is."""

import json
import re
import shutil
import subprocess
import textwrap
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
import yaml
from jsonschema import Draft202012Validator

from infer import LLM
from infer.cli.commands.server_commands import client_lines
from infer.cli.subcommands import infer
from infer.serving.distributed.front import ShelfFront
from infer.serving.distributed.shelf import Shelf
from infer.serving.protocols import api_errors, bodies, events
from infer.serving.protocols.openai import ask
from infer.serving.server.app import ROUTES
from infer.serving.server.routes import protocols
from infer.serving.server.routes.openapi import document
from infer.serving.server_settings import ServerSettings
from openai_shapes import events as events_of
from parameter_tables import row_of_flag
from served import Served, serving

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
    known = {"--interval", "--timeout", "--start-period", "--retries"}  # to buildah of Debian 12, too
    assert {word.partition("=")[0] for word in server_flags(check.split())} <= known
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


# The pages of docs/server. A failing test prints the missing row


DOCS = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "server").glob("*.md")))


def rows(beginning: str) -> set[str]:
    return {line for line in DOCS.splitlines() if line.startswith(f"| `{beginning}")}


def test_every_flag_is_documented_as_in_its_help() -> None:
    options = [option for option in infer.commands["serve"].params if isinstance(option, click.Option)]
    expected = {row_of_flag(option) for option in options if not option.hidden}
    found = rows("--")
    assert expected - found == set(), "\n".join(sorted(expected - found))
    assert found - expected == set()


def test_the_lines_for_other_programs_are_those_that_the_server_prints() -> None:
    told = (ROOT / "docs" / "how-to" / "clients.md").read_text(encoding="utf-8")
    for program, line in client_lines("http://127.0.0.1:8000", "smollm2", has_keys=False):
        assert f"| {program} | `{line}` |" in told, program


def test_every_metric_is_documented_with_its_kind(served: Served) -> None:
    served.client.post("/v1/completions", json={"model": "tiny", "prompt": [5, 6], "max_tokens": 2})
    text = served.client.get("/metrics").text
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    expected = {f"| `{name}` | {kinds[name]} | {told} |" for name, told in helps.items()}
    found = rows("infer:") | rows("infer_") | rows("process_")
    assert expected - found == set(), "\n".join(sorted(expected - found))
    assert found - expected == set()


def test_the_dashboard_asks_for_metrics_and_labels_that_the_server_has(served: Served) -> None:
    served.client.post("/v1/completions", json={"model": "tiny", "prompt": [5, 6], "max_tokens": 2})
    served.client.post("/v1/completions", json={"prompt": [5], "temperature": -1})
    text = served.client.get("/metrics").text
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in expressions:
        for name in re.findall(r"\b(?:infer:|process_)[a-z_]+", expression):
            kind = "histogram" if name.endswith("_bucket") else ""
            assert f"# TYPE {name.removesuffix('_bucket')} {kind}" in text, expression
            for label in set(re.findall(r"by \((\w+)\)", expression)) - {"le"}:
                assert re.search(rf'^{name}{{.*\b{label}="', text, re.MULTILINE), expression


def test_every_route_is_documented() -> None:
    told = set(re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", DOCS))
    routes = [*ROUTES, *ShelfFront(Mock(Shelf, models={})).table]
    assert {(method, _plain(path)) for method, path in told} == {(each.method, _plain(each.path)) for each in routes}


def _plain(path: str) -> str:
    """Return the path with every variable under one name."""
    return re.sub(r"{[^}]*}", "{}", path)


def test_every_setting_is_a_flag_or_documented_with_its_value() -> None:
    # --served-model-name, --api-key-file
    by_other_names = {"model", "aliases", "api_keys"}
    set_by_itself = {"is_child", "max_slots", "model_path"}
    flags = {option.name for option in infer.commands["serve"].params} | by_other_names | set_by_itself
    table = (ROOT / "docs" / "server" / "flags.md").read_text(encoding="utf-8").partition("## What has no flag")[2]
    told = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]*) \|", table, re.MULTILINE))
    assert told == {field.name: str(field.default) for field in fields(ServerSettings) if field.name not in flags}


# `/openapi.json` and `/docs`


DOCUMENT = document(ROUTES)
MESSAGES = [{"role": "user", "content": "hello"}]
SERVED = {"allow_embeddings": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": ["a", "b"], "logprobs": 2, "echo": True},
    "/v1/responses": {"input": [{"role": "user", "content": "hello"}], "store": True},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3, "tools": []},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "stream": False, "logprobs": True, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 3}},
    "/api/embed": {"input": ["a", "b"]},
    "/completion": {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1},
    "/v1/trace": {"prompt": "a", "max_tokens": 2, "logit_bias": {"98": -100}},
    "/v1/branch": {"prompt": "a", "answer_token_ids": [97], "position": 1},
    "/tokenize": {"content": "hé", "with_pieces": True},
    "/detokenize": {"tokens": [97]},
    "/apply-template": {"messages": MESSAGES},
}


def validator(pointer: str) -> Draft202012Validator:
    return Draft202012Validator({**DOCUMENT, "$ref": f"#{pointer}"})


def body_of(path: str) -> Draft202012Validator:
    return validator(f"/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema")


def answer_of(path: str, method: str, status: int) -> Draft202012Validator:
    place = path.replace("~", "~0").replace("/", "~1")
    return validator(f"/paths/{place}/{method}/responses/{status}/content/application~1json/schema")


def test_every_route_is_described_with_its_summary_and_its_answer() -> None:
    paths = DOCUMENT["paths"]
    described = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert described == {(each.method, each.path.replace(":path", "")) for each in ROUTES}
    for each in ROUTES:
        operation = paths[each.path.replace(":path", "")][each.method.lower()]
        assert each.summary
        assert operation["summary"] == each.summary
        assert ("security" in operation) == each.is_open, each.path
        assert ("requestBody" in operation) == (each.method == "POST"), each.path
        assert operation["responses"]["200"]["content"], each.path


def test_every_name_in_it_is_there() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT))) <= set(schemas)
    assert all(name.isidentifier() for name in schemas)  # two Structs of one name would have their modules' names
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_and_answers_are_as_described(served: Served, path: str) -> None:
    body = body_of(path)
    for asked in (BODIES[path], BODIES[path] | {"unknown": 1}):
        body.validate(asked)
        answer_of(path, "post", 200).validate(served.ask(path, **asked))
    wrong = BODIES[path] | {next(iter(BODIES[path])): {"not": "this"}}
    assert not body.is_valid(wrong)
    refused = served.client.post(path, json=wrong)
    assert refused.status_code == 400
    answer_of(path, "post", 400).validate(refused.json())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/ready"])
def test_answers_are_as_described(served: Served, path: str) -> None:
    answer_of(path, "get", 200).validate(served.client.get(path).json())


def test_the_document_and_its_page_are_served_without_a_key(served: Served) -> None:
    assert served.client.get("/openapi.json").json() == DOCUMENT
    page = served.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|<script|javascript:|@import", page.text)
    for each in ROUTES:
        assert f"<b>{each.method} {each.path.replace(':path', '')}</b>" in page.text
    targets = set(re.findall(r'href="#([^"]*)"', page.text))
    assert targets <= set(re.findall(r'id="([^"]*)"', page.text))


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": None, "text": "a"}, {"type": "text", "text": 1}])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_part_of_a_message_has_its_type(served: Served, part: Any, role: str) -> None:
    error = served.refusal("/apply-template", messages=[{"role": role, "content": [part]}])
    assert error["param"].startswith("messages[0].content[0]")


UNTYPED = [{"role": "user", "content": [{"text": "hello"}]}]
ODD_TOOL = [{"type": "web_search_20260101", "name": "web_search"}]
TOOLS_ASKED = {"messages": MESSAGES, "tools": ODD_TOOL}
TAKEN: list[tuple[str, dict[str, Any]]] = [
    *((path, {"messages": UNTYPED}) for path in ("/v1/chat/completions", "/apply-template")),
    *((path, TOOLS_ASKED) for path in ("/v1/chat/completions", "/apply-template")),
    *(("/v1/responses", asked) for asked in ({"input": UNTYPED}, {"input": "hello", "tools": ODD_TOOL})),
    *(("/v1/messages", {"max_tokens": 3, **asked}) for asked in ({"messages": UNTYPED}, TOOLS_ASKED)),
    ("/api/chat", TOOLS_ASKED | {"stream": False}),
    ("/completion", {"prompt": "a", "max_tokens": -1, "n_predict": 2}),
    ("/completion", {"prompt": "a", "max_tokens": -1}),
    ("/completion", {"prompt": "a", "n_predict": -1}),
]


@pytest.mark.parametrize(("path", "body"), TAKEN)
def test_bodies_that_are_taken_are_described(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = served.client.post(path, json=body)
    assert (answer.status_code == 200) == body_of(path).is_valid(body), answer.text


def test_refused_queries_and_other_methods_are_described(served: Served) -> None:
    refused = served.client.get("/v1/engine/events", params={"interval": 11})
    assert refused.status_code == 400
    answer_of("/v1/engine/events", "get", 400).validate(refused.json())
    for path, operations in DOCUMENT["paths"].items():
        answer = served.client.request("PUT", path.replace("{id}", "x").replace("{name}", "x"))
        allowed = {method.upper() for method in operations}
        assert (answer.status_code, set(answer.headers["allow"].split(", ")) - {"HEAD"}) == (405, allowed), path


def test_a_protocol_is_added_by_one_file_and_one_row_as_the_page_says(llm: LLM) -> None:
    page = (ROOT / "docs/dev/adding.md").read_text(encoding="utf-8").partition("## A protocol of the server")[2]
    file, row, *_ = map(textwrap.dedent, re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names = {name: value for each in (ask, api_errors, bodies, events, protocols) for name, value in vars(each).items()}
    exec(file, names)
    expected = llm.generate("hello", max_new_tokens=3, temperature=0).text
    with serving(llm, table=[*ROUTES, eval(row, names)]) as served:
        assert served.ask("/pretend", text="hello") == {"said": expected}
        assert "".join(each["said"] for each in events_of(served.stream("/pretend", text="hello"))) == expected
