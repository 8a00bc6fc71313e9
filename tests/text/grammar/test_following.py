"""`advance` has the results of the methods that it replaces."""

import random
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from byte_tokenizer import write_byte_tokenizer
from constraint_walks import allowed_ids
from infer.errors import ConstraintError
from infer.text.grammar.constraint import Constraint
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler, make_compiler
from infer.text.tokenizer import Tokenizer

VOCABS = (300, 330, 700)  # more than the tokenizer's ids: 0, 1 and many words of masks allow nothing
PATTERN = "(?:[ab]{2,5} bar abc ){2}x?|[xy]+"


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def compilers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Compiler]:
    pytest.importorskip(request.param)
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, merges=[("a", "b"), ("b", "a"), ("ba", "r"), ("x", "y")])
    tokenizer = Tokenizer.from_folder(folder)
    return [make_compiler(tokenizer, vocab_size, backend=request.param) for vocab_size in VOCABS]


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
    monkeypatch.setattr("infer.text.grammar.llguidance.llguidance_limits", lambda _library, _text: tight)
    following = compilers[0].compile(Grammar("grammar", 'start: "x" s\ns: s s | "a" | "b"'))
    mask, text = np.zeros(-(-VOCABS[0] // 32), np.int32), b"x" + b"ab" * 12
    following.accept(text[:1])
    num_followed = next(index for index in range(1, len(text)) if not following.advance(text[index], mask, False))
    assert 1 < following.num_accepted == num_followed + 1 < len(text)
    assert (following.done, following.forced()) == (False, [])
    with pytest.raises(ConstraintError, match="cannot be followed further"):
        following.fill(mask)


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
