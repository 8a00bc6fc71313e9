"""What one client who asks for log-probabilities costs the others: eight answers at once, with and without it.

    python benchmarks/bench_logprobs.py            twenty rounds of three batches: about a minute
    python benchmarks/bench_logprobs.py --quick    five rounds

The batches come in turns; medians, and of each round's ratio to the plain batch. `one` has one row with 20
alternatives, `processed` the same of its processed logits, `all` asks in every row.
"""

from statistics import median
from typing import Any

from command_line import make_parser
from infer import LLM, SamplingParams
from machine import cpu_model
from workload import make_synthetic_prompt

NUM_ROWS, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 64
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
ASKED: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (0, {}),
    "one": (1, {"logprobs": 20}),
    "processed": (1, {"logprobs": 20, "logprobs_mode": "processed"}),
    "all": (NUM_ROWS, {"logprobs": 20}),
}


def seconds_of(llm: LLM, name: str, sampling: dict[str, Any]) -> float:
    """Of all but the first tokens, per step."""
    num_asking, asked = ASKED[name]
    prompt = make_synthetic_prompt(llm.tokenizer.encode, PROMPT_TOKENS)
    params = [
        SamplingParams(
            **sampling, **(asked if row < num_asking else {}), max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=row
        )
        for row in range(NUM_ROWS)
    ]
    results = llm.generate_all([prompt] * NUM_ROWS, params, batch_size=NUM_ROWS)
    times = results[-1].timing.decode_times_s  # a plain row's, where there is one
    return sum(times) / len(times)


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=20)
    parser.add_argument("--quick", action="store_true", help="five rounds")
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else arguments.rounds
    llm = LLM(arguments.model, threads=arguments.threads, max_seq_len=1024)
    print(f"{cpu_model()}, {arguments.threads} threads, {arguments.model}, {rounds} rounds of {NUM_ROWS} rows\n")
    for label, sampling in (("greedy", {"temperature": 0.0}), ("sampled", SAMPLED)):
        found: dict[str, list[float]] = {name: [] for name in ASKED}
        for turn in range(rounds + 1):
            for name in ASKED:
                seconds = seconds_of(llm, name, sampling)
                if turn:
                    found[name].append(seconds)
        for name, values in found.items():
            ratio = median(mine / plain for mine, plain in zip(values, found["plain"], strict=True))
            print(f"{label:8} {name:10} {1e3 * median(values):7.2f} ms a step {ratio:7.3f} × plain")


if __name__ == "__main__":
    main()
