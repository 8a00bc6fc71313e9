"""Grammars of the largest promised sizes can be followed to their ends. One more element is refused."""

import json
import random

import llguidance
import pytest

from byte_tokenizer import write_byte_tokenizer
from constraint_walks import walk
from infer.errors import ConstraintError, InvalidRequestError
from infer.text.grammar.grammar import Grammar, GrammarKind, Source
from infer.text.grammar.grammar_compiler import Compiler, make_compiler
from infer.text.grammar.library_trials import llguidance_follow
from infer.text.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, merges=[("a", "b"), ("x", "1"), ("w", "o")])
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return make_compiler(tokenizer, 300)


def words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=4)) + str(index) for index in range(count)]


def written(compiler: Compiler, tokenizer: Tokenizer, kind: GrammarKind, text: str, seed: int) -> str:
    return walk(compiler.compile(Grammar(kind, text)), tokenizer, 300, random.Random(seed)).decode()


@pytest.mark.parametrize("count", [2_001, 10_000])
@pytest.mark.parametrize("prefix", ["x", ""])
def test_any_of_many_choices_is_written(compiler: Compiler, tokenizer: Tokenizer, count: int, prefix: str) -> None:
    texts = [f"{prefix}{index}" for index in range(count)]
    found = {written(compiler, tokenizer, "choice", json.dumps(texts), seed) for seed in range(5)}
    assert found <= set(texts)


def test_any_of_thousands_of_constants_of_a_schema_is_written(compiler: Compiler, tokenizer: Tokenizer) -> None:
    texts = words(5_000, 3)
    assert json.loads(written(compiler, tokenizer, "json_schema", json.dumps({"enum": texts}), 0)) in texts


@pytest.mark.parametrize("count", [3_000, 6_000])
def test_any_of_thousands_of_alternatives_is_written(compiler: Compiler, tokenizer: Tokenizer, count: int) -> None:
    for texts in (words(count, 5)[: 65_000 // 13], [f"x{index}" for index in range(count)]):
        options = " | ".join(f'"{text}"' for text in texts)
        assert written(compiler, tokenizer, "grammar", f"start: {options}", 1) in texts
        text = written(compiler, tokenizer, "grammar", f'start: "<" word ">"\nword: {options}', 2)
        assert text[1:-1] in texts


def test_a_pattern_of_hundreds_of_alternatives_is_followed(compiler: Compiler, tokenizer: Tokenizer) -> None:
    texts = [f"w{index}" for index in range(400)]
    assert written(compiler, tokenizer, "regex", "|".join(texts), 1) in texts


def test_the_trial_follows_a_grammar_for_some_bytes(compiler: Compiler) -> None:
    """Before a request is accepted, the trial finds grammars that can be begun but not followed."""
    options = " | ".join(map(json.dumps, words(20_001, 7)))
    source = {"grammars": [{"lark_grammar": f'start: "x" word\nword: {options}'}]}
    assert "items; max is 20000" in llguidance_follow(llguidance)(Source("", json.dumps(source)))


@pytest.mark.parametrize("brackets", ["()", "[]"])
def test_groups_nest_as_deep_as_is_said_and_no_deeper(compiler: Compiler, brackets: str) -> None:
    opening, closing = brackets
    for name in ("start: {}", "start: word\nword: {}"):
        compiler.compile(Grammar("grammar", name.format(opening * 28 + '"a"' + closing * 28)))
        with pytest.raises(InvalidRequestError, match=r"column \d+: groups must be nested at most 28 deep\Z"):
            compiler.compile(Grammar("grammar", name.format(opening * 29 + '"a"' + closing * 29)))


def test_an_ambiguous_grammar_of_few_alternatives_is_given_few_items(compiler: Compiler) -> None:
    rules = "\n".join(f'r{i}: "a" r{(i + 1) % 60} | "a" r{i * 7 % 60} | r{(i + 3) % 60} "a" | "a"' for i in range(60))
    constraint = compiler.compile(Grammar("grammar", f"start: r0\n{rules}"))
    with pytest.raises(ConstraintError, match="max is 4000"):
        constraint.accept(b"a" * 60)
