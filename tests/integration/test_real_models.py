"""SmolLM2-135M and Gemma-3-270M against `transformers` on the same weights."""

import platform
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

from extent import IS_WHOLE, usual_or_all
from infer import LLM, SamplingParams
from infer.compute.operands.step import Chunk
from infer.compute.ops import backend_of
from infer.engine.runner.runner import Runner
from infer.files import open_checkpoint
from oracle import make_oracle, mean_kl, oracle_logits
from watched import python_command

pytestmark = pytest.mark.slow

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the Moon; 3.14159 is close to pi.\n"
    "def add(a, b):\n    return a + b\n\nÜber den Wolken ist die Freiheit wohl grenzenlos. 日本語も少し。 "
) * 3
PROMPTS = [
    *("Once upon a time", "The capital of France is", "def fibonacci(n):", "Water boils at", "My favourite colour is"),
    *("In the beginning", "The three laws of robotics are", "1, 2, 3, 4,", "Dear Sir or Madam,", "Shakespeare wrote"),
    *("Photosynthesis is the process by which", "It was a dark and stormy night", "import numpy as np\n", "La vie est"),
    *("Q: What is 2 + 2?\nA:", "The recipe needs flour, sugar and", "Breaking news:", "To be or not to be,"),
    *("An apple a day", "The meaning of life"),
]


NUM_LONG = 4  # prompts whose answers are of full length; the others' have a quarter of it, or half
LENGTHS = {"smollm2": (80, 16), "gemma3-270m": (16, 8)}
TIE = 1e-3


class Oracle(NamedTuple):
    name: str
    model: Any


@pytest.fixture(scope="module", params=LENGTHS)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return Oracle(request.param, make_oracle(open_checkpoint(request.param)))


@pytest.fixture(scope="module")
def pair(oracle: Oracle) -> tuple[Any, LLM]:
    return oracle.model, LLM(oracle.name, dtype="float32", max_seq_len=1024)


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM("smollm2", max_seq_len=1024)


def test_float32_logits_equal_transformers(pair: tuple[Any, LLM]) -> None:
    oracle, llm = pair
    token_ids = llm.tokenizer.encode(TEXT)[:300]
    expected, logits = oracle_logits(oracle, token_ids), llm.logits(token_ids)
    assert (expected - logits).abs().max() <= 5e-4
    assert mean_kl(expected, logits) <= 1e-9
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert torch.equal(expected.argmax(-1)[clear], logits.argmax(-1)[clear])


def test_a_wrong_weight_would_be_seen(pair: tuple[Any, LLM]) -> None:
    """This is a check of the check: one scaled norm changes the logits by much more than the tolerance."""
    _, llm = pair
    token_ids = llm.tokenizer.encode(TEXT)[:50]
    logits = llm.logits(token_ids)
    norm = llm.model.layers[3].feed_forward.norm.weight
    norm.mul_(1.01)
    try:
        assert (llm.logits(token_ids) - logits).abs().max() > 5e-4
    finally:
        norm.div_(1.01)


def test_greedy_text_equals_transformers_for_twenty_prompts(oracle: Oracle) -> None:
    """If two logits of the oracle are within TIE, either token is right. Such ties are counted and bounded."""
    llm, (full, short) = LLM(oracle.name, max_seq_len=1024), LENGTHS[oracle.name]
    lengths = [full if index < NUM_LONG or IS_WHOLE else short for index in range(len(PROMPTS))]
    each = [SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True) for length in lengths]
    ties = 0
    for prompt, result in zip(PROMPTS, llm.generate_all(PROMPTS, each), strict=True):
        prompt_ids = llm.tokenizer.encode(prompt)
        # Greedy decoding samples the likeliest token after each prefix, which one pass over the whole text shows.
        logits = oracle_logits(oracle.model, prompt_ids + result.token_ids)[len(prompt_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        behind = logits.max(-1).values - chosen
        assert behind.max() <= TIE, f"{prompt!r}: token {int(behind.argmax())} is {float(behind.max()):.4f} behind"
        ties += int((behind > 0).sum())
    assert ties <= 2


def test_a_chain_of_the_table_gives_the_tokens_of_uncaptured_steps(smollm2: LLM) -> None:
    """The chain passes the end of a page."""
    llm, num_tokens = smollm2, usual_or_all(70, 400)
    ids = llm.tokenizer.encode(PROMPTS[10])
    chained = llm.generate(ids, SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)).token_ids
    context = Runner(llm.model, 512, capture=False)
    tokens, pending = list[int](), list(ids)
    with torch.inference_mode(), backend_of(llm.model.device).threads():
        while len(tokens) < num_tokens:
            context.reserve(0, len(pending))
            tokens.append(int(context.forward([Chunk(0, pending)])[0].argmax()))
            context.commit(0, len(pending))
            pending = tokens[-1:]
    assert chained == tokens


def test_text_with_speculation_and_in_batches_is_that_of_plain_steps(smollm2: LLM) -> None:
    """The steps in batches are those of `transformers`, by the test above."""
    llm = smollm2
    copying = "Repeat: the cat sat on the mat and the dog sat on the log.\nthe cat sat on the mat and the dog"
    prompts = [*PROMPTS[:7], copying, *PROMPTS[:4]]
    each = [
        *[SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)] * 8,
        SamplingParams(temperature=0.8, seed=1, max_new_tokens=32),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=2, max_new_tokens=32),
        SamplingParams(temperature=1.0, frequency_penalty=0.5, min_new_tokens=8, seed=3, max_new_tokens=32),
        SamplingParams(temperature=0.9, regex="[a-z]{3,9}( [a-z]{2,9}){3,6}", seed=4, max_new_tokens=32),
    ]
    asked = list(zip(prompts, each, strict=True))
    plain = [llm.generate(prompt, params) for prompt, params in asked]
    drafted = [llm.generate(prompt, params, speculation="ngram") for prompt, params in asked]
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.stats.drafts_accepted for result in drafted) > 0
    for speculation in (None, "ngram"):
        together = llm.generate_all(prompts, each, batch_size=3, speculation=speculation)
        for one, other in zip(together, plain, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)


def test_smollm2_answers_a_question() -> None:
    llm = LLM("smollm2")
    result = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    assert (result.text, result.finish_reason) == ("The capital of France is Paris.", "eos")


def test_a_process_that_finds_its_kernels_answers_without_a_compiler() -> None:
    code = """
import sys
from infer import LLM, SamplingParams
llm = LLM("smollm2", max_seq_len=128)
print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_new_tokens=24)).text)
print(sorted({"numba", "llvmlite"} & set(sys.modules)))
"""
    cold, warm = (subprocess.run(python_command(code), capture_output=True, text=True, check=False) for _ in range(2))
    assert (cold.returncode, warm.returncode, warm.stderr) == (0, 0, "")
    assert warm.stdout.splitlines()[:-1] == cold.stdout.splitlines()[:-1]
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert warm.stdout.splitlines()[-1] == "[]"
