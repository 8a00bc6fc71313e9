"""Check that Ray Data answers a file with the lines of `infer batch`, while its engines or the program are killed.

    python benchmarks/check_ray_batch.py --kills 100 --report

A killed program is run again, and continues after what it has written. Ends with 1 if a line differs. Needs
`pip install '.[ray]'` in the clone.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from harness import make_parser, say, write_report
from infer.system.spellings import install_extra
from ray_cluster import RayCluster, environment_of, running_cluster, wait_until

ENGINE = "ray::MapWorker(MapBatches(BatchEngine)"
EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_batch.py"
MOST_SECONDS_APART = 12.0  # between two kills: an engine is restarted after about six


def write_rows(path: Path, count: int, num_tokens: int) -> None:
    rows = ({"id": f"row {number}", "prompt": f"The number {number} is"} for number in range(count))
    path.write_text("".join(json.dumps(row | {"max_new_tokens": num_tokens}) + "\n" for row in rows))


def answer_with_kills(
    cluster: RayCluster, command: Sequence[str], rng: random.Random, most_kills: int, until: float
) -> dict[str, int]:
    """Run the program until it has ended without an error. Return the numbers of kills of engines and the program."""
    kills, environment = {"engine": 0, "program": 0}, environment_of(cluster.folder, cluster.address())
    told = cluster.folder / "told"
    while True:
        with told.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as program:
            wait_until(lambda program=program: program.poll() is not None or cluster.processes(ENGINE))
            while program.poll() is None and sum(kills.values()) < most_kills and time.monotonic() < until:
                time.sleep(rng.uniform(0, MOST_SECONDS_APART))
                engines = cluster.processes(ENGINE)
                name = "program" if rng.random() < 0.2 or not engines else "engine"
                if program.poll() is None:
                    with suppress(ProcessLookupError):
                        os.kill(program.pid if name == "program" else rng.choice(engines), signal.SIGKILL)
                        kills[name] += 1
                        say(f"{name} killed: {sum(kills.values())}")
            program.wait()
        if program.returncode == 0:
            return kills
        if program.returncode != -signal.SIGKILL:
            raise RuntimeError(told.read_text())


def main() -> int:
    parser = make_parser(__doc__, model="smollm2")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing is killed")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if find_spec("ray") is None:
        sys.exit(f"Ray is not installed: {install_extra('ray')}")
    rng, files, until = random.Random(options.seed), list[dict[str, int]](), time.monotonic() + options.seconds
    with running_cluster(num_cpus=2) as cluster:
        rows, expected = cluster.folder / "in.jsonl", cluster.folder / "expected.jsonl"
        write_rows(rows, options.rows, options.tokens)
        batch = ["batch", str(rows), str(expected), "-q", "--model", options.model]
        subprocess.run([sys.executable, "-m", "infer", *batch], check=True)
        lines = sorted(expected.read_text().splitlines())
        left = options.kills
        while left > 0 and time.monotonic() < until:
            output = cluster.folder / f"out{len(files)}.jsonl"
            command = [sys.executable, str(EXAMPLE), str(rows), str(output), options.model]
            found = answer_with_kills(cluster, command, rng, left, until)
            left -= sum(found.values())
            files.append({**found, "different": int(sorted(output.read_text().splitlines()) != lines)})
            say(json.dumps(files[-1]))
    totals = {name: sum(each[name] for each in files) for name in ("engine", "program", "different")}
    print(json.dumps({"files": len(files), **totals}))
    write_report(options, **totals, files=files)
    return int(totals["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
