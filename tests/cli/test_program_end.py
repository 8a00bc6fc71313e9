"""A program ends while its model answers, or requests answers at its very end: return code 0, and no hang."""

from collections.abc import Callable
from pathlib import Path

import pytest

from programs import Programs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("llm")]  # `llm` compiles the kernels: no message is on stderr

PRELUDE = """
import atexit, sys, threading
from infer import LLM, SamplingParams
from infer.errors import ClosedError
LONG = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)

def ask():
    try:
        print(len(llm.generate("abc", SHORT).token_ids), flush=True)
    except ClosedError as error:
        assert "\\n" not in str(error)
        print("closed", flush=True)
"""
LOADED = 'llm = LLM(sys.argv[1], threads=2)\nllm.generate("abc", SHORT)\n'
Run = Callable[[str], list[str]]


@pytest.fixture
def run(programs: Programs, folder: Path) -> Run:
    """Return a function that runs a program, and returns the words that it prints."""

    def words_of(code: str) -> list[str]:
        done = programs.run(PRELUDE + code, folder)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.split()

    return words_of


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_function_of_atexit_is_answered_or_refused(run: Run, registered: str, is_busy: bool) -> None:
    register = "atexit.register(ask)\n"
    busy = 'streams = [llm.stream("abc", LONG) for _ in range(3)]\nfor stream in streams: next(stream)\n'
    code = register + LOADED if registered == "before" else LOADED + register
    (said,) = run(code + (busy if is_busy else ""))
    assert said in ("4", "closed")


@pytest.mark.parametrize("where", ["a global", "a cycle", "of a module"])
def test_a_finalizer_is_answered_or_refused(run: Run, where: str) -> None:
    code = """
class Asking:
    def __del__(self):
        try:
            ask()
        except BaseException as error:  # names of the module may be gone
            print(type(error).__name__)
"""
    code += {
        "a global": "asking = Asking()\n",
        "a cycle": "asking = Asking(); asking.itself = asking\n",
        "of a module": "import builtins; builtins.asking = Asking()\n",
    }[where]
    assert len(run(LOADED + code)) <= 1


def test_a_program_ends_while_many_sequences_are_answered(run: Run) -> None:
    code = """
def answer():
    try:
        while True:
            llm.generate("abc", LONG)
    except ClosedError:
        pass

threads = [threading.Thread(target=answer, daemon=True) for _ in range(5)]
for thread in threads:
    thread.start()
next(llm.stream("abc", LONG))
"""
    run(LOADED + code)


@pytest.mark.slow(cases=1)
def test_a_thread_that_is_no_daemon_is_answered_after_the_main_thread_has_ended_its_code(run: Run) -> None:
    code = """
def answer():
    main = threading.main_thread()
    while main.is_alive():  # it ends its code, and waits for us
        main.join(0.01)
    for _ in range(3):
        ask()
    print(llm.generate("abc", regex="[a-f]{6}").text, flush=True)
    print(len(llm.generate_all(["abc"] * 3, SHORT)), llm.session().send("abc", SHORT).generated_tokens, flush=True)

threading.Thread(target=answer).start()
"""
    said = run(LOADED + code)
    assert len(said.pop(3)) == 6
    assert said == ["4"] * 3 + ["3", "4"]


def test_a_model_that_is_dropped_with_an_open_stream_ends_its_thread(run: Run) -> None:
    code = """
import gc
thread, stream = llm.host.loop.thread, llm.stream("abc", LONG)
next(stream)
del llm, stream
gc.collect()
thread.join()
"""
    run(LOADED + code)


def test_the_program_ends_when_a_model_that_was_dropped_is_freed(run: Run) -> None:
    """If the interpreter's end stops a thread while it frees memory, the process aborts."""
    code = """
import gc, time
close = llm.host.engine.close

def slow_close():
    time.sleep(0.3)
    close()
    print("freed", flush=True)

llm.host.engine.close = slow_close
del llm
gc.collect()
"""
    assert run(LOADED + code) == ["freed"]
