"""The host names that a server without keys accepts: no web page can rebind its own name to this machine."""

from typing import Any

import pytest

from cases import cases
from openai_shapes import check
from served import Served, served_model, serving

LOCAL_NAMES = ["localhost", "LOCALHOST:8000", "a.localhost", "localhost.", "127.0.0.1:1", "[::1]:8000", "192.168.1.5"]
FOREIGN_NAMES = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "mylocalhost"]


served = served_model(None)


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_a_local_name_is_served(served: Served, name: str) -> None:
    assert served.client.get("/nowhere", headers={"host": name}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/health", "/nowhere"])
@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_a_name_that_a_web_page_can_rebind_is_refused(served: Served, name: str, path: str) -> None:
    headers = {"host": name, "origin": f"http://{name}", "sec-fetch-site": "same-origin"}
    refused = served.client.get(path, headers=headers)
    check("ErrorResponse", refused.json())
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, "host_not_allowed")
    assert f"--allowed-host {name.partition(':')[0]}" in error["message"]


@cases("settings",
    {"api_keys": {"secret": "ann"}}, {"host": "0.0.0.0"}, {"allowed_hosts": ("Evil.example",)},
    {"allowed_hosts": ("*",)}, {"is_child": True},
)  # fmt: skip
def test_names_are_free_with_keys_and_at_other_addresses_and_if_they_are_given(settings: dict[str, Any]) -> None:
    headers = {"host": "evil.example", "authorization": "Bearer secret"}
    with serving(None, **settings) as served:
        assert served.client.get("/nowhere", headers=headers).status_code == 404
