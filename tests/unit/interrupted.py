"""Run in a process of its own, which a test ends where it hangs: exceptions at every place, and what comes after."""

import dis
import faulthandler
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import infer
from infer import LLM, SamplingParams, Session, ops
from infer.backends.cpu.threads import Team
from infer.outputs import GenerationResult
from test_threads import Counter as SumCounter

SOURCE = str(Path(infer.__file__).parent)


class StopError(BaseException):
    """As a handler of a signal raises it, KeyboardInterrupt for one."""


class Place(NamedTuple):
    """Behind an instruction at which the interpreter looks for signals."""

    code: CodeType
    offset: int

    def __str__(self) -> str:
        line = next((line for start, end, line in self.code.co_lines() if start <= self.offset < end), None)
        return f"{self.code.co_filename}:{line}, behind {_instructions(self.code)[self.offset]} at {self.offset}"


LOOKS = frozenset({"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"})


@cache
def _instructions(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


@cache
def _ends_a_try(code: CodeType, offset: int) -> bool:
    """Whether what is raised behind this instruction has another handler than what is raised by it."""

    def handler(at: int) -> int | None:
        entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
        return next((entry.target for entry in entries if entry.start <= at < entry.end), None)

    after = next((at for at in _instructions(code) if at > offset), offset)
    return handler(offset) != handler(after)


@dataclass
class SignalTrap:
    """Raises in `infer` as a signal's handler may: after calls of C, at the start of functions, at a loop's next round.

    The interpreter raises by the instruction at which it looked, a trace behind it: where that has another handler, it
    is raised before the instruction.

    `at` None: nowhere, but the places are counted. Else at its visit number `nth`.
    """

    at: Place | None = None
    nth: int = 1
    num_visits: Counter[Place] = field(default_factory=Counter)
    _last: dict[FrameType, int] = field(default_factory=dict)  # each frame's last instruction, if it may look there

    def run(self, action: Callable[[], Any], afterwards: Callable[[], Any] = lambda: None) -> None:
        """`afterwards` is called while the exception is handled, if it came: its frames are alive."""
        sys.settrace(self._called)
        try:
            action()
        except StopError:
            sys.settrace(None)
            afterwards()
        else:
            sys.settrace(None)
            afterwards()
        finally:
            sys.settrace(None)
            self._last.clear()

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        caller = frame.f_back
        if caller is not None and caller in self._last:
            name = _instructions(caller.f_code)[self._last[caller]]
            if name == "CALL":  # of a function in Python: its own start looks
                del self._last[caller]
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last[frame] = frame.f_lasti
        return self._traced

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        last = self._last.pop(frame, None)
        if event != "opcode":  # an exception, or the end
            return self._traced
        if _ends_a_try(frame.f_code, frame.f_lasti):
            self._visit(frame.f_code, frame.f_lasti)
        else:
            self._last[frame] = frame.f_lasti
        if last is not None:
            self._visit(frame.f_code, last)
        return self._traced

    def _visit(self, code: CodeType, offset: int) -> None:
        if _instructions(code)[offset] not in LOOKS:
            return
        place = Place(code, offset)
        self.num_visits[place] += 1
        if place == self.at and self.num_visits[place] == self.nth:
            raise StopError


def places(action: Callable[[], Any], num_places: int, offset: int) -> Iterator[SignalTrap]:
    """A trap at each place that the action visits, or at `num_places` of them, spread; each with a time limit."""
    counting = SignalTrap()
    counting.run(action)
    num_visits = counting.num_visits
    found = sorted(num_visits, key=lambda place: (place.code.co_filename, place.code.co_firstlineno, place.offset))
    step = max(1, len(found) // num_places)
    for index, place in enumerate(found[offset % step :: step]):
        faulthandler.dump_traceback_later(60, exit=True)
        yield SignalTrap(place, 1 + index % 3 * (num_visits[place] - 1) // 2)
    faulthandler.cancel_dump_traceback_later()


def walks() -> None:
    """A team whose workers are yet to start, and one whose workers sleep or spin."""
    counter = SumCounter()

    def first_walks() -> None:
        team = Team(3)
        for _ in range(3):
            counter.run(team, 3)
        team.close()

    for trap in places(first_walks, 10**9, 0):
        team = Team(3)
        for _ in range(2):
            again = SignalTrap(trap.at)
            again.run(lambda team=team: counter.run(team, 3))  # type: ignore[misc]  # mypy sees no default
            counter.sums[:] = counter.num_walks = 0
            counter.run(team, 3)
            assert counter.is_right(), trap.at
        team.close()
        assert all(not worker.is_alive() for worker in team._workers), trap.at


def alarms(num_rounds: str) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise StopError

    signal.signal(signal.SIGALRM, stop)
    draw, team, counter, num_stopped = random.Random(1), Team(2), SumCounter(repeats=50), 0
    for _ in range(int(num_rounds)):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-3))
                while True:
                    counter.run(team, 2)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except StopError:
            num_stopped += 1
        counter.sums[:] = counter.num_walks = 0
        counter.run(team, 2)
        assert counter.is_right()
    assert num_stopped == int(num_rounds)


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True),
    "penalised": SamplingParams(repetition_penalty=1.3, seed=3, max_new_tokens=12, ignore_eos=True),
    "bound": SamplingParams(regex="[a-f]{12}", seed=4, max_new_tokens=14),
    "scored": SamplingParams(temperature=0.9, seed=5, logprobs=1, max_new_tokens=6, ignore_eos=True),
}


