"""The examples run as a reader would run them, and print the answers of `LLM`, to the letter."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from infer import LLM, SamplingParams
from watched import script_command

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 30
MAX_LINES_OF_SEARCH = 48  # it embeds, ranks and answers
NUM_TOKENS = 100  # more than a page of the cache
# The tests below compare the output of these with the library's answers. `test_ray` runs `ray_batch.py`.
COMPARED = ("chat.py", "custom_loop.py", "generate.py", "ray_batch.py", "search.py", "stream.py")

# What each program's stdout must contain, as a regular expression.
PROMISES = {
    "async_stream.py": r"(The best thing about .+\n){3}",
    "logits.py": r"perplexity \d+\.\d\d over \d+ tokens",
    "tools.py": r'calculate\(\{"operation": "\w+", "a": -?\d+, "b": -?\d+\}\) = -?\d+\n.+',
}


def run(name: str, *arguments: object) -> str:
    command, settings = script_command(EXAMPLES / name, *arguments), {"stdin": subprocess.DEVNULL, "text": True}
    done = subprocess.run(command, capture_output=True, check=False, **settings)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@cache
def load(path: Path) -> LLM:
    return LLM(path)


def test_every_example_is_run_and_short() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    assert [program.name for program in programs] == sorted([*PROMISES, *COMPARED])
    for program in programs:
        most = MAX_LINES_OF_SEARCH if program.name == "search.py" else MAX_LINES
        assert len(program.read_text(encoding="utf-8").splitlines()) < most, program.name


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_the_example_keeps_its_promise(name: str, smollm2_path: Path) -> None:
    out = run(name, smollm2_path)
    assert re.search(PROMISES[name], out), out


def test_the_search_answers_with_its_sources(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "cats.txt").write_text("Cats sleep on warm roofs.\n\nThey wake at night.")
    (tmp_path / "bridge.md").write_text("The bridge was built in 1932.")
    out = run("search.py", tmp_path, "Where do cats sleep?", smollm2_path, smollm2_path)
    assert re.search(r"\w[^[]*\n(\[\d\] (cats\.txt|bridge\.md)\n){3}$", out), out


def test_a_loop_of_ones_own_gives_the_tokens_of_generate(smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    llm = load(smollm2_path)
    result = llm.generate("Once upon a time", params)
    token_ids = [*llm.tokenizer.encode("Once upon a time"), *result.token_ids]
    assert run("custom_loop.py", smollm2_path, NUM_TOKENS) == llm.tokenizer.decode(token_ids) + "\n"


def test_a_long_text_and_a_long_stream_are_those_of_generate(smollm2_path: Path) -> None:
    llm = load(smollm2_path)
    greedy = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)
    assert run("generate.py", smollm2_path, NUM_TOKENS) == llm.generate("Once upon a time", greedy).text + "\n"
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_new_tokens=NUM_TOKENS, stop=["\n\n"])
    expected = llm.generate("The best thing about the sea is", sampled).text
    assert run("stream.py", smollm2_path, NUM_TOKENS) == expected + "\n"


def test_a_long_conversation_is_that_of_chat(smollm2_path: Path) -> None:
    """Its second answer depends on the first."""
    llm = load(smollm2_path)
    params = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)
    session = llm.session(system="You answer in one short sentence.")
    expected = ""
    for question in ("What is the capital of France?", "And what is it famous for?"):
        expected += f"> {question}\n{session.send(question, params).text}\n"
    assert run("chat.py", smollm2_path, NUM_TOKENS) == expected
    assert "Paris" in expected
