"""Claims about the process of a command: its three streams, Ctrl-C before the command begins, and its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import cases
from commands import FAKE, refused
from infer.cli.process_streams import cancel_on_signal
from infer.cli.terminal import Spinner
from shapes import SOURCE
from terminals import SECONDS

COMMANDS = (["generate", "-q", "--prompt", "a"], ["--help"], ["models"], ["chat"], ["sample-trace", "a"])
# When Python searches for this module, the process gets a signal, as if Ctrl-C was pressed at that moment.
INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["infer", "generate", "--prompt", "a"]
{start}
"""
STARTS = {
    "python -m infer": "runpy.run_module('infer', run_name='__main__')",
    "script": "from infer.__main__ import run; run()",
}


def shell(arguments: list[str], redirections: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the fake command in a shell that closes or fills its streams."""
    command = ["bash", "-o", "pipefail", "-c", f'"$@" {redirections}', "bash", *FAKE, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=SECONDS)


def python(program: str, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a program."""
    command = [sys.executable, *options, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS, **settings)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_full_stdout_is_one_line_and_status_1(arguments: list[str]) -> None:
    done = shell(arguments, ">/dev/full", "hello\n")
    assert (done.returncode, done.stderr) == (1, "infer: stdout: No space left on device\n")


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_reader_that_has_gone_is_status_141(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run([*FAKE, *arguments], input="hello\n", stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", "2</dev/null"])
def test_only_the_output_that_stderr_refuses_is_lost(closed: str) -> None:
    for options, expected in (("-pa", (0, "echo: a \n")), ("-pbroken", (1, "")), ("--top-p=7", (2, ""))):
        done = shell(["generate", options], closed)
        assert (done.returncode, done.stdout) == expected


@pytest.mark.slow
def test_a_missing_stdin_is_empty_and_a_missing_stdout_takes_the_text() -> None:
    assert shell(["chat"], "<&-").returncode == 0
    assert shell(["generate", "-q", "--prompts-file", "-"], "<&-").stderr.endswith(": write one per line\n")
    done = shell(["chat"], ">&-", "hello\n")
    assert (done.returncode, "own failure" in done.stderr) == (0, False)
    assert shell(["generate", "--prompt", "a"], "<&- >&- 2>&-").returncode == 0


def test_no_file_takes_the_place_of_a_missing_stream(tmp_path: Path) -> None:
    program = """
import os
from infer.cli.process_streams import prepare_streams
prepare_streams()
first = os.open("file", os.O_CREAT | os.O_WRONLY)
assert first > 2, first
print("text")
"""
    command = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", program]
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=SECONDS).returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


def test_a_stdout_that_does_not_block_is_waited_for() -> None:
    program = """
import os
from infer.cli.process_streams import prepare_streams
os.set_blocking(1, False)
prepare_streams()
print("x" * 1_000_000)
"""
    command = ["bash", "-o", "pipefail", "-c", '"$@" | { sleep 0.2; wc -c; }', "bash", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1000001", "")


def test_progress_ends_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        Spinner("measuring").progress(1, 2)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            Spinner("measuring").progress(1, 2)


# Ctrl-C before the command begins


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("module", ["infer.cli", "click", "infer.cli.subcommands", "infer.sampling_params"])
def test_ctrl_c_during_the_first_imports_is_quiet(module: str, start: str) -> None:
    done = python(INTERRUPTED.format(module=module, start=start))
    assert (done.returncode, done.stderr) == (130, "")


def test_little_is_imported_before_ctrl_c_has_a_handler() -> None:
    program = "import infer.__main__, sys; print(*sys.modules)"
    done = python(program, "-S", env=os.environ | {"PYTHONPATH": str(SOURCE.parent)})
    assert {"re", "typing", "pathlib", "click", "infer.cli"} & set(done.stdout.split()) == set()
    assert "infer.__main__" in done.stdout


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    program = INTERRUPTED.format(module="click", start=STARTS["script"]).replace("default_int_handler", "SIG_IGN", 1)
    done = python(program.replace('"generate", "--prompt", "a"', '"--version"'))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("infer ")


def test_an_answer_is_not_cancelled_by_a_signal_that_its_process_ignores() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with cancel_on_signal() as cancellation:
        os.kill(os.getpid(), signal.SIGINT)
    assert not cancellation.event.is_set()


# The end


def test_the_process_ends_without_taking_its_memory_apart() -> None:
    program = """
import atexit, sys
from infer.cli.process_streams import end_process
class Heavy:
    def __del__(self):
        print("taken apart")
kept = Heavy()
atexit.register(print, "helpers stopped")
end_process(7)
"""
    done = python(program)
    assert (done.returncode, done.stdout) == (7, "helpers stopped\n")


# Refusals by the system


@cases(
    "error line",
    (MemoryError(), "out of memory: "),
    (OSError(12, "Cannot allocate memory"), "out of memory: "),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "out of memory: "),
    (OSError(24, "Too many open files", "x.py"), "too many open files: this process may open "),
    (ValueError("Number of threads specified must be > 0."), "NUMBA_NUM_THREADS must be at least 1, got None: "),
    (RuntimeError("can't start new thread"), "the system refuses to start another thread: "),
    (OSError(28, "No space left on device", "talk.json"), "talk.json: No space left on device"),
)
def test_refusals_of_the_system_are_not_faults_of_infer(error: Exception, line: str, monkeypatch: Any) -> None:
    def refuse(options: object) -> None:
        raise error

    monkeypatch.setattr("infer.cli.commands.models_command.run_models", refuse)
    assert refused("models", status=1).startswith(line)


@pytest.mark.slow
def test_few_files_and_little_memory_are_one_line() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_{0}, ({1}, {1})); {2}"
    for name, limit, told in (("NOFILE", 8, "too many open files: "), ("AS", 300_000_000, "out of memory: ")):
        start = f"import sys; sys.argv = ['infer', 'generate', '--prompt', 'a']; {STARTS['script']}"
        done = python(limited.format(name, limit, start))
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith(f"infer: {told}")
