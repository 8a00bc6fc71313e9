"""Resident memory against `infer estimate`: a process for each context, its cache filled to the last token.

python benchmarks/bench_memory.py --models smollm2 gemma3-270m --tokens 512 2048 8192
python benchmarks/bench_memory.py --tokens 2048 --kv-type q8
python benchmarks/bench_memory.py --tokens 8192 --eviction-policy sliding --eviction-window 1024
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import make_parser
from infer import LLM, SamplingParams
from infer.checkpoint import open_checkpoint
from infer.kvcache.cache_settings import CacheSettings
from infer.model.families import make_architecture
from infer.model.memory_estimate import LoadSettings, estimate

NEW_TOKENS = 2


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--threads", type=int, default=2)
    for name in ("kv_type", "eviction_policy", "eviction_window"):
        default = getattr(CacheSettings(), name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    cache = CacheSettings(
        kv_type=given.kv_type, eviction_policy=given.eviction_policy, eviction_window=given.eviction_window
    )
    if given.child:
        print(json.dumps(measure(given.models[0], given.tokens[0], given.threads, cache)))
        return
    columns = (14, 7, 9, 8, 7, 9, 8, 10, 8, 8)
    show(columns, "model", "tokens", "weights", "cache", "work", "process", "total", "resident", "peak", "over %")
    for model, count in itertools.product(given.models, given.tokens):
        checkpoint = open_checkpoint(model)
        architecture, load = make_architecture(checkpoint.config), LoadSettings(num_threads=given.threads)
        said = estimate(architecture, checkpoint.tensors, load, cache, num_tokens=count)
        command = [sys.executable, *sys.argv, "--child", "--models", model, "--tokens", str(count)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        parts = (said.weights, said.cache, said.workspace, said.process, said.total, found["VmRSS"], found["VmHWM"])
        over = 100 * found["VmHWM"] / said.total - 100
        show(columns, model, count, *(f"{part / 1e6:.1f}" for part in parts), f"{over:+.1f}")


def show(columns: Sequence[int], *values: object) -> None:
    print("".join(f"{value:>{width}}" for value, width in zip(values, columns, strict=True)), flush=True)


def measure(model: str, num_tokens: int, threads: int, cache: CacheSettings) -> dict[str, Any]:
    """Resident bytes at the end, and the most there were."""
    llm = LLM(
        model,
        max_seq_len=num_tokens,
        threads=threads,
        kv_type=cache.kv_type,
        eviction_policy=cache.eviction_policy,
        eviction_window=cache.eviction_window,
    )
    prompt = [100 + index % 1000 for index in range(num_tokens - NEW_TOKENS)]
    llm.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines if line.startswith("Vm")}
    return {name: int(sizes[name][0]) * 1024 for name in ("VmRSS", "VmHWM")}


if __name__ == "__main__":
    main()
