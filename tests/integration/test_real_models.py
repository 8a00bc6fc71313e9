"""SmolLM2-135M and Gemma-3-270M against `transformers`, and SmolLM2 in ranks, sessions, and between alarms."""

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE, usual_or_all
from infer import LLM, SamplingParams, load_model, load_tokenizer
from infer.cli import main, model_loading
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.operands.step import Chunk
from infer.compute.ops import backend_of
from infer.engine.runner.runner import Runner
from infer.engine.tensor_parallel.ranks import Transport
from infer.files import open_checkpoint
from oracle import make_oracle, mean_kl, oracle_logits
from programs import Programs
from test_published_models import TEXT as SOME_TEXT
from test_tensor_parallel import ranks_of, runner_of
from watched import python_command

pytestmark = pytest.mark.slow

TEXT = SOME_TEXT * 3
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


@pytest.mark.slow(rest=1)
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


@pytest.mark.slow(rest=1)
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


def test_text_with_speculation_and_in_batches_is_that_of_plain_steps(smollm2: LLM) -> None:
    """The steps in batches are those of `transformers`, by the test above."""
    copying = "Repeat: the cat sat on the mat and the dog sat on the log.\nthe cat sat on the mat and the dog"
    num_greedy = usual_or_all(3, 7)
    prompts = [*PROMPTS[:num_greedy], copying, *PROMPTS[:4]]
    each = [
        *[SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)] * (num_greedy + 1),
        SamplingParams(temperature=0.8, seed=1, max_new_tokens=32),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=2, max_new_tokens=32),
        SamplingParams(temperature=1.0, frequency_penalty=0.5, min_new_tokens=8, seed=3, max_new_tokens=32),
        SamplingParams(temperature=0.9, regex="[a-z]{3,9}( [a-z]{2,9}){3,6}", seed=4, max_new_tokens=32),
    ]
    asked = list(zip(prompts, each, strict=True))
    plain = [smollm2.generate(prompt, params) for prompt, params in asked]
    drafted = [smollm2.generate(prompt, params, speculation="ngram") for prompt, params in asked]
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.stats.drafts_accepted for result in drafted) > 0
    for speculation in (None, "ngram"):
        together = smollm2.generate_all(prompts, each, batch_size=3, speculation=speculation)
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


# Keys and values in fewer bits


NUM_TOKENS = 512
NUM_COMPARED = 128  # the last tokens, which see most of the others
MOST = {"f16": 2e-6, "q8": 1e-3, "q4": 2e-2}  # mean KL against f32
LONG_TEXT = " ".join(topics["assignment"].split())


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"][: 2 if IS_WHOLE else 1])
@torch.inference_mode()
def test_fewer_bits_change_little(name: str) -> None:
    model, _ = load_model(name, max_seq_len=NUM_TOKENS)
    token_ids = load_tokenizer(name).encode(LONG_TEXT)[:NUM_TOKENS]
    logits = {}
    for kv_type in ("f32", *MOST):
        context = Runner(replace(model, kv_type=kv_type), NUM_TOKENS, capture=False)
        context.cache.reserve(0, len(token_ids))
        with backend_of(model.device).threads():
            logits[kv_type] = context.forward([Chunk(0, token_ids, num_drafts=NUM_COMPARED - 1)]).clone()
    found = {kv_type: mean_kl(logits["f32"], logits[kv_type]) for kv_type in MOST}
    assert all(0 < found[kv_type] <= most for kv_type, most in MOST.items()), found
    assert found["f16"] < found["q8"] < found["q4"], found


# Ranks


PROMPT, NUM_NEW = list(range(100, 120)), 12
CASES: tuple[tuple[int, Transport], ...] = (2, "memory"), (4, "gloo"), (4, "memory"), (2, "gloo")
CASES = CASES[: 4 if IS_WHOLE else 1]


def logits_of(runner: Runner) -> Tensor:
    """Return the logits of a prompt, and after each of a dozen greedy tokens."""
    logits = [runner.append(0, PROMPT, len(PROMPT))]
    for _ in range(NUM_NEW):
        logits.append(runner.append(0, [int(logits[-1][-1].argmax())], 1))
    return torch.cat(logits)


