"""A process that has loaded a model forks: the parent continues unharmed, and the child's calls raise ClosedError.

A child may load another model. Each case is a separate process. An alarm ends its children if they hang.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from programs import Programs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only")]

PRELUDE = """
import asyncio, multiprocessing, os, signal, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
import torch
from infer import LLM, AsyncLLM, SamplingParams
from infer.errors import ClosedError
from infer.compute.backends.cpu.compile import addresses
from infer.compute.backends.cpu.weights import packed_weight
from infer.text.grammar.libraries import trial_lane
from infer.text.templates import chat_template

warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # of a fork, as it is meant here
folder = sys.argv[1]
GREEDY = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, seed=1, max_new_tokens=30, ignore_eos=True)
PROMPTS = ["hello there", "and now for something", "one more"]
ALL = GREEDY, PENALISED

def answers(llm):
    return {params: [llm.generate(prompt, params).token_ids for prompt in PROMPTS] for params in ALL}

def refusal(call):
    try:
        return f"{call()}: it was not refused"
    except ClosedError as error:
        return str(error)

def is_refused(call):
    assert "\\n" not in (said := refusal(call)) and "not to its fork: load it again here" in said, said

def check():
    assert answers(llm) == EXPECTED

def in_child(function):
    # Runs it there; the parent gets its process.
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(600)
        function()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

