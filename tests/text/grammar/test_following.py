"""Grammars that are followed to their ends, also the largest, and in the real loop. `advance` changes no result."""

import json
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest

from byte_tokenizer import write_byte_tokenizer
from constraint_walks import allowed_ids, schema_text, walk
from extent import IS_WHOLE
from infer import GenerationResult, SamplingParams, Tokenizer
from infer.errors import ConstraintError, InvalidRequestError
from infer.text.grammar.constraint import Constraint
from infer.text.grammar.grammar import Grammar, GrammarKind, Source
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.grammar.libraries import llguidance_follow
from path_cases import EOS, VOCAB_SIZE, Case, Outcome, Way, World, constraint_of, run_alone, run_batch
from refusals import check_refused

VOCABS = (300, 330, 700)  # more than the tokenizer's ids: 0, 1 and many words of masks allow nothing
PATTERN = "(?:[ab]{2,5} bar abc ){2}x?|[xy]+"


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def compilers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Compiler]:
    pytest.importorskip(request.param)
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, merges=[("a", "b"), ("b", "a"), ("ba", "r"), ("x", "y")])
    tokenizer = Tokenizer.from_folder(folder)
    return [Compiler(tokenizer, vocab_size, backend=request.param) for vocab_size in VOCABS]


def place(constraint: Constraint, vocab_size: int) -> tuple[list[int], list[int], bool]:
    return allowed_ids(constraint, vocab_size), constraint.forced(), constraint.done