def test_smollm2_has_the_bits_of_one_rank(smollm2_path: Path) -> None:
    """Its 9 heads and 3 heads of keys are divided unequally between two ranks."""
    set_num_threads(1)
    expected = logits_of(runner_of(smollm2_path))
    for size, transport in CASES:
        ranks = ranks_of(smollm2_path, size, transport)
        try:
            runner = runner_of(smollm2_path, ranks, capture=transport == "memory")
            assert torch.equal(logits_of(runner), expected)
            if (size, transport) == (2, "memory"):
                check_commands(runner)
        finally:
            ranks.close()


def check_commands(runner: Any) -> None:
    """Check that a recorded layer quantises its results and copies nothing. Ranks only wait after its products."""
    commands = runner._captured._recording.commands
    labels = [command.label for command in commands if command.label.startswith("L0.")]
    assert [label.removeprefix("L0.") for label in labels if "matmul" not in label] == [
        *("qkv.normalize", "qkv.barrier", "attend.rotate", "attend.few", "attend.many", "attend.merge"),
        *("attend.barrier", "output.barrier", "output.add", "gate_up.normalize", "gate_up.barrier"),
        *("down.barrier", "down.add"),
    ]


# Sessions


QUESTIONS = ("What is the capital of France?", "And of Italy?", "Write a line about both, with an emoji.")
GREEDY = SamplingParams(temperature=0, max_new_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_new_tokens=40)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_turns_equal_chats_of_the_whole_conversation(smollm2: LLM, tmp_path: Path, params: SamplingParams) -> None:
    session, messages = smollm2.session(), list[dict[str, str]]()
    for question in QUESTIONS:
        cached = session.num_cached_tokens
        result = session.send(question, params)
        messages.append({"role": "user", "content": question})
        prompt = session.token_ids[: -len(result.token_ids)]
        assert smollm2.generate(prompt, params).token_ids == result.token_ids
        assert smollm2.tokenizer.decode(prompt, False) == smollm2.tokenizer.render_chat_template(messages)
        assert (result.reused_tokens, result.dropped_tokens) == (cached, 0)
        messages.append({"role": "assistant", "content": result.text})
        session.save(tmp_path / "talk")
        session = smollm2.load_session(tmp_path / "talk")
    assert session.messages == messages


def test_likely_text_has_likely_tokens(smollm2: LLM) -> None:
    def mean(text: str) -> float:
        found = [entry.logprob for entry in smollm2.prompt_logprobs(text) if entry is not None]
        return sum(found) / len(found)

    assert mean("The capital of France is Paris.") > mean("The capital of France is purple.") > mean("of is The The of")


# Interruptions


SCRIPT = """
import random, signal, sys
from infer import LLM, SamplingParams
from infer.compute import ops

class StopError(Exception): pass

def stop(number, frame): raise StopError

ops.set_num_threads(2)
llm = LLM(sys.argv[1], max_seq_len=512)
params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
prompt = "The history of Rome begins"
expected = llm.generate(prompt, params).token_ids
signal.signal(signal.SIGALRM, stop)
draw, num_stopped = random.Random(1), 0
for _ in range(24):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.002, 0.03))
            llm.generate(prompt, params)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except StopError:
        num_stopped += 1
    assert llm.generate(prompt, params).token_ids == expected, num_stopped
print(num_stopped)
"""


def test_after_an_alarm_the_next_generation_gives_the_same_tokens(programs: Programs, smollm2_path: Path) -> None:
    done = programs.run(SCRIPT, smollm2_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 0


# Traces


OPTIONS = {
    "defaults": ["--seed", "3"],
    "everything": [
        *["--seed", "5", "--temperature", "1.3", "--top-k", "50", "--top-p", "0.8", "--min-p", "0.02"],
        *["--frequency-penalty", "0.4", "--presence-penalty", "0.3", "--logit-bias", "4461=-inf"],
    ],
    "preset": ["--preset", "seed", "--seed", "3"],
    "greedy": ["--preset", "seed", "--temperature", "0"],
    "plain greedy": ["--temperature", "0"],
    "chat": ["--chat", "--system", "Be brief.", "--seed", "1"],
}


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_step_is_the_one_that_generate_took(
    name: str, smollm2: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loading, "load_model", lambda options: smollm2)
    options = ["--prompt", "Roses are red, violets are", *OPTIONS[name], "--json", "-q"]
    assert main(["generate", "-n", "5", *options]) == 0
    token_ids = json.loads(capsys.readouterr().out)["token_ids"]
    for step in {1, 2, len(token_ids)}:
        assert main(["sample-trace", "--step", str(step), *options]) == 0
        trace = json.loads(capsys.readouterr().out)
        assert trace["token_id"] == token_ids[step - 1]
