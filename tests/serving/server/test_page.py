"""The page's files: their requests, how they are served, and that a model's text never becomes HTML."""

import re

from cases import cases
from infer.serving.server.routes.web_files import FOLDER, served_files
from served import Served, served_model

FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file())
LARGEST = 156_000
HTML = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"


served = served_model(None, api_keys={"secret": "me"})


def test_all_files_together_are_small_and_known() -> None:
    assert {path.name for path in FILES} | {"parameters.json"} == set(served_files())
    assert sum(path.stat().st_size for path in FILES) <= LARGEST


def test_the_page_is_there_without_a_key_and_while_the_model_loads(served: Served) -> None:
    for path in ["/", *(f"/page/{name}" for name in served_files())]:
        answer = served.client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert served.client.get("/").headers["content-type"].startswith("text/html")
    assert served.client.get("/page/main.js").headers["content-type"].startswith("text/javascript")


def test_unchanged_files_are_not_sent_again(served: Served) -> None:
    etag = served.client.get("/").headers["etag"]
    again = served.client.get("/", headers={"If-None-Match": f'W/"x", {etag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert served.client.get("/", headers={"If-None-Match": '"x"'}).status_code == 200


@cases("name", "x.js", "..%2fweb_ui%2ffiles.py", "%2e%2e/files.py", "files.py", "main.js/", "MAIN.JS", "")
def test_nothing_else_of_the_disk_is_served(served: Served, name: str) -> None:
    answer = served.client.get(f"/page/{name}")
    assert answer.status_code in (401, 404)
    assert "error" in answer.json()


def test_no_file_reads_text_as_html_or_names_another_host() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"www.w3.org"}
        assert hosts == set(), path.name
        assert not re.search(HTML, text), path.name
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|style=|<style|<script(?! type=\"module\" src=)", index)


def test_modules_import_existing_names() -> None:
    for path in FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        for names, module in re.findall(r"import \{([^}]*)\} from \"\./([\w.]+)\"", text):
            exported = (FOLDER / module).read_text(encoding="utf-8")
            for name in (each.strip() for each in names.split(",")):
                kinds = "const|class|function|async function|async function\\*"
                found = re.search(rf"export (?:{kinds}) {re.escape(name)}(?![\w$])", exported)
                assert found, f"{path.name}: {name} of {module}"
                uses = re.findall(rf"(?<![\w$]){re.escape(name)}(?![\w$])", text)
                assert len(uses) > 1, f"{path.name} has no use for {name}"
