"""A structural tag allows the texts that xgrammar's own reading allows, and a server answers with one of them."""

import json
import re
from typing import Any

import pytest
import xgrammar

from byte_tokenizer import EOS, write_byte_tokenizer
from infer import Tokenizer
from infer.serving.protocols.structural_tags import StructuralTagFormat, lark_of
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
from served import Served

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON, TEXT = {"type": "json_schema", "json_schema": SCHEMA}, {"type": "any_text"}
X = {"type": "tag", "begin": "<f=x>", "content": JSON, "end": "</f>"}
Y = {"type": "tag", "begin": "<f=y>", "content": TEXT, "end": ["</f>", "</g>"]}
NOT_F, PATH = {**TEXT, "excludes": ["<f"]}, {"type": "regex", "pattern": "[a-c]+/x"}
THOUGHT = {"type": "tag", "begin": "<think>", "content": TEXT, "end": "</think>"}
TAGS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [X, Y]}
TWO = {**TAGS, "triggers": ["<f=x", "<f=y"]}
SEPARATED = {"type": "tags_with_separator", "tags": [X, Y], "separator": ","}
FORMATS: list[dict[str, Any]] = [
    *({"type": "const_string", "value": "<f=x>"}, JSON, TEXT, {**TEXT, "excludes": ["<f", "hey"]}, X, Y, PATH),
    *(TAGS | {"at_least_one": one, "stop_after_first": stop} for one in (False, True) for stop in (False, True)),
    *(SEPARATED | {"at_least_one": one, "stop_after_first": stop} for one in (False, True) for stop in (False, True)),
    *({"type": kind, "content": X} for kind in ("optional", "star", "plus")),
    *({"type": "sequence", "elements": each} for each in ([THOUGHT, JSON], [THOUGHT, TAGS], [NOT_F, X])),
    *({"type": "sequence", "elements": each} for each in ([TAGS, THOUGHT], [PATH, X], [X, Y], [X, NOT_F])),
    *({"type": "or", "elements": [X, Y, PATH]}, TWO, {**TAGS, "excludes": ["hey"]}, {**THOUGHT, "content": TWO}),
    {**THOUGHT, "content": {"type": "sequence", "elements": [X, TAGS]}},
]
PARTS = ["", "hey", "<f", '<f=x>{"a": 1}</f>', "<f=y>a<b</f>", "<f=y>\n</g>", "<f=z>", ","]
PARTS += ["<think>", "</think>", "ab/x", '{"a": 1}', "<f=x>no</f>", "<f=x>"]
TEXTS = [*PARTS, *(left + right for left in PARTS[1:] for right in PARTS[1:])]
TEXTS += [f"<think>{text}</think>{more}" for text in PARTS for more in ("", PARTS[3], '{"a": 1}')]
TEXTS += [f"{left}{middle}{right}" for left in PARTS[3:6] for middle in PARTS[:8] for right in PARTS[3:6]]


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiler, xgrammar.GrammarCompiler]:
    write_byte_tokenizer(folder := tmp_path_factory.mktemp("tokenizer"))
    vocabulary = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
    read = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[EOS])
    return Compiler(Tokenizer.from_folder(folder)), xgrammar.GrammarCompiler(read)


@pytest.mark.slow(cases=15)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form["type"])
def test_a_structural_tag_allows_the_texts_that_xgrammar_allows(compilers: Any, form: dict[str, Any]) -> None:
    theirs = compilers[1].compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    make = compilers[0].maker(Grammar("grammar", lark_of(StructuralTagFormat(format=form))))
    for text in TEXTS:
        matcher, ids = xgrammar.GrammarMatcher(theirs), [*text.encode(), EOS]
        expected = matcher.accept_string(text) and matcher.accept_token(EOS)
        assert (make().accept(ids) == len(ids)) == expected, text


def test_the_older_form_is_the_same_as_triggered_tags() -> None:
    older = StructuralTagFormat(structures=[{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}], triggers=["<f="])
    assert lark_of(older) == lark_of(StructuralTagFormat(format={**TAGS, "tags": [X]}))


def test_a_server_answers_with_a_text_of_the_tag(served: Served) -> None:
    asked = {"type": "structural_tag", "format": {**X, "content": {"type": "regex", "pattern": "[0-9]{1,3}"}}}
    for fields in ({"response_format": asked}, {"structured_outputs": {"structural_tag": json.dumps(asked)}}):
        answer = served.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 60} | fields).json()
        assert re.fullmatch("<f=x>[0-9]{1,3}</f>", answer["choices"][0]["text"])


NESTED = JSON
for _ in range(24):  # a content is written for each of two ends
    NESTED = {**Y, "content": NESTED}


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"type": "token", "token": 3}, "format.type 'token' is not supported"),
        ({**X, "begin": 3}, "format.begin must be a text, got 3"),
        ({**TAGS, "tags": [THOUGHT]}, "format.tags[0].begin must begin with one of the triggers, got '<think>'"),
        ({"type": "sequence", "elements": [TEXT, JSON]}, "format.elements[0] must be the last element"),
        ({**TEXT, "max_tokens": 3}, "format.max_tokens cannot be enforced"),
        (NESTED, "response_format must be a grammar of at most 65536 bytes"),
    ],
)
def test_a_part_that_cannot_be_enforced_is_refused(served: Served, form: dict[str, Any], problem: str) -> None:
    asked = {"response_format": {"type": "structural_tag", "format": form}}
    assert problem in served.refusal("/v1/completions", prompt="a", **asked)["message"]
