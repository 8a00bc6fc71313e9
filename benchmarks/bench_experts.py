"""Experts that are read from a file, beside the speed of the disk and llama.cpp's mmap, in one control group.

    python benchmarks/bench_experts.py --folder DISK --rounds 0
    python benchmarks/bench_experts.py --folder DISK --llama-bench PATH --report

Makes a GGUF file of random weights of a real shape, and a control group whose memory is a part of its bytes. The first
load packs the experts. Then the disk, infer and llama.cpp have turns, each after the page cache is dropped. For infer,
prints the bytes of missing experts per token, the rate at which they came, and the disk's rate, read in the same way by
as many threads. Prints the resident memory of each side's largest process. Needs Linux, and root for the group and the
cache.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

from harness import available_cores, make_parser, print_head, say, write_report

PART_BYTES = 1 << 20  # of a direct read, as the engine reads parts
PROMPT = [5, 6, 7]
LIMITS = ("memory.limit_in_bytes", "memory.max")  # of control groups in versions 1 and 2
JOIN = 'echo $$ > "$0" && exec "$@"'


def disk_rate(path: Path, seconds: float, num_threads: int) -> float:
    """Return the bytes per second of direct reads of parts, three together as in an expert, spread over the file."""
    descriptor, size = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // PART_BYTES
    began, done = time.perf_counter(), [0] * num_threads

    def read(thread: int) -> None:
        room, place = mmap.mmap(-1, PART_BYTES), int(began) + thread
        while time.perf_counter() - began < seconds:
            part = place // 3 * 7919 + place % 3
            done[thread] += os.preadv(descriptor, [room], part % (size - 1) * PART_BYTES)
            place += num_threads

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    os.close(descriptor)
    return sum(done) / taken


def make_file(own: argparse.Namespace, path: Path) -> None:
    """Write the model's file. All experts of a layer have the same bytes, which no layer of software or disk knows."""
    from random_weights import write_gguf

    shape = {"hidden_size": own.hidden, "moe_intermediate_size": own.inner, "intermediate_size": 3 * own.hidden}
    heads = {"num_attention_heads": own.hidden // 64, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": own.experts, "num_experts_per_tok": own.chosen, "norm_topk_prob": True}
    names = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False}
    numbers = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 32_768}
    config = {**names, **numbers, **shape, **heads, **experts, "num_hidden_layers": own.layers}
    write_gguf(path, config, own.layers, own.type, scale=1e-5, favour=own.favour)


def work(path: str, num_tokens: int, seed: int) -> None:
    """Print the measures of one load and one answer of random tokens as a line of JSON."""
    from infer import LLM

    began = time.perf_counter()
    with LLM(path, max_seq_len=512) as llm:
        loaded, network = time.perf_counter(), cast(Any, llm.host.model)
        store, form = network.experts, network.layers[0].feed_forward.experts.frames.pool.plan.form
        pieces = llm.stream(PROMPT, max_new_tokens=num_tokens + 1, seed=seed, temperature=1, ignore_eos=True)
        next(pieces)
        first, before = time.perf_counter(), store.counts
        list(islice(pieces, num_tokens))
        taken = time.perf_counter() - first
        found, missing = (now - earlier for now, earlier in zip(store.counts, before, strict=True))
        num_bytes = missing * form.num_bytes
        measures = {"load_seconds": loaded - began, "first_seconds": first - loaded, "found": found / (found + missing)}
        rates = {"tokens_per_second": num_tokens / taken, "missing_bytes_per_second": num_bytes / taken}
        sizes = {"missing_bytes_per_token": num_bytes / num_tokens, "experts_memory": store.memory_bytes}
        print(json.dumps({**measures, **rates, **sizes, "file": str(store.path)}))


def run_in(group: Path, *command: str, **variables: str) -> tuple[Any, int]:
    """Run a command in the control group, after dropping the page cache.

    Return its output, which is JSON, and its largest resident memory in bytes. Raises SystemExit if it fails.
    """
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    joined = ["sh", "-c", JOIN, str(group / "cgroup.procs"), *command]
    process = subprocess.Popen(
        joined, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **variables}
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with status {process.returncode}: {output}")
    return json.loads(output), 1024 * usage.ru_maxrss


def make_group(group: Path, num_bytes: int) -> None:
    """Make the control group, or limit the memory of an existing one. Raises SystemExit without control groups."""
    try:
        group.mkdir(exist_ok=True)
        (limit,) = (group / name for name in LIMITS if (group / name).exists())
        limit.write_text(str(num_bytes))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{group} is no control group whose memory can be limited: {error}") from error


