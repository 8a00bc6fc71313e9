"""Grammars over SmolLM2's own vocabulary: schemas by the hundred, cut and resumed, and every hostile one."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from constraint_walks import allowed_ids, schema_text, walk
from extent import usual_or_all
from infer.files import open_checkpoint
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler, make_compiler
from infer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

VOCAB_SIZE = 49_152 + 40


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(smollm2_path).metadata)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def compiler(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Compiler:
    pytest.importorskip(request.param)
    return make_compiler(tokenizer, VOCAB_SIZE, backend=request.param)


def test_texts_of_random_schemas_parse_and_validate(compiler: Compiler, tokenizer: Tokenizer) -> None:
    for seed in range(usual_or_all(60, 500)):
        text = schema_text(1000 + seed, wide=compiler.backend == "llguidance")
        constraint = compiler.compile(Grammar("json_schema", text))
        written = walk(constraint, tokenizer, VOCAB_SIZE, random.Random(seed))
        jsonschema.validate(json.loads(written), json.loads(text))


@pytest.mark.slow(cases=1)
def test_forced_text_is_spelled_as_by_the_tokenizer(compiler: Compiler, tokenizer: Tokenizer) -> None:
    text = json.dumps({"first_name": "x", "last_name": "y", "date_of_birth": "z"})
    properties = {name: {"const": value} for name, value in json.loads(text).items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    constraint = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    written: list[int] = []
    num_sampled = 0
    while not constraint.done:
        ids = constraint.forced()
        if not ids:
            num_sampled += 1
            ids = [max(allowed_ids(constraint, VOCAB_SIZE), key=lambda i: len(tokenizer.token_bytes[i]))]
        assert constraint.accept(ids) == len(ids)
        written += ids
    assert tokenizer.decode(written) == text
    assert num_sampled <= 2
    assert written[:12] == tokenizer.encode(text)[:12]
