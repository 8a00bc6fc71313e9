"""The pages: links lead to files and headings, the site has every page, and their commands work."""

import ast
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import click
import pytest
import yaml

import infer
import site_hooks
from infer.cli.option_fields import ALIASES
from infer.cli.subcommands import infer as command_line

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES_OF_NOW = [page for page in PAGES if page.name != "log.md"]
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
    assert sorted(navigation(settings["nav"])) == sorted(pages), "mkdocs.yml has the navigation"
    assert settings["theme"]["font"] is False, "otherwise the theme loads Google's fonts"
    assert "://" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def page_at(uri: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=uri))


def test_the_site_leads_links_out_of_the_documents_to_copies() -> None:
    text = "[a](../../README.md) [b](../python.md) [c](../../benchmarks) ![d](../page.png)"
    led = site_hooks.on_page_markdown(text, page_at("dev/log.md"))
    assert led == "[a](../repository/README.md) [b](../python.md) c ![d](../page.png)"


def test_a_diagram_becomes_a_part_of_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "diagrams").mkdir()
    (tmp_path / "diagrams" / "a.svg").write_text("<svg>one</svg>\n")
    monkeypatch.setattr(site_hooks, "DOCS", tmp_path)
    text = "before\n\n![Layers](../diagrams/a.svg)\n\n![b](../page.png)"
    drawn = site_hooks.on_page_markdown(text, page_at("dev/design.md"))
    assert '<figure role="img" aria-label="Layers" style="width: 100%">\n<svg>one</svg>\n</figure>' in drawn
    assert "![b](../page.png)" in drawn


