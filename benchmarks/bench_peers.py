"""Compare infer with llama.cpp and transformers: the same files and threads, in turns in one run.

    python benchmarks/bench_peers.py                          everything: hours on two cores
    python benchmarks/bench_peers.py --quick                  one model, in a few minutes
    python benchmarks/bench_peers.py --models smollm2-q4_1 --infer f16 q8 q4 --cases "decode at 1024" --alone
    python benchmarks/bench_peers.py --models smollm2-q8_0 --infer exact ranks opencl --alone
    python benchmarks/bench_peers.py --files qwen2.5-coder-1.5b.gguf --cases decode "prefill 512"
    python benchmarks/bench_peers.py --random CONFIG.json --layers 4 8 --type Q4_K IQ2_XXS
    python benchmarks/bench_peers.py --models smollm2-bf16 --cases "prefill 512" --threads 2     beside transformers

llama.cpp comes from an environment that has llama-cpp-python: --llama-python, $LLAMA_CPP_PYTHON, or .venv-peers.
Several builds, as NAME=PATH, run side by side, each without and with flash attention. --llama-bench takes llama.cpp's
own program instead, which measures decode without a prompt's time, and no start. transformers runs the weights
dequantised (`pip install accelerate gguf`). Ratios are to the first side: the first build of llama.cpp, or the first
of infer. INFER_ISA chooses our instruction set: give the peer a build of the same one (and torch ATEN_CPU_CAPABILITY,
ONEDNN_MAX_CPU_ISA).

Files that packages do not ship are requantised by llama.cpp, once, into a cache folder. `smollm2-bf16` is a folder of
SmolLM2's shape with random weights, which llama.cpp does not read. `--random` makes files of a few layers of a model
that is too large for this machine, in --type with random weights, from its config in Hugging Face's form. With two
numbers of layers it prints the milliseconds that one layer adds to a token. `infer bench` prints the share of the
memory's speed that decoding reaches.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from harness import (
    Figures,
    Worker,
    WorkerError,
    available_cores,
    compare,
    find_llama_python,
    make_parser,
    print_head,
    say,
    write_report,
)
from infer.errors import InvalidRequestError
from infer.files import resolve
from random_weights import write_folder, write_gguf

WORKER = str(Path(__file__).with_name("peer_worker.py"))
MODELS = (  # the most frequent types first
    "smollm2-q4_k_m", "smollm2-q4_0", "smollm2-q8_0", "gemma3-270m-q4_k_m", "smollm2-q4_1", "smollm2-f16",
    "smollm2-bf16",
)  # fmt: skip
SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "tie_word_embeddings": True,
}  # fmt: skip
SHIPPED = {"smollm2-q4_1": "smollm2", "gemma3-270m-q4_k_m": "gemma3-270m"}
TORCH_ALONE = "import resource, torch; print(); pages = int(open('/proc/self/statm').read().split()[1]); "
TORCH_ALONE += "print(pages * resource.getpagesize())"
OURS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fast": {"precision": "fast"},
    **{kv_type: {"kv_type": kv_type} for kv_type in ("f32", "f16", "bf16", "q8", "q4")},  # of keys and values
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "ranks": {"ranks": True},
    "opencl": {"device": "opencl"},
}


class Case(NamedTuple):
    kind: str  # the time that counts: prefill or decode
    prompt_tokens: int
    new_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens if self.kind == "prefill" else self.new_tokens


CASES = {
    "decode": Case("decode", 16, 128),
    "prefill 512": Case("prefill", 512, 0),
    "prefill 2000": Case("prefill", 2000, 0),
    "prefill 8000": Case("prefill", 8000, 0),
    "decode at 512": Case("decode", 512, 64),
    "decode at 128": Case("decode", 128, 32),
    "decode at 1024": Case("decode", 1024, 32),
    "decode at 4096": Case("decode", 4096, 32),
    "decode at 8000": Case("decode", 8000, 32),
}


@dataclass(frozen=True)
class Side:
    name: str
    command: tuple[str, ...]
    options: dict[str, Any]
    has_cold_start: bool = True


def peer_worker(python: str) -> tuple[str, ...]:
    """Return the command of llama.cpp's side in an environment."""
    return (python, WORKER, "llama")


def named_build(build: str) -> tuple[str, str]:
    """Return the name of a side and the path in [NAME=]PATH."""
    name, separator, path = build.rpartition("=")
    return f"llama.cpp {name}" if separator else "llama.cpp", path