def test_to_advance_is_accept_done_forced_and_fill(compilers: list[Compiler]) -> None:
    seen = {True: 0, False: 0}
    for compiler, vocab_size in zip(compilers, VOCABS, strict=True):
        lines = np.zeros((2, -(-vocab_size // 32)), np.int32)
        for seed in range(20):
            rng = random.Random(seed)
            following, stepping = (compiler.compile(Grammar("regex", PATTERN)) for _ in range(2))
            while not stepping.done:
                token_id = rng.choice(allowed_ids(stepping, vocab_size))
                assert stepping.accept([token_id]) == 1
                line, asked = lines[rng.randrange(2)], rng.random() < 0.8
                line[:] = 0x5A5A5A5A
                expected = line.copy()
                has_choice = following.advance(token_id, line, not asked)
                assert has_choice == (not stepping.done and not stepping.forced())
                assert place(following, vocab_size) == place(stepping, vocab_size)
                if asked and has_choice:
                    stepping.fill(expected)
                assert not has_choice or (line == expected).all()
                assert following.num_accepted == stepping.num_accepted
                seen[has_choice] += 1
    assert min(seen.values()) > 20


def test_a_constraint_advances_over_many_tokens(compilers: list[Compiler]) -> None:
    for compiler, vocab_size in zip(compilers, VOCABS, strict=True):
        mask, expected = np.zeros((2, -(-vocab_size // 32)), np.int32)
        following, stepping = (compiler.compile(Grammar("regex", "[ab]*")) for _ in range(2))
        for token_id in b"abbaabab" * 4:
            assert stepping.accept([token_id]) == 1
            assert following.advance(token_id, mask, False)
            stepping.fill(expected)
            assert (mask == expected).all()
        following.rollback(20)
        stepping.rollback(20)
        assert place(following, vocab_size) == place(stepping, vocab_size)


def test_an_end_id_ends_the_advance(compilers: list[Compiler]) -> None:
    constraint = compilers[0].compile(Grammar("regex", "[ab]*"))
    mask = np.zeros(-(-VOCABS[0] // 32), np.int32)
    assert constraint.advance(ord("a"), mask, False)
    end_id = max(i for i in allowed_ids(constraint, VOCABS[0]) if i >= 256)
    assert not constraint.advance(end_id, mask, False)
    assert (constraint.done, constraint.num_accepted) == (True, 2)
    constraint.rollback(1)
    assert (constraint.done, constraint.num_accepted) == (False, 1)


def test_a_token_that_no_mask_allows_raises(compilers: list[Compiler]) -> None:
    constraint = compilers[0].compile(Grammar("regex", PATTERN))
    with pytest.raises(ConstraintError, match="the grammar"):
        constraint.advance(ord("q"), np.zeros(-(-VOCABS[0] // 32), np.int32), False)


@pytest.mark.parametrize("compilers", ["llguidance"], indirect=True)
def test_a_library_that_fails_amid_a_multi_step_raises_at_the_next_call(
    compilers: list[Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = import_module("llguidance").LLParserLimits(step_max_items=40)
    monkeypatch.setattr("infer.text.grammar.grammar_backends.llguidance_limits", lambda _library, _text: tight)
    following = compilers[0].compile(Grammar("grammar", 'start: "x" s\ns: s s | "a" | "b"'))
    mask, text = np.zeros(-(-VOCABS[0] // 32), np.int32), b"x" + b"ab" * 12
    following.accept(text[:1])
    num_followed = next(index for index in range(1, len(text)) if not following.advance(text[index], mask, False))
    assert 1 < following.num_accepted == num_followed + 1 < len(text)
    assert (following.done, following.forced()) == (False, [])
    check_refused(lambda: following.fill(mask), "cannot be followed further", ConstraintError)


def test_a_mask_that_cannot_be_filled_ends_the_advance_and_raises_when_requested() -> None:
    class Broken(Constraint):
        num_accepted, done, rollback = 0, False, None

        def fill(self, mask: np.ndarray) -> None:
            raise ConstraintError("too complex")

        def accept(self, token_ids: list[int]) -> int:
            self.num_accepted += len(token_ids)
            return len(token_ids)

        def forced(self) -> list[int]:
            return []

    constraint, mask = Broken(), np.zeros(4, np.int32)
    assert constraint.advance(1, mask, True)
    assert not constraint.advance(1, mask, False)
    assert constraint.num_accepted == 2


TEMPERATURES = (0.0, 1.0, 2.0)
# A random model seldom closes a bracket or a string.
CLOSING: dict[int, float] = {EOS: 3.0, **{ord(closer): 3.0 for closer in '"}],'}, ord("0"): -1.0}
WAYS = (Way("ngram"), Way("half", 7), Way("none", 1, capture=False), Way("random"))


def case_of(seed: int, temperature: float | None = None) -> Case:
    temperature = TEMPERATURES[seed % 3] if temperature is None else temperature
    limits = {"max_new_tokens": 6 + seed % 42, "min_new_tokens": seed % 5}
    fixed = {"seed": seed, "logit_bias": CLOSING, "frequency_penalty": 0.3}
    params = SamplingParams(json_schema=schema_text(seed, wide=True), temperature=temperature, **limits, **fixed)
    return Case(f"schema {seed}", tuple(b'{"a b": [1, "x"]}'[: 1 + seed % 17]), params)


def check(world: World, case: Case, result: GenerationResult) -> None:
    schema = json.loads(str(case.params.json_schema))
    assert result.error is None
    ids = [token_id for token_id in result.token_ids if token_id not in world.tokenizer.eos_token_ids]
    written = b"".join(world.tokenizer.token_bytes[token_id] for token_id in ids)
    if not result.grammar_complete:
        assert result.finish_reason == "length"
        constraint = constraint_of(world, case.params)
        assert constraint is not None
        assert constraint.accept(result.token_ids) == len(result.token_ids)
        written += walk(constraint, world.tokenizer, VOCAB_SIZE, random.Random(0))
    else:
        assert written.decode() == result.text
    jsonschema.validate(json.loads(written), schema)


def run_all_of(world: World, cases: list[Case]) -> list[GenerationResult]:
    """Run cases without drafts, then with drafts, alone and in a batch. All give the same answers."""
    plain = [run_alone(world, case, Way()) for case in cases]
    said = [result.token_ids for result in plain]
    for index, case in enumerate(cases):
        way = WAYS[index % len(WAYS)]
        assert Outcome.of(run_alone(world, case, way, said[index])) == Outcome.of(plain[index]), f"{case.name}, {way}"
    together = run_batch(world, cases, Way("half"), 4, said)
    assert [Outcome.of(result) for result in together] == [Outcome.of(result) for result in plain]
    for case, result in zip(cases, plain, strict=True):
        check(world, case, result)
    return plain


def test_texts_of_random_schemas_validate_or_can_be_completed(world: World) -> None:
    results = run_all_of(world, [case_of(seed) for seed in range(24)])
    complete = [result.grammar_complete for result in results]
    assert 4 < sum(map(bool, complete)) < len(complete), "some are complete and some are cut"
    assert any(result.stats.tokens_forced for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_texts_of_many_random_schemas_validate_or_can_be_completed(world: World, temperature: float) -> None:
    """There are 60 schemas with one temperature each, or with INFER_TESTS=all 500 with every temperature."""
    seeds = range(1000, 1500) if IS_WHOLE else range(1000 + TEMPERATURES.index(temperature), 1060, len(TEMPERATURES))
    results = run_all_of(world, [case_of(seed, temperature) for seed in seeds])
    assert sum(bool(result.grammar_complete) for result in results) > 0.3 * len(results)


def test_the_check_would_see_a_text_that_breaks_its_schema(world: World) -> None:
    case = next(case for case in map(case_of, range(24)) if run_alone(world, case, Way()).grammar_complete)
    broken = replace(run_alone(world, case, Way()), token_ids=[*b"{]"], text="{]")
    with pytest.raises(ValueError, match="Expecting"):
        check(world, case, broken)


LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, merges=[("a", "b"), ("x", "1"), ("w", "o")])
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, 300)


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


@pytest.mark.slow(cases=1)
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
    check_refused(lambda: constraint.accept(b"a" * 60), "max is 4000", ConstraintError)
