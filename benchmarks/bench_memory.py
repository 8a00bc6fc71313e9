"""Compare resident memory with `infer estimate`: one process per context, whose cache is filled to the last token.

python benchmarks/bench_memory.py --models smollm2 gemma3-270m --tokens 512 2048 8192
python benchmarks/bench_memory.py --tokens 2048 --kv-type q8
python benchmarks/bench_memory.py --tokens 8192 --eviction-policy sliding --eviction-window 1024
"""

import itertools
import json
import subprocess
import sys

from harness import make_parser, print_head, write_report

CHILD = """
import json, sys
from infer import LLM

model, options = sys.argv[1], json.loads(sys.argv[2])
prompt = [100 + index % 1000 for index in range(options["max_seq_len"] - 2)]
LLM(model, **options).generate(prompt, temperature=0, max_new_tokens=2)
lines = [line.split() for line in open("/proc/self/status") if line.startswith(("VmRSS", "VmHWM"))]
sizes = {name: int(kilobytes) * 1024 for name, kilobytes, _ in lines}
print(json.dumps({"resident": sizes["VmRSS:"], "peak": sizes["VmHWM:"]}))
"""
PARTS = ("weight_bytes", "cache_bytes", "workspace_bytes", "process_bytes", "total_bytes")


def output_of(*arguments: str) -> dict[str, int]:
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--kv-type", default="auto")
    parser.add_argument("--eviction-policy", default="none")
    parser.add_argument("--eviction-window", type=int, default=1024)
    options = parser.parse_args()
    names = ["kv_type"] + (["eviction_policy", "eviction_window"] if options.eviction_policy != "none" else [])
    chosen, rows = {name: getattr(options, name) for name in names}, []
    print_head(options, "MB")
    columns = ("model", "tokens", "weights", "cache", "workspace", "process", "total", "resident", "peak", "over %")
    print("".join(f"{name:>13}" for name in columns))
    for model, count in itertools.product(options.models, options.tokens):
        asked = {"max_seq_len": count, **chosen}
        words = [word for name, value in asked.items() for word in ("--" + name.replace("_", "-"), str(value))]
        said = output_of("-m", "infer", "estimate", model, *words, "--json")
        found = output_of("-c", CHILD, model, json.dumps(asked))
        over = 100 * found["peak"] / said["total_bytes"] - 100
        sizes = [f"{size / 1e6:.1f}" for size in (*(said[part] for part in PARTS), *found.values())]
        print("".join(f"{value:>13}" for value in (model, count, *sizes, f"{over:+.1f}")), flush=True)
        rows.append({"model": model, "tokens": count, "over_percent": over, **found, **{p: said[p] for p in PARTS}})
    write_report(options, bytes=rows)


if __name__ == "__main__":
    main()
