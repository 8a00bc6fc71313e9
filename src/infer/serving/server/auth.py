"""API keys and names of hosts: which requests may enter.

Every request needs a key if there are keys, except on open routes such as those for the server's health. A server
without keys on a loopback address answers to local names only: a web page can rebind its own name to this machine, and
could then read every answer as one of its own origin.
"""

import hashlib
import hmac
import socket
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers

from infer.errors import InvalidRequestError
from infer.serving.protocols.api_errors import ApiError
from infer.serving.server_settings import ServerSettings


def make_guard(settings: ServerSettings) -> Callable[[Headers, bool], str]:
    """Return a function that returns the name of a request's key, from its headers and if its path is open.

    The function raises ApiError 401 or 403 for a request that may not enter.
    """
    name_by_digest = {_digest(key): name for key, name in settings.api_keys.items()}
    hosts = _allowed_hosts(settings)

    def check(headers: Headers, is_open: bool) -> str:
        if hosts is not None:
            _check_host(headers.get("host", ""), hosts, settings)
        return "" if is_open or not name_by_digest else _key_name(headers, name_by_digest)

    return check


def read_keys(path: Path) -> dict[str, str]:
    """Return the names by key.

    A line is a key, or a name and a key; text after # is a comment. Raises InvalidRequestError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8"
        raise InvalidRequestError(f"the file {path} of API keys cannot be read: {reason}") from error
    names = dict[str, str]()
    for number, line in enumerate(lines, 1):
        match line.partition("#")[0].split():
            case []:
                continue
            case [key]:
                names[key] = f"key-{len(names) + 1}"
            case [name, key]:
                names[key] = name
            case _:
                raise InvalidRequestError(f"{path}, line {number}: a line must be a key, or a name and a key")
    if not names:
        raise InvalidRequestError(f"the file {path} contains no key: write one key per line")
    return names


def _key_name(headers: Headers, name_by_digest: Mapping[bytes, str]) -> str:
    """Return the name of the request's key. All keys are compared, each in constant time. Raises ApiError 401."""
    digest = _digest(_key_of(headers))
    found = [name for known, name in name_by_digest.items() if hmac.compare_digest(known, digest)]
    if not found:
        message, challenge = "a valid API key is needed: send Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=challenge)
    return found[0]


def _key_of(headers: Headers) -> str:
    """Return the key as OpenAI's clients send it (Authorization: Bearer), else as Anthropic's do (x-api-key)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    """Return the key's digest, which has the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _allowed_hosts(settings: ServerSettings) -> set[str] | None:
    """Return the names that are served in addition to local ones, or None if every name is served."""
    allowed = {_plain(name) for name in (settings.host, *settings.allowed_hosts)}
    if settings.api_keys or settings.is_child or "*" in allowed or not _is_loopback(settings.host):
        return None
    return allowed


def _check_host(host: str, allowed: Iterable[str], settings: ServerSettings) -> None:
    """Raise ApiError 403 unless the header's name, without its port, is local or allowed."""
    name = _plain(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
    if not (_is_local(name) or name in allowed):
        message = (
            f"the host {name!r:.80} is not served: a server without keys on {settings.host} answers to local names; "
            f"start it with --allowed-host {name:.80}"
        )
        raise ApiError(403, message, code="host_not_allowed")


def _plain(name: str) -> str:
    return name.strip().lower().rstrip(".")


def _is_local(name: str) -> bool:
    """Return True for names that no DNS server answers, and for a request of HTTP/1.0 without a name."""
    return not name or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        found = host if _is_address(host) else socket.gethostbyname(host)
    except OSError:
        return False
    return ip_address(found).is_loopback
