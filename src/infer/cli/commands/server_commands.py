"""`infer ps` and `infer stop`: the models of a running server, asked over HTTP."""

import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from infer.cli.options.server_options import RunningServerOptions, StopOptions
from infer.cli.terminal.terminal import columns_of_rows, print_report
from infer.errors import InferError, InvalidRequestError

_SECONDS = 600.0  # a model is unloaded only after its answers have ended


def run_ps(options: RunningServerOptions) -> None:
    found = _ask(options, "/v1/models")
    rows = [("name", "state", "memory", "context", "takes")]
    rows += () if options.as_json else map(_row, found["data"])
    print_report(found, columns_of_rows(rows, "<<>><"), as_json=options.as_json)


def run_stop(options: StopOptions) -> None:
    found = _ask(options, "/models/unload", {"model": options.model})
    print_report(found, [f"{options.model} is unloaded"], as_json=options.as_json)


def _row(model: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
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
