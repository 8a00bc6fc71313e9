"""The four paths of the decode loop and how they combine: greedy chain, sampled, speculative, grammar.

    python benchmarks/bench_paths.py               five rounds of four tasks: some minutes
    python benchmarks/bench_paths.py --quick       two rounds, shorter answers

Every path answers every task once a round, in turns, so that a busy machine slows all of them; medians over rounds,
ratios over the rounds' own ratios. Rates are tokens behind the first over the time behind it, everything between the
tokens included. That speculation changes no token is asserted for every answer. A report goes to benchmarks/reports/.

    greedy, sampled      plain: T 0, and T 0.8 with top-k 50, top-p 0.9, repetition penalty 1.05
    + ngram              the same with speculation
    + mask               the same under a grammar that allows any text: what masks cost
    + schema             the task's JSON schema: other text than without, some of it forced
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from command_line import REPORTS, available_cores, make_parser
from infer import LLM, GenerationResult, SamplingParams, __version__
from infer.outputs import Piece
from machine import cpu_model
from path_prompts import TASKS, Task

SEED = 42
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}
ANY_TEXT = r"(?s:.*)"
CALLBACK_TOKENS = 20_000


class PathOf(NamedTuple):
    """One way to an answer. `base` is the one that it is compared with; with the same tokens, where it says so."""

    name: str
    sampling: dict[str, Any]
    base: str = ""
    speculation: str | None = None
    grammar: str | None = None
    is_same: bool = False


def paths(task: Task) -> Iterator[PathOf]:
    for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        yield PathOf(name, sampling)
        yield PathOf(f"{name} + ngram", sampling, name, "ngram", is_same=True)
        yield PathOf(f"{name} + mask", sampling, name, grammar="mask")
        if task.schema is not None:
            yield PathOf(f"{name} + schema", sampling, name, grammar="schema")
            yield PathOf(f"{name} + schema + ngram", sampling, f"{name} + schema", "ngram", "schema", is_same=True)


@dataclass
class Measured:
    """One path on one task, over the rounds."""

    task: str
    path: str
    base: str
    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance(self) -> float | None:
        proposed = self.stats["drafts_proposed"]
        return self.stats["drafts_accepted"] / proposed if proposed else None

    def to_json(self) -> dict[str, Any]:
        middle = {"median": median(self.rates), "ratio": median(self.ratios) if self.ratios else None}
        return asdict(self) | middle | {"acceptance": self.acceptance}


def answer(
    llm: LLM, task: Task, path: PathOf, num_tokens: int, num_drafts: int | None
) -> tuple[GenerationResult, float]:
    """The result, and its tokens per second."""
    grammar = {"mask": {"regex": ANY_TEXT}, "schema": {"json_schema": task.schema}, None: {}}[path.grammar]
    params = SamplingParams(**path.sampling, **grammar, max_new_tokens=num_tokens, seed=SEED)
    prompt = llm.tokenizer.encode_chat(task.messages)
    drafts = {} if num_drafts is None else {"num_draft_tokens": num_drafts}
    stream = llm.stream(prompt, params, speculation=path.speculation, **drafts)
    started = time.perf_counter()
    result = stream.run()
    seconds = time.perf_counter() - started - result.timing.ttft_s
    return result, (result.generated_tokens - 1) / seconds


def measure(llm: LLM, tasks: Sequence[Task], rounds: int, num_tokens: int, num_drafts: int | None) -> list[Measured]:
    """A round that is not counted compiles grammars and lets the loop learn what it can keep."""
    found = {
        (task.name, path.name): Measured(task.name, path.name, path.base) for task in tasks for path in paths(task)
    }
    for turn in range(rounds + 1):
        for task in tasks:
            results: dict[str, GenerationResult] = {}
            rates: dict[str, float] = {}
            for path in paths(task):
                results[path.name], rates[path.name] = answer(llm, task, path, num_tokens, num_drafts)
            for path in paths(task):
                result, one = results[path.name], found[task.name, path.name]
                if path.is_same and result.token_ids != results[path.base].token_ids:
                    raise AssertionError(f"{task.name}: {path.name} gives other tokens than {path.base}")
                one.prompt_tokens, one.generated_tokens = result.prompt_tokens, result.generated_tokens
                one.stats = asdict(result.stats)
                if turn and path.base:
                    one.ratios.append(rates[path.name] / rates[path.base])
                if turn:
                    one.rates.append(rates[path.name])
    return list(found.values())


def callback_seconds(rounds: int = 7) -> float:
    """Of one call per token: a loop over pieces that are there, with a callback and without, in turns."""
    pieces = [Piece(token_id, "word ") for token_id in range(CALLBACK_TOKENS)]
    said: list[str] = []

    def on_token(token_id: int, text: str) -> bool | None:
        said.append(text)
        return None

    def run(callback: Any) -> float:
        said.clear()
        started = time.perf_counter()
        for piece in pieces:
            if callback is not None and callback(piece.token_id, piece.text) is False:
                break
        return time.perf_counter() - started

    return median(run(on_token) - run(None) for _ in range(rounds)) / CALLBACK_TOKENS


def loop_callback_seconds(llm: LLM, rounds: int) -> float:
    """The same end to end: what whole answers with a callback and without take beside their steps, in turns."""
    params = SamplingParams(**GREEDY, max_new_tokens=64, ignore_eos=True)
    said: list[str] = []

    def run(callback: Any) -> float:
        result_of = llm.stream("Once upon a time", params)
        started = time.perf_counter()
        timing = result_of.run(callback).timing
        return (time.perf_counter() - started - timing.ttft_s - sum(timing.decode_times_s)) / 64

    return median(run(lambda token_id, text: said.append(text)) - run(None) for _ in range(rounds))


def table(found: Sequence[Measured]) -> str:
    lines = [
        f"{'task':10} {'path':26} {'tokens':>6} {'tok/s':>7} {'ratio':>6}  {'to':18}"
        f"{'drafts':>7} {'right':>6} {'masks':>6} {'forced':>7} {'multi_steps':>7} {'steps':>6}"
    ]
    for one in found:
        stats, right = one.stats, one.acceptance
        ratio = f"{median(one.ratios):.2f}" if one.ratios else ""
        lines.append(
            f"{one.task:10} {one.path:26} {one.generated_tokens:>6} {median(one.rates):>7.1f} {ratio:>6}  {one.base:18}"
            f"{stats['drafts_proposed']:>7} {'' if right is None else f'{right:.0%}':>6} {stats['masks_filled']:>6} "
            f"{stats['tokens_forced']:>7} {stats['multi_steps']:>7} {stats['single_steps']:>6}"
        )
    return "\n".join(lines)


def goals(found: Sequence[Measured]) -> dict[str, float]:
    """What issue and README speak of, each a median of ratios; `mixed` is their geometric mean over greedy tasks."""
    ratio = {(one.task, one.path): median(one.ratios) for one in found if one.ratios}
    speculative = {task: value for (task, path), value in ratio.items() if path == "greedy + ngram"}
    extraction = {task: value for (task, path), value in ratio.items() if path == "greedy + schema + ngram"}
    every = [value for (_, path), value in ratio.items() if path.endswith("ngram")]
    return {
        "speculation, copying": speculative.get("copy", 0.0),
        "speculation, mixed greedy": geometric_mean((speculative | extraction).values()),
        "speculation, mixed greedy, mean": sum((speculative | extraction).values()) / len(speculative | extraction),
        "speculation, worst": min(every),
        "mask of any text": median(value for (_, path), value in ratio.items() if path.endswith("mask")),
        "schema with forced tokens": max(
            (value for (_, path), value in ratio.items() if path.endswith("schema")), default=0.0
        ),
    }


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", rounds=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--num-tokens", type=int, default=192)
    parser.add_argument("--draft-tokens", type=int, help="at most so many guesses a step")
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--quick", action="store_true", help="two rounds of up to 96 tokens")
    parser.add_argument("--no-report", action="store_true", help="print only")
    arguments = parser.parse_args()
    rounds, num_tokens = (2, 96) if arguments.quick else (arguments.rounds, arguments.num_tokens)
    tasks = [task for task in TASKS if arguments.tasks is None or task.name in arguments.tasks]
    llm = LLM(arguments.model, threads=arguments.threads, max_seq_len=2048)
    threads = arguments.threads or available_cores()
    found = measure(llm, tasks, rounds, num_tokens, arguments.draft_tokens)
    callback, in_loop = callback_seconds(), loop_callback_seconds(llm, 2 * rounds + 1)
    print(f"{cpu_model()}, {threads} threads, {arguments.model}, {rounds} rounds, infer {__version__}\n")
    print(table(found), "\n")
    for name, value in goals(found).items():
        print(f"{name:34} {value:.2f} ×")
    print(f"{'callback':34} {1e6 * callback:.2f} µs a token ({1e6 * in_loop:.0f} µs end to end)")
    if not arguments.no_report:
        now = datetime.now(UTC)
        report = {
            "timestamp": now.isoformat(timespec="seconds"),
            "infer_version": __version__,
            "cpu": cpu_model(),
            "threads": threads,
            "model": arguments.model,
            "rounds": rounds,
            "num_tokens": num_tokens,
            "goals": goals(found),
            "callback_us": 1e6 * callback,
            "callback_end_to_end_us": 1e6 * in_loop,
            "results": [one.to_json() for one in found],
        }
        REPORTS.mkdir(exist_ok=True)
        (REPORTS / f"paths-{now:%Y%m%d-%H%M%S}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
