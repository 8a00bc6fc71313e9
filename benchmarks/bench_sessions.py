"""What many sessions over one model hold in memory, and how long it takes to fork one.

    python benchmarks/bench_sessions.py                     smollm2: ten sessions, ten forks of one
    python benchmarks/bench_sessions.py --sessions 20 --tokens 2000

Resident megabytes beyond those of the model with one short answer, as JSON: with so many sessions of as many tokens
each, with as many forks of one of them, and after all were dropped and `LLM.trim()` was called (where there is one).
"""

import gc
import json
import time
from statistics import median

from command_line import make_parser
from infer import LLM
from infer.bench.speed import make_prompt
from machine import resident_bytes


def main() -> None:
    parser = make_parser(__doc__, model="smollm2")
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1000, help="of each session")
    options = parser.parse_args()
    llm = LLM(options.model)
    llm.generate("Hello", temperature=0, max_new_tokens=8)
    before = resident_bytes()
    found: dict[str, float] = {}

    def note(name: str) -> None:
        gc.collect()
        found[name] = round((resident_bytes() - before) / 1e6, 1)

    sessions = [llm.session() for _ in range(options.sessions)]
    note("sessions_without_tokens_mb")
    for seed, session in enumerate(sessions):
        session.append(make_prompt(llm.model, options.tokens, seed=seed))
    note("sessions_mb")
    kept, times = sessions[0], list[float]()
    del sessions, session
    for _ in range(options.sessions):
        kept.generate(temperature=0, max_new_tokens=2)  # what was dropped gives its place
    note("one_session_left_mb")
    forks = []
    for _ in range(options.sessions):
        started = time.perf_counter()
        forks.append(kept.fork())
        times.append(time.perf_counter() - started)
    note("forks_mb")
    del forks, kept
    if hasattr(llm, "trim"):
        llm.trim()
    note("after_trim_mb")
    found["fork_ms"] = round(1e3 * median(times), 2)
    print(json.dumps({"model": options.model, "sessions": options.sessions, "tokens": options.tokens, **found}))


if __name__ == "__main__":
    main()
