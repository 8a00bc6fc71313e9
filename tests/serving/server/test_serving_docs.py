"""The pages of docs/server have every flag, route, metric and setting that the server has, and no other.

A failing test prints the missing row.
"""

import json
import re
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import click

from infer.cli.servers.serve_command import client_lines
from infer.cli.subcommands import infer
from infer.serving.distributed.shelf import Shelf
from infer.serving.distributed.shelf_front import ShelfFront
from infer.serving.server.app import ROUTES
from infer.serving.server.server_settings import ServerSettings
from parameter_tables import row_of_flag
from served import Served

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "server").glob("*.md"))
DOCS = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


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
    routes = [*ROUTES, *ShelfFront(Mock(Shelf)).table]
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