def test_the_page_of_the_api_has_each_exported_name() -> None:
    names = re.findall(r"^::: infer\.(\w+)$", (DOCS / "reference" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(names) == sorted(infer.__all__)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every function that `infer` exports, and every public method of an exported class, with its name."""
    for name in set(infer.__all__) - {"SamplingParams"}:  # its one method takes the fields, in any spelling
        value = getattr(infer, name)
        for member, given in inspect.getmembers_static(value) if inspect.isclass(value) else ():
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


# The benchmarks: docs/benchmarks.md is their index, and a command on a page must work.

BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8"))
WORKERS = {"beside_worker.py", "gpu_sections.py", "peer_worker.py", "serving_worker.py"}  # other scripts start these
# The log is history, so scripts that it names may no longer exist.
TEXTS = [*PAGES_OF_NOW, *(ROOT / name for name in ("CHANGELOG.md", "Makefile"))]
NAMED = re.compile(r"\b((?:bench|check|count|gpu|kv)_\w+)\.py\b")
COMMAND = re.compile(r"python\s+benchmarks/(\w+\.py)((?:[^`\n]|(?<=[\w\"])\n(?=[\w\"-]))*)")


def named_scripts(path: Path) -> set[str]:
    return {f"{name}.py" for name in NAMED.findall(path.read_text(encoding="utf-8"))}


def options_of(script: str) -> dict[str, str]:
    """Return the options of a script with their help, found in its calls."""
    found = {"--report": ""}
    for node in ast.walk(ast.parse((BENCHMARKS / script).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {each.arg: each.value for each in node.keywords}
        if name == "make_parser":
            found |= {f"--{each}": "" for each in keywords}
        elif name == "add_code_options":
            found |= dict.fromkeys(("--sources", "--sets", "--cpu"), "")
        elif name == "add_argument":
            strings = [each.value for each in ast.walk(keywords.get("help", ast.Constant(""))) if is_text(each)]
            found |= {str(ast.literal_eval(each)): " ".join(strings) for each in node.args if is_text(each)}
    return found


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_each_script_that_a_document_names_exists() -> None:
    for path in TEXTS:
        for name in named_scripts(path):
            assert any((ROOT / folder / name).exists() for folder in ("benchmarks", "scripts")), f"{path.name}: {name}"


def test_each_file_of_the_benchmarks_is_in_their_index() -> None:
    index = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert [path.name for path in BENCHMARKS.glob("*.py") if f"`{path.name}`" not in index] == []


def test_each_report_of_the_benchmarks_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in (BENCHMARKS / "reports").iterdir() if path.name not in pages] == []


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in WORKERS])
def test_each_script_of_the_benchmarks_has_the_options_of_its_commands(script: str) -> None:
    options, source = options_of(script), (BENCHMARKS / script).read_text(encoding="utf-8")
    assert "make_parser(__doc__" in source
    texts = [path.read_text(encoding="utf-8") for path in (BENCHMARKS / script, *TEXTS)]
    commands = [rest for text in texts for name, rest in COMMAND.findall(text) if name == script]
    assert commands
    for command in commands:
        assert set(re.findall(r"(?<=\s)--[a-z-]+", command)) <= options.keys(), command
    assert not [text for text in options.values() if re.search(r"%(?![%(])", text)], "argparse formats the help"


FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
# A prompt, variables, other programs or the path of a virtual environment may precede a command.
INFER_COMMAND = re.compile(
    r"(?:^|[|&;] ?|\$ |RUN |/bin/|=\S* |--list \S+ )(infer (?:'[^']*'|\"[^\"]*\"|[^#|&<\n'\"])*)"
)
COMMENT = re.compile(r"\s#\s")
CONTAINER = re.compile(r"^docker run .* infer( [^#\n]*)?$", re.MULTILINE)
VALUES = {"N": "2", "T": "q8", "P": "sliding"}  # values of options that a sentence names by a letter


def commands_in_blocks(page: Path) -> Iterator[str]:
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        joined = block.replace("\\\n", " ")
        for line in joined.splitlines():
            yield from INFER_COMMAND.findall(COMMENT.split(line)[0])
        for options in CONTAINER.findall(joined):
            yield f"infer serve{options}"


def commands_in_sentences(page: Path) -> Iterator[str]:
    """Yield the commands that sentences and tables name, which may leave arguments out."""
    for code in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"infer [a-z]", code) and "\n" not in code and "…" not in code:
            yield code


def parse(command: str) -> None:
    """Parse a command and run nothing. Raises click's error if it would be refused."""
    name, *rest = [VALUES.get(word, word) for word in shlex.split(command)[1:]]
    if not name.startswith("-"):
        with click.Context(command_line).scope():
            command_line.commands[name].make_context(name, rest)


def named_options(command: str) -> set[str]:
    return {word.partition("=")[0] for word in command.split() if re.match(r"--?[a-z]", word)}


@pytest.mark.parametrize("page", PAGES_OF_NOW, ids=[page.relative_to(ROOT).as_posix() for page in PAGES_OF_NOW])
def test_infer_accepts_each_command_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "person.json").write_text("{}")
    for command in commands_in_blocks(page):
        try:
            parse(command)
        except (click.ClickException, KeyError) as error:
            pytest.fail(f"{command}: {error}")
    for command in commands_in_sentences(page):
        name = command.split()[1]
        options = {
            each for option in command_line.commands[name].params for each in (*option.opts, *option.secondary_opts)
        }
        accepted = options | set(ALIASES) | {"--help", "-h"}
        assert named_options(command) <= accepted, command


def test_the_pages_have_commands_to_check() -> None:
    names = [command.split()[1] for page in PAGES_OF_NOW for command in commands_in_blocks(page)]
    assert len(names) > 60
    assert {"batch", "chat", "doctor", "estimate", "generate", "quantize", "serve"} <= set(names)


# The docstrings of `AsyncLLM` lead to those of `LLM`.


def documented(names: str) -> Iterator[tuple[Any, str]]:
    """Yield each class and function of modules at the top, and its docstring."""
    texts = [(ROOT / "src" / "infer" / name).read_text(encoding="utf-8") for name in names.split()]
    for node in ast.walk(ast.parse("".join(texts))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node) or ""


def test_no_paragraph_of_the_async_class_is_one_of_the_other() -> None:
    first, second = (
        {" ".join(part.split()) for _, text in documented(name) for part in text.split("\n\n") if part}
        for name in ("llm.py text_calls.py", "async_llm.py")
    )
    assert len(first) > 80
    assert len(second) > 30
    assert not first & second


def keywords_by_function(name: str) -> dict[str, set[str]]:
    functions = [node for node, _ in documented(name) if not isinstance(node, ast.ClassDef)]
    return {each.name: {argument.arg for argument in each.args.kwonlyargs} for each in functions}


def test_no_list_of_keywords_is_written_twice() -> None:
    """`options` is no list. A decorator declares the arguments of a method that has those of `LLM`."""
    first, second = keywords_by_function("llm.py text_calls.py"), keywords_by_function("async_llm.py")
    assert {name for name in second if (second[name] & first.get(name, set())) - {"options"}} == set()
    for name in ("embed", "rerank", "classify", "prompt_logprobs", "generate_all"):
        one, other = (inspect.signature(getattr(each, name)).parameters for each in (infer.LLM, infer.AsyncLLM))
        assert dict(one) == dict(other)
