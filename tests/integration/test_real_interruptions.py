"""Alarms raise during generations of a real model, and the next generation gives the same tokens."""

from pathlib import Path

import pytest

from programs import Programs

pytestmark = pytest.mark.slow

SCRIPT = """
import random, signal, sys
from infer import LLM, SamplingParams
from infer.compute import ops

class StopError(Exception): pass

def stop(number, frame): raise StopError

ops.set_num_threads(2)
llm = LLM(sys.argv[1], max_seq_len=512)
params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
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