def generations(folder: str, num_places: str, offset: str) -> None:
    for name, params in PARAMS.items():
        interrupt_generations(LLM(folder), name, params, int(num_places), int(offset))


def interrupt_generations(llm: LLM, name: str, params: SamplingParams, num_places: int, offset: int) -> None:
    def generate() -> GenerationResult:
        return llm.generate("abc abc abc", params, speculation="ngram")

    def check() -> None:
        found = generate()
        assert (found.token_ids, found.logprobs, found.finish_reason) == said, f"{name}: {trap.at}"

    expected = generate()
    said = expected.token_ids, expected.logprobs, expected.finish_reason
    for trap in places(generate, num_places, offset):
        trap.run(generate, check)


ANSWERED = SamplingParams(temperature=0, max_new_tokens=6, allowed_token_ids=[*range(32, 124)])


def read_and_close(session: Session) -> None:
    stream = session.stream("how are you", ANSWERED)
    next(stream)
    stream.close()


ACTIONS: dict[str, Callable[[Session, Path], Any]] = {
    "send": lambda session, saved: session.send("how are you", ANSWERED),
    "stream": lambda session, saved: read_and_close(session),
    "generate": lambda session, saved: session.generate(ANSWERED),
    "append": lambda session, saved: session.append(" and more"),
    "rewind": lambda session, saved: session.rewind(4),
    "fork": lambda session, saved: session.fork(),
    "save": lambda session, saved: session.save(saved.with_name("other")),
    "load": lambda session, saved: session.load(saved),
    "close": lambda session, saved: session.close(),
}


def sessions(folder: str, names: str, num_places: str, offset: str) -> None:
    llm = LLM(folder)
    begun = llm.session()
    begun.send("hello", ANSWERED)
    other = llm.session()
    other.send("something else, which is longer", ANSWERED)
    with tempfile.TemporaryDirectory() as saved:
        other.save(Path(saved) / "saved")
        for name in names.split(","):
            interrupt_sessions(llm, begun, name, Path(saved) / "saved", int(num_places), int(offset))


def interrupt_sessions(llm: LLM, begun: Session, name: str, saved: Path, num_places: int, offset: int) -> None:
    """What was said is what it was before, or after; the next answer is a fresh model's, at once."""
    action = ACTIONS[name]

    def check() -> None:
        where, num_new = f"{name}: {trap.at}", len(session.token_ids) - len(begun.token_ids)
        if num_new > 0:  # an answer that was cut short is one that was cancelled
            assert session.token_ids == done.token_ids[: len(session.token_ids)], where
            assert len(session.messages) == len(done.messages), where
        else:
            assert session.token_ids in (begun.token_ids, done.token_ids), where
            assert session.messages in (begun.messages, done.messages), where
        go_on(session, where)

    def go_on(session: Session, where: str) -> None:
        if name == "close":
            session.close()
            session = begun.fork()
        ask = session.generate if session._transcript.num_raw_tokens else partial(session.send, "go on")
        result = ask(ANSWERED)
        assert result.token_ids == llm.generate(session.token_ids[: -len(result.token_ids)], ANSWERED).token_ids, where

    done = begun.fork()
    action(done, saved)
    for trap in places(lambda: action(begun.fork(), saved), num_places, offset):
        session = begun.fork()
        if name == "stream":  # which is the caller's: while the caller's frame lives, it is open
            trap.run(partial(action, session, saved))
            check()
        else:
            trap.run(partial(action, session, saved), check)


if __name__ == "__main__":
    _, scenario, *arguments = sys.argv
    ops.set_num_threads(2)
    faulthandler.dump_traceback_later(120, exit=True)
    {"walks": walks, "alarms": alarms, "generations": generations, "sessions": sessions}[scenario](*arguments)
    sys.stdout.flush()
    os._exit(0)
