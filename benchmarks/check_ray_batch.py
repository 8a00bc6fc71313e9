"""A file answered through Ray Data while the program and its engines are killed at random moments, again and again.

Each finished file must hold, in any order, the lines that `infer batch` writes, byte for byte. Ends with 1 where one
does not. Needs `pip install 'infer-engine[ray]'`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from command_line import REPORTS, make_parser
from machine import write_report

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_batch.py"
CLUSTER = """
import ray, sys
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=10**8)
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
ENGINE = "BatchEngine"
WORDS = ("sea", "hill", "river", "city", "night", "letter", "garden", "winter", "train", "clock")


def write_rows(path: Path, count: int) -> None:
    """Plain and OpenAI's, sampled and greedy."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text, length = f"The {rng.choice(WORDS)} and the {rng.choice(WORDS)}", rng.randint(4, 24)
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": length, "temperature": number % 2}
            openai = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            plain = {"id": f"row-{number}", "prompt": text, "max_new_tokens": length, "logprobs": 1}
            file.write(json.dumps(plain if number % 3 else openai) + "\n")


@contextmanager
def cluster() -> Iterator[str]:
    """Its address. It outlives the programs that are killed."""
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
        process.stdin.close()


def engines() -> list[int]:
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            command = (Path("/proc") / process / "cmdline").read_text()
            if command.startswith("ray::") and ENGINE in command:
                found.append(int(process))
    return found


def kill_one(program: "subprocess.Popen[bytes]", rng: random.Random) -> str:
    """The program or one of its engines, at a random moment; "" if it has ended before."""
    with suppress(subprocess.TimeoutExpired):
        program.wait(rng.uniform(0.5, 12))
        return ""
    if rng.random() < 0.5 and (found := engines()):
        os.kill(rng.choice(found), signal.SIGKILL)
        return "engine"
    program.kill()
    program.wait()
    return "program"


def main() -> int:
    parser = make_parser(__doc__, model="smollm2")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no other file is begun")
    arguments = parser.parse_args()
    rng, kills, wrong, num_files, began = random.Random(1), Counter[str](), 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name, cluster() as address:
        folder = Path(name)
        rows, expected = folder / "in.jsonl", folder / "expected.jsonl"
        write_rows(rows, arguments.rows)
        batch = [sys.executable, "-m", "infer", "batch", str(rows), str(expected), "-q", "--model", arguments.model]
        subprocess.run(batch, check=True)
        while kills.total() < arguments.kills and time.monotonic() - began < arguments.seconds:
            output = folder / f"{num_files}.jsonl"
            command = [sys.executable, str(EXAMPLE), str(rows), str(output), arguments.model]
            status = None
            while status != 0:
                environment = {**os.environ, "RAY_ADDRESS": address}
                with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as program:
                    while (killed := kill_one(program, rng)) == "engine":
                        kills[killed] += 1
                    kills[killed] += bool(killed)
                status = program.returncode
                if status not in (0, -signal.SIGKILL):
                    raise SystemExit(f"{' '.join(command)} ended with status {status}")
            num_files += 1
            wrong += sorted(output.read_bytes().splitlines()) != sorted(expected.read_bytes().splitlines())
            print(f"{num_files} files, {dict(kills)}, {wrong} wrong", flush=True)
    del kills[""]
    results = {"kills": dict(kills), "files": num_files, "wrong": wrong, "seconds": round(time.monotonic() - began)}
    write_report(REPORTS, "ray-batch", vars(arguments), results)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