def find_sides(options: argparse.Namespace) -> list[Side]:
    """Return two sides per build of llama.cpp, two of transformers if it is installed, and those of infer."""
    sides = []
    for build in () if options.alone else options.llama_bench:
        name, path = named_build(build)
        command, program = (sys.executable, WORKER, "llama-bench"), {"program": path}
        sides.append(Side(name, command, program, has_cold_start=False))
        sides.append(Side(f"{name} flash", command, program | {"flash": True}, has_cold_start=False))
    for build in () if options.alone or sides else options.llama_python or [""]:
        name, path = named_build(build)
        if python := find_llama_python(path or None):
            sides.append(Side(name, peer_worker(python), {}))
            sides.append(Side(f"{name} flash", peer_worker(python), {"flash": True}, has_cold_start=False))
        else:
            say("no environment with llama-cpp-python (--llama-python): infer is measured without it")
    if options.random:
        say("transformers is left out: it would dequantise every expert")
    elif find_spec("transformers") is None:
        say("transformers is left out: pip install transformers")
    elif not options.alone:
        command = (sys.executable, WORKER, "transformers")
        for dtype in ("bfloat16", "float32"):
            sides.append(Side(f"transformers {dtype}", command, {"dtype": dtype}, has_cold_start=False))
    ours = (sys.executable, WORKER, "infer")
    return sides + [Side(f"infer {name}", ours, OURS[name]) for name in options.infer]


def find_model(name: str, peers: list[tuple[str, ...]]) -> Path:
    """Return the file of a model, which a peer makes if necessary. Raise WorkerError or InvalidRequestError."""
    if name in SHIPPED:
        return resolve(SHIPPED[name])
    path, unfinished = cached(name)
    if name == "smollm2-bf16":
        path = path.with_suffix("")
        if not path.exists():
            write_folder(unfinished, SMOLLM2)
            unfinished.rename(path)
    if not path.exists():
        if not peers:
            raise WorkerError("it needs llama-cpp-python (--llama-python)")
        say(f"making {name}")
        base, _, file_type = name.rpartition("-")
        with Worker(peers[0], is_quiet=True) as peer:
            peer.ask("requantize", source=str(resolve(base)), target=str(unfinished), file_type=file_type.upper())
        unfinished.rename(path)
    return path


