"""A process that has generated forks: parent, children and grandchildren go on, each with its own memory.

None waits for a thread that it has not. Each case is a process of its own, whose children an alarm ends if they hang.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from watched import LIMIT_SECONDS, python_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only")

PRELUDE = """
import multiprocessing, os, signal, sys, threading
import torch
from infer import LLM, SamplingParams
from infer.grammar.trial import trial_lane
from infer.backends.cpu import compiled, packed_weight
from infer.sampling.history import History
from infer.tokenizer import template_process

folder, seconds = sys.argv[1], 60
llm = LLM(folder, threads=2)
GREEDY = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, seed=1, max_new_tokens=30, ignore_eos=True)
PROMPTS = ["hello there", "and now for something", "one more"]
EXPECTED = {params: [llm.generate(prompt, params).token_ids for prompt in PROMPTS] for params in (GREEDY, PENALISED)}

def check():
    for params, expected in EXPECTED.items():
        assert [llm.generate(prompt, params).token_ids for prompt in PROMPTS] == expected

def in_child(function):
    # Runs it there; the parent gets its process.
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(seconds)
        function()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

def join(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def use_openmp():
    torch.set_num_threads(2)
    torch.randn(1 << 20).exp().sum()
"""


def run(folder: Path, code: str) -> str:
    done = subprocess.run(
        python_command(PRELUDE + code, folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS + 30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_child_writes_into_its_cache_the_parent_does_not_read(folder: Path) -> None:
    """A session's row, and one that waits for the next request, filled by both after the fork."""
    run(
        folder,
        """
prompt = [index * 7 % 90 + 33 for index in range(100)]
expected = llm.generate(prompt, GREEDY).token_ids
session = llm.session()
session.append(prompt)

def go_on():
    session.rewind(60)
    session.append([40] * 60)
    session.generate(PENALISED)
    check()

join(in_child(go_on))
assert session.generate(GREEDY).token_ids == expected
check()
""",
    )


def test_parent_children_and_grandchildren_answer_at_the_same_time(folder: Path) -> None:
    run(
        folder,
        """
def both():
    grandchild = in_child(check)
    check()
    join(grandchild)

children = [in_child(both) for _ in range(3)]
check()
for child in children:
    join(child)
""",
    )


def test_a_fork_while_another_thread_answers_leaves_the_child_able_to(folder: Path) -> None:
    run(
        folder,
        """
ended, wrong = threading.Event(), []

def answer():
    while not ended.is_set():
        try:
            check()
        except BaseException as error:
            wrong.append(error)
            return

threads = [threading.Thread(target=answer) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(8):
    join(in_child(check))
ended.set()
for thread in threads:
    thread.join()
assert not wrong, wrong
""",
    )


@pytest.mark.parametrize("form", ["{}", '{"regex": "[a-z]{25}"}'], ids=["free", "constrained"])
def test_a_stream_that_is_open_at_the_fork_goes_on_in_both(folder: Path, form: str) -> None:
    run(
        folder,
        f"""
params = SamplingParams(repetition_penalty=1.3, seed=2, max_new_tokens=25, ignore_eos=True, **{form})
expected = llm.generate("hello", params).token_ids
stream = llm.stream("hello", params)
first = [next(stream).token_id for _ in range(9)]

def finish():
    assert first + [piece.token_id for piece in stream] == expected

child = in_child(finish)
finish()
join(child)
""",
    )


def test_a_pool_of_forked_processes_answers(folder: Path) -> None:
    run(
        folder,
        """
def answer(prompt):
    return llm.generate(prompt, PENALISED).token_ids

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map_async(answer, PROMPTS).get(seconds) == EXPECTED[PENALISED]
""",
    )


def test_torch_does_not_wait_in_a_child_for_threads_that_it_has_not(folder: Path) -> None:
    """In a request, and with what a request gives back."""
    run(
        folder,
        """
use_openmp()

def compute():
    History(4, 50_000, 50_000)
    use = llm.session()
    use.append([40] * 300)
    use.fork().generate(PENALISED)
    assert llm.generate("hello", SamplingParams(logprobs=3, seed=1)).logprobs
    llm.logits([40] * 300).log_softmax(-1).exp().sum()
    torch.full((1 << 20,), 1.0).sum()
    check()

join(in_child(compute))
assert torch.get_num_threads() == 2
with torch.inference_mode():
    torch.randn(1 << 20).exp().sum()
""",
    )


def test_a_lock_that_another_thread_holds_at_the_fork_is_free_in_the_child(folder: Path) -> None:
    """Held for a moment, for which a fork may wait."""
    run(
        folder,
        """
def hold(lock, held):
    with lock:
        held.set()
        ended.wait(0.1)

def use_all():
    check()
    LLM(folder)
    llm.generate("a", SamplingParams(regex="[a-z]{4}", max_new_tokens=5))
    llm.chat([{"role": "user", "content": "hello"}], GREEDY)

ended = threading.Event()
use_all()
host = llm._host
locks = [compiled._lock, packed_weight._pieces._taking, host._compiler._lock, host.open._changing]
locks += [host._answer_grammars._lock, host._probes._lock]
for lane in (trial_lane("llguidance"), template_process._lane()):
    locks += [lane._changed, lane._children[-1]._lock]
for lock in locks:
    held = threading.Event()
    thread = threading.Thread(target=hold, args=(lock, held))
    thread.start()
    held.wait()
    child = in_child(use_all)
    thread.join()
    join(child)
use_all()
""",
    )


def test_a_long_held_lock_is_free_in_the_child_at_once(folder: Path) -> None:
    run(
        folder,
        """
held, ended = threading.Event(), threading.Event()

def hold():
    with template_process._lane()._children[-1]._lock, llm._host._compiler._lock:
        held.set()
        ended.wait()

def use():
    llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    llm.generate("a", SamplingParams(regex="[a-z]{4}", max_new_tokens=5))

thread = threading.Thread(target=hold)
thread.start()
held.wait()
join(in_child(use))
ended.set()
thread.join()
use()
""",
    )


def test_parent_and_children_never_share_the_process_of_their_templates(folder: Path) -> None:
    run(
        folder,
        """
def render(name):
    for index in range(20):
        assert template_process.render("{{ x }}", {"x": f"{name} {index}"}) == f"{name} {index}"

render("before")
before = template_process._lane()._children[-1]._process.pid
children = [in_child(lambda name=name: render(name)) for name in ("first", "second")]
render("parent")
for child in children:
    join(child)
assert template_process._lane()._children[-1]._process.pid == before
""",
    )


def test_parent_and_child_load_models_after_the_fork_into_memory_of_their_own(folder: Path) -> None:
    run(
        folder,
        """
def load():
    for _ in range(3):
        other = LLM(folder)
        assert [other.generate(prompt, GREEDY).token_ids for prompt in PROMPTS] == EXPECTED[GREEDY]

child = in_child(load)
load()
join(child)
check()
""",
    )