def measure(own: argparse.Namespace, group: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the measures of the load that packs the experts, and of each round."""
    model = folder / f"{own.layers}-{own.favour}.gguf"
    if not model.exists():
        make_file(own, model)
    size, cache = model.stat().st_size, str(folder / "cache")
    limit = int(own.part * size)
    make_group(group, limit)
    print(f"{size / 1e9:.2f} GB in a file, {limit / 1e9:.2f} GB of memory for a process and its files")
    ours = [sys.executable, __file__, "--work", str(model), str(own.tokens)]
    load, resident = run_in(group, *ours, "0", INFER_CACHE=cache)
    experts = Path(load.pop("file"))
    say(f"first load: {load['load_seconds']:.0f} s, resident at most {resident / 1e9:.2f} GB")
    theirs = f"{own.llama_bench} -m {model} -p 0 -r 2 --repack 0 -lm mmap --no-warmup -o json".split()
    theirs += ["-n", str(own.tokens // 4), "-t", str(available_cores())]
    for number in range(1, own.rounds + 1):
        rates = [disk_rate(experts, 2, available_cores())]
        ran, resident = run_in(group, *ours, str(number), INFER_CACHE=cache)
        rates.append(disk_rate(experts, 2, available_cores()))
        del ran["file"]
        found = {"file_bytes": size, "limit_bytes": limit, "disk_bytes_per_second": mean(rates)}
        found["infer"] = ran | {"resident_bytes": resident}
        if own.llama_bench:
            (llama,), resident = run_in(group, *theirs)
            speed = llama["samples_ts"][-1]  # the run before it read what every token needs
            found["llama.cpp"] = {"tokens_per_second": speed, "resident_bytes": resident}
        show(found)
        yield found


def show(found: dict[str, Any]) -> None:
    """Print the measures of a round."""
    ran, disk = found["infer"], found["disk_bytes_per_second"]
    rate = ran["missing_bytes_per_second"]
    print(
        f"infer {ran['tokens_per_second']:.2f} tokens/s, {ran['missing_bytes_per_token'] / 1e6:.0f} MB missing a token "
        f"({ran['found']:.0%} found), read at {rate / 1e6:.0f} MB/s; the disk gives {disk / 1e6:.0f} MB/s: "
        f"{rate / disk:.2f} of it; loaded in {ran['load_seconds']:.0f} s, "
        f"resident at most {ran['resident_bytes'] / 1e9:.2f} GB",
        flush=True,
    )
    if llama := found.get("llama.cpp"):
        ratio = ran["tokens_per_second"] / llama["tokens_per_second"]
        print(f"llama.cpp {llama['tokens_per_second']:.2f} tokens/s: infer has {ratio:.1f} times as many", flush=True)


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--layers", type=int, default=18, help="number of layers (18)")
    parser.add_argument("--experts", type=int, default=128, help="of a layer (128)")
    parser.add_argument("--chosen", type=int, default=8, help="of a token in a layer (8)")
    parser.add_argument("--hidden", type=int, default=2048, help="values of the residual stream (2048)")
    parser.add_argument("--inner", type=int, default=768, help="values within an expert (768)")
    parser.add_argument("--type", default="Q4_K", help="of the matrices (Q4_K)")
    parser.add_argument(
        "--favour", type=float, default=0.0, help="how much routers prefer some experts (0: not at all)"
    )
    parser.add_argument("--part", type=float, default=1 / 3, help="memory, as a part of the file's bytes (a third)")
    parser.add_argument("--tokens", type=int, default=16, help="of a round; llama.cpp has two runs of a quarter (16)")
    parser.add_argument("--llama-bench", help="path of llama.cpp's llama-bench, if it is to be measured")
    parser.add_argument("--folder", type=Path, help="for the files, which stay there (a temporary one)")
    parser.add_argument("--group", type=Path, default=Path("/sys/fs/cgroup/memory/infer-bench"), help="to be made")
    own = parser.parse_args()
    print_head(own, "experts from a file")
    with tempfile.TemporaryDirectory(dir=os.environ.get("INFER_CACHE")) as temporary:
        rounds = list(measure(own, own.group, own.folder or Path(temporary)))
    if rounds:
        shares = [each["infer"]["missing_bytes_per_second"] / each["disk_bytes_per_second"] for each in rounds]
        print(f"median of the rounds: {median(shares):.2f} of the disk's rate")
        del own.folder, own.group, own.llama_bench
        write_report(own, rounds=rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