def cached(name: str) -> tuple[Path, Path]:
    """Return the path of a model that this script makes, and that of the unfinished file."""
    folder = Path(os.environ.get("INFER_BENCH_MODELS") or Path.home() / ".cache" / "infer-bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.gguf", folder / f"{name}.part"


def make_random(config: Path, num_layers: int, type_: str) -> Path:
    path, unfinished = cached(f"{config.stem}-{num_layers}-layers-{type_.lower()}")
    if not path.exists():
        write_gguf(unfinished, json.loads(config.read_text()), num_layers, type_)
        unfinished.rename(path)
    return path


def per_layer(few: dict[str, Any], more: dict[str, Any], num_layers: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds per token of one layer, from the rates with few layers and with `num_layers` more."""

    def milliseconds(case: str, side: str) -> float:
        return 1e3 * (1 / more[case][side]["median"] - 1 / few[case][side]["median"]) / num_layers

    return {case: {side: milliseconds(case, side) for side in more[case]} for case in more if case in CASES}


def measure_rates(
    path: Path, sides: list[Side], threads: int, options: argparse.Namespace, runs_on: dict[str, str]
) -> dict[str, Any]:
    """Load every side, then measure all sides in turns."""
    context = max(CASES[name].prompt_tokens + CASES[name].new_tokens for name in options.cases) + 16
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for side in sides:
            worker = stack.enter_context(Worker(side.command, is_quiet=True))
            try:
                load = {"path": str(path), "threads": threads, "context": context, **side.options}
                runs_on[side.name] = worker.ask("load", **load)
                workers[side.name] = worker
            except WorkerError as error:
                say(f"{side.name} is left out: {error}")

        def rate(name: str, side: str, turn: int) -> float:
            case = CASES[name]
            request = {"prompt_tokens": case.prompt_tokens, "new_tokens": case.new_tokens, "seed": 1000 * turn + 7}
            return case.num_tokens / float(workers[side].ask("measure", **request)[case.kind])

        return compare(options.cases, workers, options.rounds, rate).to_json()


def measure_cold(path: Path, sides: list[Side], threads: int, rounds: int) -> dict[str, Any]:
    """Measure the time from the start of a process to its first token, and the resident memory after some more."""
    commands = {"import torch": (sys.executable, "-c", TORCH_ALONE)}
    for side in sides:
        if side.has_cold_start:
            load = {"path": str(path), "threads": threads, "context": 512, **side.options}
            commands[side.name] = (*side.command, "cold", json.dumps(load))
    figures = Figures(list(commands)[::-1])
    for _ in range(rounds):
        for name, command in commands.items():
            try:
                seconds, resident = time_cold(command)
            except WorkerError as error:
                say(f"{name} is left out of the cold start: {error}")
                continue
            figures.add("cold start (s)", name, seconds)
            figures.add("resident (MiB)", name, resident / 2**20)
    figures.show()
    return figures.to_json()


def time_cold(command: tuple[str, ...]) -> tuple[float, int]:
    """Return the seconds to the first line, and the number on the second line."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        seconds = time.perf_counter() - start
        resident = process.stdout.readline()
        lines = process.stderr.read().strip().splitlines()
    if not first or not resident:
        raise WorkerError(lines[-1] if lines else "no token")
    return seconds, int(resident)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--files", nargs="+", type=Path, default=[], metavar="PATH", help="GGUF files, as they are")
    cases = [*CASES, "cold"]
    parser.add_argument("--cases", nargs="+", choices=cases, metavar="NAME", help=f"of {', '.join(cases)}")
    parser.add_argument("--random", type=Path, metavar="CONFIG", help="layers of this model with random weights")
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 8], help="with --random")
    parser.add_argument("--type", nargs="+", default=["Q4_K"], help="of the matrices, with --random (Q4_K)")
    parser.add_argument("--infer", nargs="+", choices=OURS, default=["exact", "fast"], help="sides of infer")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, available_cores()}))
    parser.add_argument("--llama-python", nargs="+", default=[], metavar="[NAME=]PATH", help="with llama-cpp-python")
    parser.add_argument("--llama-bench", nargs="+", default=[], metavar="[NAME=]PATH", help="llama.cpp's own program")
    parser.add_argument("--alone", action="store_true", help="infer only")
    parser.add_argument("--quick", action="store_true", help="SmolLM2 as it is installed, three rounds, three cases")
    options = parser.parse_args()
    if options.quick:
        options.models = options.models or ["smollm2-q4_1"]
        options.cases = options.cases or ["decode", "prefill 512", "cold"]
        options.rounds = min(options.rounds, 3)
    if options.random:
        options.models, options.cases = [], options.cases or ["prefill 512", "decode at 512"]
        return options
    options.models = options.models or ([] if options.files else list(MODELS))
    options.cases = options.cases or [*CASES, "cold"]
    return options


def main() -> None:
    options = parse_arguments()
    is_cold, options.cases = "cold" in options.cases, [name for name in options.cases if name != "cold"]
    sides = find_sides(options)
    peers = [side.command for side in sides if side.command[-1] == "llama"]
    runs_on, results = dict[str, str](), dict[str, Any]()
    print_head(options, "tokens per second")
    models = {name: partial(find_model, name, peers) for name in options.models}
    models |= {path.name: partial(resolve, path) for path in options.files}
    for type_, count in product(options.type, options.layers) if options.random else ():
        models[f"{type_}, {count} layers"] = partial(make_random, options.random, count, type_)
    for name, find in models.items():
        try:
            path = find()
        except (WorkerError, InvalidRequestError) as error:
            say(f"{name} is left out: {error}")
            continue
        for threads in options.threads:
            print(f"\n{name}, {threads} threads")
            found = measure_rates(path, sides, threads, options, runs_on) if options.cases else {}
            cold = measure_cold(path, sides, threads, options.rounds) if is_cold else {}
            results[f"{name}, {threads} threads"] = found | cold
    if options.random and len(options.layers) > 1:
        few, more = min(options.layers), max(options.layers)
        for type_, threads in product(options.type, options.threads):
            rates = [results[f"{type_}, {count} layers, {threads} threads"] for count in (few, more)]
            title = f"milliseconds per token and layer, {type_}, {threads} threads"
            results[title] = per_layer(*rates, more - few)
            print(f"\n{title}\n{json.dumps(results[title], indent=1)}")
    print("\n" + "\n".join(f"{side:20} runs on {instructions}" for side, instructions in runs_on.items()))
    write_report(options, runs_on=runs_on, results=results)


if __name__ == "__main__":
    main()
