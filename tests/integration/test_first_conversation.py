"""The first questions of a newcomer, at the settings of a fresh `infer chat`."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from infer.llm import LLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from check_first_answers import ask
from first_questions import QUESTIONS, has_word, repeats_itself

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("It is Paris.", "Paris", True), ("PARIS", "Paris", True), ("Parisian", "Paris", False),
        ("14", "4|four", False), ("2+2=4.", "4|four", True), ("H2O is water", "H2O|H₂O", True), ("", "ice", False),
    ],
)  # fmt: skip
def test_a_word_counts_as_a_whole(text: str, words: str, expected: bool) -> None:
    assert has_word(text, words) is expected


def test_a_run_of_eight_words_three_times_is_a_repetition() -> None:
    assert repeats_itself("Paris, la femme au martyre. " * 12)
    assert not repeats_itself("Red, blue and yellow. " * 3)


def test_the_default_settings_answer_simple_questions_and_no_answer_reaches_the_limit(smollm2_path: Path) -> None:
    """With the publisher's temperature of 0.2, 53 of 72 answers are right, and 9 reach the limit."""
    llm = LLM(smollm2_path, max_seq_len=1024, threads=1)
    trials = ask(llm, QUESTIONS, llm.default_params(is_chat=True), seeds=1)
    outcomes = Counter(trial.outcome for trial in trials)
    assert (outcomes["cut"], outcomes["repeated"]) == (0, 0), trials
    assert outcomes["right"] >= 20, [trial for trial in trials if trial.outcome != "right"]


def test_the_first_question_has_one_answer_for_any_number_of_threads_and_any_seed(smollm2_path: Path) -> None:
    message = {"role": "user", "content": "What is the capital of France?"}
    answers = set()
    for threads in (1, 2):
        with LLM(smollm2_path, max_seq_len=1024, threads=threads) as llm:
            for seed in (0, 1):
                result = llm.chat([message], seed=seed)
                answers.add((result.text, result.finish_reason))
    ((text, reason),) = answers
    assert has_word(text, "Paris"), text
    assert reason == "eos"
