"""Every method, for every backend and kind of grammar: masks against all texts of a language, and refusals."""

import json
import random
import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex

import hostile_grammars
from byte_tokenizer import write_byte_tokenizer
from constraint_walks import allowed_ids, schema_text, walk
from infer import InvalidRequestError, SamplingParams, Tokenizer
from infer.text.grammar.constraint import Constraint
from infer.text.grammar.grammar import Grammar, grammar_of
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.grammar.patterns import check_pattern, without_anchors
from infer.text.grammar.shortest import Clause, shortest
from looping import beside, in_threads
from watched import python_command, script_command

MERGES = [("{", '"'), ('"', ":"), ('":', " "), ("a", "b"), ("ab", "c"), ("t", "r"), ("tr", "u"), ("1", "0"), (",", " ")]
MERGES += [("b", "a"), ("ba", "r"), (" ", '"'), ('"', ","), ("n", "a"), ("na", "me"[0]), ("x", "x"), ("}", "\n")]
MODEL_VOCAB = 300  # the embedding has more rows than tokens


def json_schema(**words: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(words))


LANGUAGES: dict[str, tuple[Grammar, list[str]]] = {
    "choice": (
        Grammar("choice", '["bar", "abc", "ab", "(a|b)", "name\\"", "\\\\"]'),
        ["bar", "abc", "ab", "(a|b)", 'name"', "\\"],
    ),
    "one choice": (Grammar("choice", '["abcabc xx"]'), ["abcabc xx"]),
    "regex": (
        Grammar("regex", "^(ab|ba[rz]){1,2}x?$"),
        ["".join(parts) + x for n in (1, 2) for parts in product(["ab", "bar", "baz"], repeat=n) for x in ("", "x")],
    ),
    "grammar": (
        Grammar("grammar", 'start: verb " " noun "!"?\nverb: "bar" | "xx"\nnoun: /(ab|a)c/ | "10"'),
        [f"{verb} {noun}{end}" for verb in ("bar", "xx") for noun in ("abc", "ac", "10") for end in ("", "!")],
    ),
    "json_schema": (
        json_schema(
            type="object",
            properties={"ab": {"enum": ["x", "xx", 10, None]}, "tru": {"type": "boolean"}},
            required=["ab"],
            additionalProperties=False,
        ),
        [json.dumps({"ab": ab} | more) for ab in ("x", "xx", 10, None) for more in ({}, {"tru": True}, {"tru": False})],
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, merges=MERGES)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def compiler(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Compiler:
    pytest.importorskip(request.param)
    return Compiler(tokenizer, MODEL_VOCAB, backend=request.param)


def compile_regex(compiler: Compiler, pattern: str) -> Constraint:
    return compiler.compile(Grammar("regex", pattern))


def test_a_grammar_that_the_cache_has_forgotten_is_not_compiled_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine begins an answer again on its own thread, which may not wait for a compilation."""
    monkeypatch.setattr("infer.text.grammar.grammar_compiler.MAX_COMPILED_BYTES", 0)
    make = Compiler(tokenizer, MODEL_VOCAB).maker(Grammar("regex", "[ab]*"))
    monkeypatch.setattr("infer.text.grammar.grammar_compiler.try_grammar", None)
    assert allowed_ids(make(), MODEL_VOCAB) == allowed_ids(make(), MODEL_VOCAB)


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_allows_exactly_what_can_continue_a_text(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    grammar, texts = LANGUAGES[name]
    language = [text.encode() for text in texts]
    seen = set()
    for seed in range(40):
        rng = random.Random(seed)
        constraint, written = compiler.compile(grammar), b""
        while True:
            seen.add(written)
            ids = allowed_ids(constraint, MODEL_VOCAB)
            check(constraint, tokenizer, ids, written, language)
            chosen = rng.choice(ids)
            assert constraint.accept([chosen]) == 1
            if chosen in tokenizer.eos_token_ids:
                break
            written += tokenizer.token_bytes[chosen]
        assert constraint.done
        assert written in language
    assert len(seen) > len(texts)


def check(constraint: Constraint, tokenizer: Tokenizer, ids: list[int], written: bytes, language: list[bytes]) -> None:
    left = [text for text in language if text.startswith(written)]
    ends = tokenizer.eos_token_ids if written in left else frozenset()
    forced = constraint.forced()
    if forced:
        assert ids == forced[:1]
        spelt = b"".join(tokenizer.token_bytes[i] for i in forced)
        assert all(text.startswith(written + spelt) for text in left), "what is forced is in every text"
        assert not tokenizer.special_token_ids.intersection(forced)
    else:
        ordinary = {i: token for i, token in enumerate(tokenizer.token_bytes) if i not in tokenizer.special_token_ids}
        can_follow = {i for i, token in ordinary.items() if any(text.startswith(written + token) for text in left)}
        assert set(ids) == can_follow | ends
    assert constraint.done == (left == [written])


@pytest.mark.parametrize("name", LANGUAGES)
def test_following_the_plan_token_by_token_is_jumping(compiler: Compiler, name: str) -> None:
    jumping, walking = (compiler.compile(LANGUAGES[name][0]) for _ in range(2))
    while not jumping.done:
        forced = jumping.forced()
        for index, token_id in enumerate(forced):
            assert walking.forced()[: len(forced) - index] == forced[index:]
            assert walking.accept([token_id]) == 1
        assert jumping.accept(forced) == len(forced)
        assert walking.forced() == jumping.forced()
        if not forced:
            token_id = allowed_ids(jumping, MODEL_VOCAB)[-1]
            assert jumping.accept([token_id]) == walking.accept([token_id]) == 1


@pytest.mark.parametrize("name", LANGUAGES)
def test_rolled_back_is_never_accepted(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        constraint = compiler.compile(LANGUAGES[name][0])
        states = [(allowed_ids(constraint, MODEL_VOCAB), constraint.forced(), constraint.done)]
        while True:
            token_id = rng.choice(states[-1][0])
            assert constraint.accept([token_id]) == 1
            states.append((allowed_ids(constraint, MODEL_VOCAB), constraint.forced(), constraint.done))
            if token_id in tokenizer.eos_token_ids:
                break
        while len(states) > 1:
            back = rng.randint(1, len(states) - 1)
            constraint.rollback(back)
            del states[-back:]
            assert (allowed_ids(constraint, MODEL_VOCAB), constraint.forced(), constraint.done) == states[-1]
        with pytest.raises(ValueError, match="num_tokens"):
            constraint.rollback(1)


def test_accept_stops_at_the_first_token_that_the_mask_forbids(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compile_regex(compiler, "[ab]{2}[xy]{2}")
    assert constraint.accept([*b"abxq", *b"y"]) == 3
    assert constraint.accept([-1]) == constraint.accept([MODEL_VOCAB - 1]) == constraint.accept([10**6]) == 0
    assert (constraint.accept([]), constraint.accept(list(b"y"))) == (0, 1)


def test_every_end_id_ends_and_only_where_the_grammar_may(compiler: Compiler, tokenizer: Tokenizer) -> None:
    ends = tokenizer.eos_token_ids
    assert len(ends) == 2
    for end in ends:
        constraint = compile_regex(compiler, "ab*")
        assert (constraint.accept([end]), constraint.accept([*b"ab", end])) == (0, 3)
        assert constraint.done
        assert constraint.accept([end]) == constraint.accept(list(b"b")) == 0
        assert set(allowed_ids(constraint, MODEL_VOCAB)) == ends
        constraint.rollback(1)
        assert not constraint.done
        assert constraint.accept(list(b"b")) == 1


def test_a_tokenizer_without_an_end_is_done_by_the_text(tmp_path: Path, compiler: Compiler) -> None:
    write_byte_tokenizer(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    without = Tokenizer.from_folder(tmp_path)
    assert not without.eos_token_ids
    constraint = compile_regex(Compiler(without, backend=compiler.backend), "a[bc]")
    assert constraint.accept(list(b"ab")) == 2
    assert constraint.done


def test_ids_beyond_the_tokenizer_are_never_allowed(compiler: Compiler, tokenizer: Tokenizer) -> None:
    assert max(allowed_ids(compile_regex(compiler, "(.|\n)*"), MODEL_VOCAB)) < tokenizer.vocab_size


@pytest.mark.parametrize(
    "pattern", ["[a-c]*x", "(ab|abc|b)+", "a{2,5}b?", "(x|xx)*y|ab", "[^a-z]{3}", "(a*b*)*c", r"\d+(\.\d{1,2})?"]
)
def test_masks_agree_with_another_regex_engine(compiler: Compiler, tokenizer: Tokenizer, pattern: str) -> None:
    compiled = regex.compile(pattern)
    for seed in range(8):
        rng = random.Random(seed)
        constraint, written = compile_regex(compiler, pattern), ""
        for _ in range(12):
            ids = allowed_ids(constraint, MODEL_VOCAB)
            for token_id in () if constraint.forced() else [*range(128), *range(256, 256 + len(MERGES))]:
                text = written + tokenizer.token_bytes[token_id].decode()
                assert (token_id in ids) == bool(compiled.fullmatch(text, partial=True)), text
            assert bool(tokenizer.eos_token_ids.intersection(ids)) == bool(re.fullmatch(pattern, written))
            ascii_ids = [i for i in ids if i < 128 or i in range(256, 256 + len(MERGES))]
            if not ascii_ids:
                break
            chosen = rng.choice(ascii_ids)
            assert constraint.accept([chosen]) == 1
            written += tokenizer.token_bytes[chosen].decode()


def test_texts_of_random_schemas_parse_and_validate(compiler: Compiler, tokenizer: Tokenizer) -> None:
    for seed in range(60):
        text = schema_text(seed, wide=compiler.backend == "llguidance")
        rng = random.Random(seed)
        written = walk(compiler.compile(Grammar("json_schema", text)), tokenizer, MODEL_VOCAB, rng)
        jsonschema.validate(json.loads(written), json.loads(text))


def test_json_is_spaced_as_json_dumps_does_and_never_more(compiler: Compiler, tokenizer: Tokenizer) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = json_schema(type="array", items={**inner, "additionalProperties": False})
    constraint, ids = compiler.compile(grammar), tokenizer.encode(json.dumps([{"a": 1}, {"a": 2}]))
    assert constraint.accept(ids) == len(ids)
    assert constraint.done
    for spaced in ("[ ", "[\n", '[{"a" ', '[{"a":  ', '[{"a": 1 '):
        ids = tokenizer.encode(spaced)
        assert compiler.compile(grammar).accept(ids) < len(ids)


def test_no_control_token_is_text(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.compile(Grammar("choice", '["<|im_end|>"]'))
    while not constraint.done:
        ids = allowed_ids(constraint, MODEL_VOCAB)
        assert not tokenizer.special_token_ids.intersection(ids)
        constraint.accept(ids[:1])


def test_masks_are_filled_beside_other_threads(compiler: Compiler) -> None:
    grammar = Grammar("regex", "([a-z]{1,9} ){1,50}")
    wanted = allowed_ids(compiler.compile(grammar), MODEL_VOCAB)

    def follow() -> None:
        constraint = compiler.compile(grammar)
        for _ in range(50):
            constraint.accept(list(b"hello "))
            constraint.rollback(6)
            assert allowed_ids(constraint, MODEL_VOCAB) == wanted

    in_threads([follow] * 4)


def test_one_constraint_may_be_filled_while_it_moves(compiler: Compiler) -> None:
    constraint = compile_regex(compiler, "[ab]{1,2000}")
    mask = np.zeros(-(-MODEL_VOCAB // 32), dtype=np.int32)
    with beside([lambda: [constraint.fill(mask) for _ in range(300)]]):
        for _ in range(300):
            assert constraint.accept(list(b"ab")) == 2
            constraint.rollback(1)
    constraint.fill(mask)
    assert mask.any()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
def test_no_hostile_grammar_harms_a_backend(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    write_byte_tokenizer(tmp_path, merges=MERGES)
    command = script_command(Path(hostile_grammars.__file__), backend, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, memory_mib = done.stdout.splitlines()
    assert int(memory_mib) < 1024
    found = {(kind, name): problem for kind, name, problem in map(json.loads, lines)}
    assert len(found) == len(hostile_grammars.all_hostile()) >= 100
    for (kind, name), problem in found.items():
        assert re.fullmatch(rf"({kind}.{{,480}})?", problem), (kind, name, problem)
    for keyword in ("uniqueItems", "contains"):
        assert f"{keyword!r}" in found["json_schema", keyword]


POINTED = {
    ("json_schema", '{"properties": {"a/b": {"type": "strnig"}}}'): "at /properties/a~1b: 'type' must be",
    ("json_schema", '{"items": {"type": "array", "minItems": 3, "maxItems": 1}, "minItems": 1, "type": "array"}'): (
        "at /items: .*minItems.* is greater than maxItems"
    ),
    ("json_schema", '{"items": {"anyOf": [{"minItems": 2}, {"format": 3}]}}'): "at /items/anyOf/1: 'format' must be",
    ("json_schema", '{"properties": {"a": {"pattern": "(x"}}}'): "at /properties/a: pattern, column 1: ",
    ("regex", r"a\x{110000}"): r"column 2: \\x\{110000\} is not a character: the last one is 10FFFF",
    ("json_schema", '{"not": {"$ref": "#/nowhere"}}'): "at /not: '\\$ref' leads to no schema",
    ("json_schema", '{"minItems": 2, "items": {"$ref": "#"}, "type": "array"}'): "at /items: no value can fulfil it",
    ("json_schema", "{"): "is not JSON: .* line 1 column 2",
    ("regex", "ab(c"): "column 3: ",
    ("regex", "ab)c"): "column 3: ",
    ("regex", "a^b"): "column 2: ",
    ("regex", "(a{900}){900}"): "column 9: longer than 20000",
    ("grammar", 'start: "a"\nb: c'): "line 2, column 4: there is no rule 'c'",
    ("grammar", 'start: "a"\n  "b'): "line 2, column 3: ",
    ("grammar", 'start: b\nb: "x" b'): "line .: the rule|line ., column 1: the rule",
    ("grammar", "start: /x(/"): "line 1, column 8: pattern, column 2",
    ("choice", '["a", "\\ud800"]'): "choice 1: character 1",
}


@pytest.mark.parametrize(("kind", "text"), POINTED)
def test_a_refusal_points_into_the_grammar(compiler: Compiler, kind: str, text: str) -> None:
    if compiler.backend == "xgrammar" and re.search("pattern|minLength", text):
        return  # this backend refuses the keyword
    with pytest.raises(InvalidRequestError, match=POINTED[kind, text]):
        compiler.compile(Grammar(kind, text))  # type: ignore[arg-type]


def test_a_backend_that_is_unknown_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="llguidance, xgrammar"):
        Compiler(tokenizer, backend="outlines")


def test_parameters_name_their_grammar() -> None:
    assert grammar_of(SamplingParams()) is None
    assert grammar_of(SamplingParams(regex="a+")) == ("regex", "a+")
    assert grammar_of(SamplingParams(grammar="start: /a/")) == ("grammar", "start: /a/")
    assert grammar_of(SamplingParams(choice=["é", 'b"'])) == ("choice", '["é", "b\\""]')
    assert grammar_of(SamplingParams(json_schema={"type": "null"})) == ("json_schema", '{"type": "null"}')


def test_nothing_is_loaded_before_the_first_grammar() -> None:
    code = "import sys, infer.text.grammar; print({'llguidance', 'xgrammar', 'torch'} & set(sys.modules))"
    done = subprocess.run(python_command(code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_brackets_at_the_start_of_a_class_are_members() -> None:
    for pattern in ("[](]", "[^](]", "[[(]a]"):
        check_pattern(pattern, "regex")


def test_anchors_at_the_ends_have_no_effect() -> None:
    wanted = {"^a$": "a", "a\\$": "a\\$", "a\\\\$": "a\\\\", "^$": "", "a": "a"}
    assert {pattern: without_anchors(pattern) for pattern in wanted} == wanted


def test_the_shortest_text_is_found_and_missed_where_there_is_none() -> None:
    clauses = [Clause("a", ("b", "b"), 1), Clause("b", (), 5), Clause("b", ("c",), 1), Clause("c", (), 2)]
    clauses += [Clause("loop", ("loop",)), Clause("many", ("a",), times=10)]
    assert shortest(clauses) == {"a": 7, "b": 3, "c": 2, "many": 70}
