"""The figures of `check_neighbours`, `check_overload` and `check_first_answers`, and of a request's flow."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from cases import cases
from count_house import LIMITS, ROOT
from extent import IS_WHOLE
from house.flow import count_flow
from house.limits import problems, read_limits
from infer.llm import LLM
from watched import python_command

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from check_first_answers import ask
from check_neighbours import MISDEEDS, measure, table
from check_overload import Client, figures
from first_questions import QUESTIONS, has_word, repeats_itself
from server_process import running

pytestmark = pytest.mark.slow

LEAST_RATIO = 0.25  # of the rate without neighbours: other tests run at the same time
MOST_GAPS = 40.0  # times the largest gap without neighbours


if IS_WHOLE:  # takes some minutes

    def test_a_stream_goes_on_beside_each_misdeed(smollm2_path: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text("loud sk-loud\nquiet sk-quiet\n")
        keys.chmod(0o600)
        code = "import sys; from infer.cli import main; sys.exit(main())"
        options = ["--model", smollm2_path, "--port", "PORT", "--threads", 1, "--api-key-file", keys]
        with running(python_command(code, "serve", *options, seconds=1800), tmp_path / "log") as server:
            found = measure(server, [], rounds=1)
        assert set(found) == {misdeed.name for misdeed in MISDEEDS}
        rows, _ = table(found)
        (alone,) = (row for row in rows if row["misdeed"] == "nothing")
        for row in rows:
            assert row["ratio"] >= LEAST_RATIO, row
            assert row["gap"] <= MOST_GAPS * alone["gap"], row


# Overload


GOOD = Client(0.0, [], 0.0, 10.0, 11.0)
LATER = Client(0.0, [59.0, 20.0], 80.0, 105.0, 106.0)


@pytest.mark.slow(rest=1)
@cases(
    "broken",
    Client(0.0, [20.0, 5.0], 26.0, 30.0, 31.0),  # told to wait twice
    Client(0.0, [], 0.0, 37.0, 38.0),  # late
    Client(0.0, error="cut"),
)
def test_a_promise_that_was_broken_is_counted(broken: Client) -> None:
    assert figures([GOOD, LATER], GOOD)["kept"] == 1.0
    found = figures([GOOD, LATER, broken, GOOD], GOOD)
    assert (found["kept"], found["errors"]) == (0.75, bool(broken.error))


# First questions


@cases("text words expected",
    ("It is Paris.", "Paris", True), ("PARIS", "Paris", True), ("Parisian", "Paris", False),
    ("14", "4|four", False), ("2+2=4.", "4|four", True), ("H2O is water", "H2O|H₂O", True), ("", "ice", False),
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


# The flow of a request


def test_every_request_keeps_the_limits_of_its_flow() -> None:
    numbers, limits = count_flow(), read_limits((ROOT / LIMITS).read_text(encoding="utf-8"), flow=True)
    messages = problems(numbers, limits)
    if sys.version_info >= (3, 12):  # these inline comprehensions, so requests call fewer functions
        messages = {name: line for name, line in messages.items() if not limits[name].is_loose_for(numbers[name])}
    assert not messages, "\n".join(messages.values())
