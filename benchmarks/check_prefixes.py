"""Check prefixes on disk: the first token after a restart, decode while pages are stored, and killed processes.

A restart is a new process. The files are dropped from the system's memory before it begins, so they come from disk. In
each of `--kills` rounds two processes answer prompts from one folder, some new and some known, until one is killed at a
random moment. Every answer must be the one that a process without the folder gives, or the check fails.

    python benchmarks/check_prefixes.py --rounds 5 --kills 200 --report
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import Figures, Worker, WorkerError, answer_lines, make_parser, print_head, say, turns, write_report

TEXT = Path(__file__).with_name("precision_text.txt")
PARTS = ("restart", "decode", "kills")
DECODED = 1000  # tokens of an answer that is timed
KNOWN, LONGEST = 24, 900  # prompts of the rounds with kills, and tokens of the longest


class _Worker:
    """A process with the model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def load(self, prefix_disk: str | None) -> float:
        from infer import LLM

        began = time.perf_counter()
        settings = {"threads": self._options.threads, "reuse_prefixes": True, "prefix_disk": prefix_disk}
        self._llm = LLM(self._options.model, **settings)
        self._text = self._llm.tokenizer.encode(TEXT.read_text())
        return time.perf_counter() - began

    def first_token(self, length: int) -> dict[str, Any]:
        """Return the seconds to the first token of a prompt that begins the text."""
        self._llm.generate(self._text[-40:], max_tokens=1, temperature=0)
        prompt = (self._text * (1 + length // len(self._text)))[:length]
        began = time.perf_counter()
        found = self._llm.generate(prompt, max_tokens=1, temperature=0)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "disk_tokens": found.disk_tokens, "token_ids": found.token_ids}

    def decode(self, start: int, num_tokens: int) -> float:
        """Return the tokens per second of an answer to a new prompt."""
        found = self._llm.generate(
            self._text[start : start + 64], max_tokens=num_tokens, temperature=0, ignore_eos=True
        )
        return found.timing.decode_tokens_per_second

    def answer(self, seed: int) -> dict[str, Any]:
        noise = random.Random(seed)
        start = noise.randrange(4) * 50
        prompt = self._text[start : start + noise.randrange(70, LONGEST)]
        found = self._llm.generate(prompt, max_tokens=8, temperature=0)
        return {"token_ids": found.token_ids, "disk_tokens": found.disk_tokens}

    def counts(self) -> dict[str, Any]:
        prefixes = self._llm.host.engine.prefixes
        return {"bytes_stored": prefixes.bytes_stored, "files_refused": prefixes.files_refused}

    def close(self) -> None:
        self._llm.close()


class Checks:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        kernels = Path(os.environ.get("INFER_CACHE") or Path.home() / ".cache" / "infer") / "kernels"
        if kernels.is_dir():
            shutil.copytree(kernels, folder / "kernels")

    @property
    def _files(self) -> list[Path]:
        return [path for path in self._folder.glob("prefixes/*/*") if path.is_file()]

    def worker(self, prefix_disk: str | None) -> Worker:
        worker = Worker([sys.executable, sys.argv[0], "--work", *sys.argv[1:]], {"INFER_CACHE": str(self._folder)})
        worker.ask("load", prefix_disk=prefix_disk)
        return worker

    def restart(self) -> Figures:
        """Compare the first token of a new process that reads the prompt, and of one that finds it on disk."""
        figures, length, tokens = Figures(["read", "found on disk"]), self._options.prompt_tokens, set[str]()
        with self.worker("8GB") as first:
            first.ask("first_token", length=length)
            first.ask("close")
        for number, side in turns(["read", "found on disk"], self._options.rounds):
            self._drop_from_memory()
            with self.worker("8GB" if side == "found on disk" else None) as worker:
                found = worker.ask("first_token", length=length)
            tokens.add(str(found["token_ids"]))
            assert found["disk_tokens"] > length - 65 or side == "read"
            if number >= 0:
                figures.add(f"first token of {length}, ms", side, found["seconds"] * 1000)
        assert len(tokens) == 1, "the first token differs"
        return figures

    def _drop_from_memory(self) -> None:
        for path in self._files:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def decode(self) -> Figures:
        """Compare decode with pages that are stored and without."""
        figures, start = Figures(["not stored", "stored"]), 0
        with self.worker(None) as plain, self.worker("8GB") as storing:
            sides = {"not stored": plain, "stored": storing}
            for number, side in turns(sides, 2 * self._options.rounds):
                start += 1
                rate = sides[side].ask("decode", start=start, num_tokens=DECODED)
                if number >= 0:
                    figures.add("decode, tokens/s", side, rate)
            assert storing.ask("counts")["bytes_stored"] > 15_000_000 * self._options.rounds  # 15 pages each
        return figures

    def kills(self) -> dict[str, Any]:
        """Kill processes that share the folder while they read and write, and compare all answers."""
        noise, counts, budget = random.Random(0), Counter[str](), self._options.kill_budget
        with self.worker(None) as plain:
            expected = {seed: plain.ask("answer", seed=seed)["token_ids"] for seed in range(KNOWN)}

        def ask(worker: Worker) -> None:
            seed = noise.randrange(KNOWN)
            found = worker.ask("answer", seed=seed)
            assert found["token_ids"] == expected[seed], (seed, found, expected[seed])
            counts["answers"] += 1
            counts["answers with tokens from disk"] += found["disk_tokens"] > 0
            used = sum(path.stat().st_blocks * 512 for path in self._files if path.exists())
            counts["most bytes"] = max(counts["most bytes"], used)

        with self.worker(budget) as steady:
            while counts["kills"] < self._options.kills:
                with self.worker(budget) as killed, suppress(WorkerError):
                    threading.Timer(noise.uniform(0.0, 1.5), killed.kill).start()
                    while True:
                        ask(killed)
                counts["kills"] += 1
                ask(steady)
                if counts["kills"] % 20 == 0:
                    say(str(dict(counts)))
            counts["files refused"] = steady.ask("counts")["files_refused"]
        return dict(counts)


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kill-budget", default="60MB", help="of the folder while processes are killed")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        worker = _Worker(options)
        names = ("load", "first_token", "decode", "answer", "counts", "close")
        answer_lines(**{name: getattr(worker, name) for name in names})
        return 0
    print_head(options, "medians, and ratios to the first line of each case")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(options, Path(folder))
        for name in options.only:
            found = getattr(checks, name)()
            if isinstance(found, Figures):
                found.show()
                found = found.to_json()
            else:
                print(found, flush=True)
            results[name] = found
    write_report(options, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