def join(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

llm = LLM(folder, threads=2)
EXPECTED = answers(llm)
"""


def run_by_itself(code: str, folder: Path) -> None:
    """Run Python without the thread that reports hangs, because a child that ends normally would wait for it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", PRELUDE + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run(programs: Programs, folder: Path) -> Callable[[str], None]:
    def run(code: str) -> None:
        done = programs.run(PRELUDE + code, folder)
        assert done.returncode == 0, done.stderr

    return run


@pytest.mark.slow(cases=1)
def test_every_call_of_a_child_is_refused_in_one_line(run: Callable[[str], None], tmp_path: Path) -> None:
    code = f"""
path = {str(tmp_path / "talk")!r}
session, other = llm.session(), llm.session()
session.send("hello", GREEDY)
session.save(path)
stream, unread, other_unread, read = (llm.stream("hello", LONG) for _ in range(4))
talk = other.stream("hello", LONG)
next(stream), next(talk)
whole = read.result
chat = [{{"role": "user", "content": "a"}}]
same = AsyncLLM(llm)
calls = [
    lambda: llm.generate("a"), lambda: llm.generate_all(["a"]), lambda: llm.stream("a"), lambda: llm.chat(chat),
    lambda: llm.session(), lambda: llm.load_session(path), lambda: llm.prompt_logprobs("a"), lambda: llm.trim(),
    lambda: llm.logits([1]), lambda: llm.tokenizer, lambda: llm.__enter__(),
    lambda: next(stream), lambda: next(unread), lambda: other_unread.run(), lambda: next(talk),
    lambda: session.send("a"), lambda: session.append("a"), lambda: session.rewind(1), lambda: session.fork(),
    lambda: session.save(path), lambda: session.load(path),
    lambda: asyncio.run(same.generate("a")), lambda: asyncio.run(anext(same.stream("a"))),
]

def ask_all():
    assert len(session.messages) == 2 and repr(llm) and repr(session) and repr(stream)
    for call in calls:
        is_refused(call)
    for each in (stream, unread, other_unread, talk):
        each.cancel()
        each.close()
    session.close()
    llm.close()

def ask(prompt):
    is_refused(lambda: llm.generate(prompt, PENALISED))

join(in_child(ask_all))
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map_async(ask, PROMPTS).get()
assert [piece.token_id for piece in stream] == whole.token_ids[1:]
assert len(list(talk)) == 299
assert session.send("go on", GREEDY).token_ids
check()
"""
    run(code)


def test_a_fork_while_other_threads_answer_harms_no_answer(run: Callable[[str], None]) -> None:
    code = """
ended = threading.Event()

def answer():
    while not ended.is_set():
        check()

with ThreadPoolExecutor(2) as threads:
    asked = [threads.submit(answer) for _ in range(2)]
    for _ in range(6):
        join(in_child(lambda: is_refused(lambda: llm.generate("a"))))
    ended.set()
for each in asked:
    each.result()
"""
    run(code)


def test_a_child_that_ends_as_programs_do_ends_at_once(folder: Path) -> None:
    """Its parent's objects are still open in it, and functions of `atexit` and finalizers run.

    The program runs without the thread that reports hangs, because a child that ends normally would wait for it.
    """
    code = """
session, stream = llm.session(), llm.stream("hello", LONG)
talk = session.stream("hello", LONG)
next(stream), next(talk)
child = os.fork()
if child == 0:
    signal.alarm(600)
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 7, status
check()
stream.close(), talk.close()
"""
    run_by_itself(code, folder)


def test_parent_and_child_load_models_after_the_fork_into_memory_of_their_own(run: Callable[[str], None]) -> None:
    """So does a grandchild, which was forked while its parent answered."""
    code = """
parent = os.getpid()

def load():
    for _ in range(2):
        other = LLM(folder)
        assert answers(other) == EXPECTED
    if os.getpid() != parent:
        is_refused(lambda: llm.generate("a"))
    grandchild = in_child(lambda: (is_refused(lambda: other.generate("a")), LLM(folder).generate("a", GREEDY)))
    assert answers(other) == EXPECTED
    join(grandchild)

children = [in_child(load) for _ in range(2)]
load()
for child in children:
    join(child)
check()
"""
    run(code)


def test_an_unused_model_may_be_loaded_after_a_fork_beside_openmp(run: Callable[[str], None]) -> None:
    """OpenMP's threads exist only in the parent, and torch in the child does not wait for them."""
    code = """
torch.set_num_threads(2)
torch.randn(1 << 20).exp().sum()

def compute():
    other = LLM(folder)
    other.generate("hello", SamplingParams(logprobs=3, seed=1))
    other.logits([40] * 300).log_softmax(-1).exp().sum()
    torch.full((1 << 20,), 1.0).sum()
    assert answers(other) == EXPECTED

join(in_child(compute))
assert torch.get_num_threads() == 2
with torch.inference_mode():
    torch.randn(1 << 20).exp().sum()
"""
    run(code)


def test_a_lock_that_another_thread_holds_at_the_fork_is_free_in_the_child(run: Callable[[str], None]) -> None:
    """A lock is held for a moment, so that a fork may wait for it, or for long, by a thread that asks a process."""
    code = """
def hold(lock, held, ended, most):
    with lock:
        held.set()
        ended.wait(most)

def use_all(llm):
    llm.generate("a", SamplingParams(regex="[a-z]{4}", max_new_tokens=5))
    llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert answers(llm) == EXPECTED

use_all(llm)
lanes = trial_lane("llguidance"), chat_template._lane()
short = [addresses._lock, packed_weight._pieces._taking, *(lane._changed for lane in lanes)]
long = [lane._children[-1]._lock for lane in lanes]
for lock, most in [*((lock, 0.1) for lock in short), *((lock, None) for lock in long)]:
    held, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold, args=(lock, held, ended, most))
    thread.start()
    held.wait()
    join(in_child(lambda: use_all(LLM(folder))))
    ended.set()
    thread.join()
use_all(llm)
"""
    run(code)


@pytest.mark.slow(cases=1)
def test_parent_and_children_never_share_the_process_of_their_templates(run: Callable[[str], None]) -> None:
    code = """
def render(name):
    for index in range(20):
        assert chat_template.render("{{ x }}", {"x": f"{name} {index}"}) == f"{name} {index}"

def render_in_child(name):
    assert not os.path.exists(f"/proc/self/fd/{pipe}")
    render(name)

render("before")
process = chat_template._lane()._children[-1]._process
before, pipe = process.pid, process.stdin.fileno()
children = [in_child(lambda name=name: render_in_child(name)) for name in ("first", "second")]
render("parent")
for child in children:
    join(child)
assert chat_template._lane()._children[-1]._process.pid == before
"""
    run(code)
