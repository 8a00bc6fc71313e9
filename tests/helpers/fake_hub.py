"""A Hugging Face hub on this machine: repositories of a few small files, served as the real one serves them."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """A hub. `repositories` has the bytes of each file, by repository. `requests` records the requested paths."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    url: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    @property
    def downloads(self) -> list[str]:
        """The files whose content was sent."""
        return [request.rpartition("/resolve/")[2].partition("/")[2] for request in self.requests if " GET " in request]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if token := self.headers.get("Authorization"):
                hub.tokens.add(token)
            is_api = path.startswith("/api/models/")
            repo = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
            rest = path.removeprefix("/api/models").removeprefix(f"/{repo}").strip("/").split("/")
            if not is_api:
                hub.requests.append(f" {'GET' if with_body else 'HEAD'} {path}")
            if path == "/":
                self.send(200, b"", with_body=with_body)
            elif repo not in hub.repositories:
                self.refuse(401, "RepoNotFound")
            elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            elif is_api:
                self.describe(repo, rest)
            elif repo in hub.gated and "Authorization" not in self.headers:
                self.refuse(401, "GatedRepo")
            else:
                self.send_file(hub.repositories[repo].get("/".join(rest[2:])), with_body=with_body)

        def describe(self, repo: str, rest: list[str]) -> None:
            files = hub.repositories[repo]
            if rest[0] == "tree":
                tree = [{"type": "file", "path": name, "size": len(x), "oid": etag(x)} for name, x in files.items()]
                self.send(200, json.dumps(tree).encode())
            else:
                siblings = [{"rfilename": name} for name in files]
                self.send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

        def send_file(self, content: bytes | None, *, with_body: bool) -> None:
            if content is None:
                self.refuse(404, "EntryNotFound")
                return
            headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT}
            self.send(200, content, headers, with_body=with_body)

        def refuse(self, status: int, code: str) -> None:
            self.send(status, b"", {"X-Error-Code": code})

        def send(
            self, status: int, content: bytes, headers: Mapping[str, str] | None = None, *, with_body: bool = True
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    return Handler


def etag(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
