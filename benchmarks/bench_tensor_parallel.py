"""One model by two ranks of a thread each, that share memory, beside one process with two threads: the same tokens.

    python benchmarks/bench_tensor_parallel.py            SmolLM2, a dozen rounds, each side in turn: a minute
    python benchmarks/bench_tensor_parallel.py --rounds 3 --report benchmarks/reports

Tokens per second of decoding and of reading a prompt: median of each side, and of each round's ratio to one process.
"""

import time
from pathlib import Path
from statistics import median

from command_line import make_parser
from infer.llm import LLM, set_num_threads
from machine import cpu_model, write_report

NEW_TOKENS, PROMPT_TOKENS = 96, 512


def measure(llm: LLM) -> tuple[list[int], dict[str, float]]:
    """The answer, and tokens per second."""
    began = time.perf_counter()
    answer = llm.generate(list(range(100, 120)), max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0).token_ids
    decoded = time.perf_counter()
    llm.generate(list(range(100, 100 + PROMPT_TOKENS)), max_new_tokens=1, temperature=0)
    read = time.perf_counter()
    return answer, {"decode": NEW_TOKENS / (decoded - began), "prompt": PROMPT_TOKENS / (read - decoded)}


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", rounds=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--weights", default="q8")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write a JSON file there")
    arguments = parser.parse_args()
    settings = {"weights": arguments.weights, "max_seq_len": 1024}
    found: dict[str, dict[str, list[float]]] = {}
    with (
        LLM(arguments.model, threads=arguments.ranks, **settings) as one,
        LLM(arguments.model, tensor_parallel=arguments.ranks, threads=1, **settings) as shared,
    ):
        expected, _ = measure(one)
        for _ in range(arguments.rounds):
            for name, llm, threads in (("one process", one, arguments.ranks), ("ranks", shared, 1)):
                set_num_threads(threads)
                llm.generate([100], max_new_tokens=8, ignore_eos=True)  # threads start
                answer, rates = measure(llm)
                assert answer == expected, f"{name}: other tokens"
                for kind, rate in rates.items():
                    found.setdefault(kind, {}).setdefault(name, []).append(rate)
    print(f"{arguments.model}, {arguments.weights}, {arguments.ranks} ranks, {cpu_model()}")
    for kind, rates in found.items():
        ratio = median(mine / other for mine, other in zip(rates["ranks"], rates["one process"], strict=True))
        sides = ", ".join(f"{name} {median(each):.0f} tok/s" for name, each in rates.items())
        print(f"{kind:8} {sides}: {ratio:.2f} x")
    if arguments.report is not None:
        measured = {"model": arguments.model, "ranks": arguments.ranks, "rounds": arguments.rounds, **settings}
        write_report(arguments.report, "tensor-parallel", measured, {"tokens_per_second": found})


if __name__ == "__main__":
    main()
