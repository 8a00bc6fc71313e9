"""Resident memory against `infer estimate`: a process for each context, its cache filled to the last token.

python benchmarks/bench_memory.py --model smollm2 --tokens 512 2048 8192
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from infer import LLM, SamplingParams
from infer.cache.settings import CacheSettings
from infer.checkpoint import open_checkpoint
from infer.memory import LoadSettings, estimate
from infer.model.families import make_architecture

NEW_TOKENS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(measure(given.model, given.child, given.threads)))
        return
    checkpoint = open_checkpoint(given.model)
    architecture = make_architecture(checkpoint.config)
    print(
        f"{'tokens':>7}{'weights':>9}{'cache':>8}{'work':>7}{'process':>9}{'total':>8}{'resident':>10}{'peak':>7}  MB"
    )
    for count in given.tokens:
        load = LoadSettings(num_threads=given.threads)
        said = estimate(architecture, checkpoint.tensors, load, CacheSettings(), num_tokens=count)
        command = [sys.executable, str(Path(__file__)), "--model", given.model, "--threads", str(given.threads)]
        done = subprocess.run([*command, "--child", str(count)], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        parts = [said.weights, said.cache, said.workspace, said.process, said.total]
        numbers = [f"{part / 1e6:.1f}" for part in (*parts, found["VmRSS"], found["VmHWM"])]
        widths = (9, 8, 7, 9, 8, 10, 7)
        print(f"{count:>7}" + "".join(f"{x:>{width}}" for x, width in zip(numbers, widths, strict=True)), flush=True)


def measure(model: str, num_tokens: int, threads: int) -> dict[str, Any]:
    """Resident bytes at the end, and the most there were."""
    llm = LLM(model, max_seq_len=num_tokens, threads=threads)
    prompt = [100 + index % 1000 for index in range(num_tokens - NEW_TOKENS)]
    llm.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines if line.startswith("Vm")}
    return {name: int(sizes[name][0]) * 1024 for name in ("VmRSS", "VmHWM")}


if __name__ == "__main__":
    main()
