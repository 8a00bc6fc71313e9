"""Each case of tests/data/field-reports.toml gives the right value: public bug reports of other engines, tried here."""

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from byte_tokenizer import EOS, write_byte_tokenizer
from infer import LLM, Tokenizer
from infer.errors import InvalidRequestError, ModelError
from infer.serving.protocols import bodies
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.templates.chat_template import ChatTemplate
from refusals import check_refused
from served import Served, serving

FILE = Path(__file__).parents[1] / "data" / "field-reports.toml"
REPORTS = tomllib.loads(FILE.read_text(encoding="utf-8"))["report"]


def of_kind(kind: str) -> list[Any]:
    """Return the cases of a kind, each named after its report."""
    found = [(report["source"], *pair) for report in REPORTS for pair in enumerate(report.get(kind, ()))]
    return [pytest.param(case, id=f"{'+'.join([*source])}-{number}") for source, number, case in found]


@pytest.fixture(autouse=True)
def _same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the same one: with another, one answer in a hundred ends before its limit."""
    monkeypatch.setattr(bodies, "secrets", SimpleNamespace(randbits=lambda _: 1))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[str], Served]]:
    """Yield a function that returns a server of the model of this fixture."""
    settings = {"model": "tiny", "model_path": str(folder), "allow_embeddings": True}
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(serving(request.getfixturevalue(name), **settings)))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Compiler(Tokenizer.from_folder(folder), 300)


def value_at(answer: Any, path: str) -> Any:
    for key in path.split("."):
        if key == "length":
            return len(answer)
        answer = answer[int(key)] if isinstance(answer, list) else answer[key]
    return answer


def events_of(text: str) -> list[Any]:
    """Return the data of a stream's events, or its lines of JSON."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:1] == "{" or line[:6] == "data: "]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("case", of_kind("request"))
def test_a_request_is_answered_so(servers: Callable[[str], Served], case: dict[str, Any]) -> None:
    method = "GET" if "get" in case else "POST"
    path, headers = case[method.lower()], case.get("headers")
    answer = servers(case.get("of", "tiny")).client.request(method, path, content=case.get("body"), headers=headers)
    assert answer.status_code == case.get("status", 200), answer.text
    is_stream = "json" not in answer.headers["content-type"].replace("ndjson", "")
    found = events_of(answer.text) if is_stream else answer.json()
    assert {name: value_at(found, name) for name in case.get("gives", ())} == case.get("gives", {}), found


@pytest.mark.parametrize("case", of_kind("schema"))
def test_a_schema_allows_these_texts_only(compiler: Compiler, case: dict[str, Any]) -> None:
    constraint, texts = Grammar("json_schema", case["schema"]), [*case["valid"], *case["invalid"]]
    accepted = [compiler.compile(constraint).accept([*text.encode(), EOS]) > len(text.encode()) for text in texts]
    assert list(compress(texts, accepted)) == case["valid"]


@pytest.mark.parametrize("case", of_kind("template"))
def test_a_template_gives_this_prompt(case: dict[str, Any]) -> None:
    template = ChatTemplate(case["template"], {"bos_token": "<s>", "eos_token": "</s>"})
    options = {"add_generation_prompt": True} | json.loads(case.get("options", "{}"))
    try:
        text = template.render(json.loads(case["messages"]), **options)
    except InvalidRequestError as error:
        text = str(error)
    assert text == case["text"]


@pytest.mark.parametrize("case", of_kind("tokenizer"))
def test_a_text_has_these_ids_and_they_have_this_text(case: dict[str, Any], tmp_path: Path) -> None:
    if "gguf" in case:
        tokenizer = Tokenizer.from_gguf(json.loads(case["gguf"]))
    else:
        (tmp_path / "tokenizer.json").write_text(case["file"])
        (tmp_path / "tokenizer_config.json").write_text(case.get("config", "{}"))
        (tmp_path / "added_tokens.json").write_text(case.get("added", "{}"))
        tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(case["text"]) == case["ids"] if "text" in case else True
    detokenizer = tokenizer.make_detokenizer(skip_special_tokens=False)
    assert "".join([*map(detokenizer.push, case["ids"]), detokenizer.flush()]) == case["decoded"]


@pytest.mark.parametrize("case", of_kind("folder"))
def test_a_folder_is_loaded_or_refused_so(folder: Path, case: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    tensors, config = load_file(folder / "model.safetensors"), tmp_path / "model" / "config.json"
    names = {name: case.get("tensors", {}).get(name, name) for name in tensors}
    save_file({new: tensors[name] for name, new in names.items() if new}, tmp_path / "model" / "model.safetensors")
    config.write_text(json.dumps(json.loads(config.read_text()) | json.loads(case["config"])))
    if "error" in case:
        check_refused(lambda: LLM(config.parent), case["error"], ModelError)
    else:
        with LLM(config.parent, **json.loads(case.get("load", "{}"))) as llm:
            assert len(llm.generate("ab", max_new_tokens=2, temperature=0, ignore_eos=True).token_ids) == 2
