"""The pages: every relative link leads to a file and to a heading of it, and the site has every page."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import infer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name} links to {link}"
    assert links or page.name not in {"README.md", "benchmarks.md"}


def navigation(entry: Any) -> list[str]:
    """Return the pages of a part of the navigation, in their order."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in navigation(part)]


def test_the_site_has_each_page_once_and_loads_nothing_from_other_hosts() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(navigation(settings["nav"])) == sorted([*pages, "api.md"]), "mkdocs.yml has the navigation"
    assert settings["theme"]["font"] is False, "otherwise the theme loads Google's fonts"
    assert "://" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_site_leads_links_out_of_the_documents_to_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import site_hooks

    class Page:
        class file:  # noqa: N801
            src_uri = "dev/log.md"

    text = "[a](../../README.md) [b](../python.md) [c](../../benchmarks) ![d](../page.png)"
    led = site_hooks.on_page_markdown(text, Page)
    assert led == "[a](../repository/README.md) [b](../python.md) c ![d](../page.png)"


def test_the_page_of_the_api_has_each_exported_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import site_hooks

    headings = re.findall(r"^## (.*)$", site_hooks.api_page(), re.MULTILINE)
    assert sorted(headings) == sorted(infer.__all__)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every function that `infer` exports, and every public method of an exported class, with its name."""
    for name in set(infer.__all__) - {"SamplingParams"}:  # its one method takes the fields, in any spelling
        value = getattr(infer, name)
        members = vars(value) if inspect.isclass(value) else {}
        for member, given in members.items():
            function = given.__func__ if isinstance(given, classmethod | staticmethod) else given
            if inspect.isfunction(function) and not member.startswith("_"):
                yield f"{name}.{member}", function
        if inspect.isfunction(value):
            yield name, value


def test_every_public_function_describes_its_arguments() -> None:
    for name, function in public_functions():
        text = inspect.getdoc(function) or ""
        assert text, f"{name} has no docstring"
        arguments = inspect.signature(function).parameters.keys() - {"self", "cls"}
        missing = [argument for argument in arguments if f"    {argument}: " not in text]
        assert not missing or re.search(r"See `|arguments of|other arguments", text), f"{name} does not say {missing}"
