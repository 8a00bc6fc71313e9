"""Measure the four paths of the decode loop and how they combine: greedy, sampled, speculative, grammar.

    python benchmarks/bench_paths.py               five rounds of four tasks: some minutes
    python benchmarks/bench_paths.py --quick       two rounds, shorter answers
    python benchmarks/bench_paths.py --model LARGE.gguf --draft-model SMALL.gguf
    python benchmarks/bench_paths.py … --tasks code --sampling greedy --rounds 3 --num-tokens 96    a piece of it

Every path answers every task once per round, in turns, so that a busy machine slows all of them. Rates are the tokens
after the first over their time. Each round asserts that speculation changes no token.

    greedy, sampled      plain: T 0, and T 0.8 with top-k 50, top-p 0.9, repetition penalty 1.05
    + ngram              the same with speculation
    + draft              with speculation and a draft model
    + mask               the same under a grammar that allows any text: the cost of masks
    + schema             the task's JSON schema: other text than without, some of it forced
"""

import argparse
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from harness import make_parser, print_head, write_report
from infer import LLM, GenerationResult, SamplingParams
from path_prompts import TASKS, Task

SEED = 42
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
ANY_TEXT = r"(?s:.*)"


class PathOf(NamedTuple):
    """One way to an answer. `base` is the path that it is compared with; `is_same` if both give the same tokens."""

    name: str
    sampling: dict[str, Any]
    base: str = ""
    speculation: str | None = None
    grammar: str | None = None
    is_same: bool = False


def paths(task: Task, samplings: Collection[str], *, has_draft_model: bool) -> Iterator[PathOf]:
    for name in samplings:
        sampling = SAMPLINGS[name]
        yield PathOf(name, sampling, speculation="off")
        yield PathOf(f"{name} + ngram", sampling, name, "ngram", is_same=True)
        if has_draft_model:
            yield PathOf(f"{name} + draft", sampling, name, "draft", is_same=True)
            continue
        yield PathOf(f"{name} + mask", sampling, name, grammar="mask")
        if task.schema is not None:
            yield PathOf(f"{name} + schema", sampling, name, grammar="schema")
            yield PathOf(f"{name} + schema + ngram", sampling, f"{name} + schema", "ngram", "schema", is_same=True)


def answer(
    llm: LLM, task: Task, path: PathOf, num_tokens: int, num_drafts: int | None
) -> tuple[GenerationResult, float]:
    """Return the result and its tokens per second."""
    grammar = {"mask": {"regex": ANY_TEXT}, "schema": {"json_schema": task.schema}, None: {}}[path.grammar]
    params = SamplingParams(**path.sampling, **grammar, max_new_tokens=num_tokens, seed=SEED)
    prompt = llm.tokenizer.encode_chat(task.messages)
    drafts = {} if num_drafts is None else {"num_draft_tokens": num_drafts}
    stream = llm.stream(prompt, params, speculation=path.speculation, **drafts)
    started = time.perf_counter()
    result = stream.run()
    seconds = time.perf_counter() - started - result.timing.ttft_s
    return result, (result.generated_tokens - 1) / seconds


class Answers:
    """The answers of one model, and for each path of each task its rates, its ratios to `base`, and its counts."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self._llm, self._options = llm, options
        self.rates = dict[tuple[str, str], list[float]]()
        self.ratios = dict[tuple[str, str], list[float]]()
        self.counts = dict[tuple[str, str], dict[str, int]]()

    def ask(self, task: Task, turn: int) -> None:
        """Answer a task on every path, in another order in every second turn; turn −1 warms up.

        Raises AssertionError if speculation changes a token.
        """
        results, rates = dict[str, GenerationResult](), dict[str, float]()
        options = self._options
        kinds = list(paths(task, options.sampling, has_draft_model=options.draft_model is not None))
        for path in kinds[:: 1 if turn % 2 else -1]:
            found = answer(self._llm, task, path, options.num_tokens, options.draft_tokens)
            results[path.name], rates[path.name] = found
        for path in kinds:
            result, key = results[path.name], (task.name, path.name)
            if path.is_same and result.token_ids != results[path.base].token_ids:
                raise AssertionError(f"{task.name}: {path.name} gives other tokens than {path.base}")
            self.counts[key] = {"tokens": result.generated_tokens, **asdict(result.stats)}
            if turn >= 0:
                self.rates.setdefault(key, []).append(rates[path.name])
                if path.base:
                    self.ratios.setdefault(key, []).append(rates[path.name] / rates[path.base])

    def show(self) -> None:
        print(f"{'task':10} {'path':26} {'tokens':>6} {'tok/s':>7} {'ratio':>6}  counts")
        for (task, path), rates in self.rates.items():
            ratios, counts = self.ratios.get((task, path)), self.counts[task, path]
            ratio = f"{median(ratios):.2f}" if ratios else ""
            shown = ", ".join(f"{name} {value}" for name, value in counts.items() if value and name != "tokens")
            print(f"{task:10} {path:26} {counts['tokens']:>6} {median(rates):>7.1f} {ratio:>6}  {shown}")

    def to_json(self) -> list[dict[str, Any]]:
        found = []
        for (task, path), rates in self.rates.items():
            ratios, counts = self.ratios.get((task, path)), self.counts[task, path]
            medians = {"median": median(rates), "ratio": median(ratios) if ratios else None}
            found.append({"task": task, "path": path, **medians, "rates": rates, "ratios": ratios, "counts": counts})
        return found


def summary(ratios: dict[tuple[str, str], list[float]]) -> dict[str, float]:
    """Return the figures of docs/benchmarks.md, each made of the paths' median ratios."""
    ratio = {key: median(found) for key, found in ratios.items()}
    named = {f"greedy + ngram, {task}": value for (task, path), value in ratio.items() if path == "greedy + ngram"}
    drafts = [value for (_, path), value in ratio.items() if path.endswith(("ngram", "draft"))]
    named |= {f"{path}, {task}": value for (task, path), value in ratio.items() if path.endswith("draft")}
    masks = [value for (_, path), value in ratio.items() if path.endswith("mask")]
    schemas = [value for (_, path), value in ratio.items() if path.endswith("schema")]
    named["speculation, least"] = min(drafts)
    if not masks:
        return named
    named |= {"any text, least": min(masks), "any text, median": median(masks)}
    return named | ({"schema, least": min(schemas), "schema, most": max(schemas)} if schemas else {})


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=5)
    parser.add_argument("--num-tokens", type=int, default=192)
    parser.add_argument("--draft-tokens", type=int, help="drafts per step, at most")
    parser.add_argument("--draft-model", help="a smaller model with the same vocabulary")
    parser.add_argument("--precision", default="exact", choices=["exact", "fast"])
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLINGS), default=list(SAMPLINGS))
    parser.add_argument("--quick", action="store_true", help="two rounds of up to 96 tokens")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.num_tokens = 2, 96
    tasks = [task for task in TASKS if options.tasks is None or task.name in options.tasks]
    settings = {"threads": options.threads, "draft_model": options.draft_model, "precision": options.precision}
    llm = LLM(options.model, max_seq_len=2048, **settings)
    print_head(options, "tokens per second")
    answers = Answers(llm, options)
    for turn in range(-1, options.rounds):  # the first one compiles grammars and fills caches
        for task in tasks:
            answers.ask(task, turn)
    answers.show()
    found = summary(answers.ratios)
    print("", *(f"{name:34} {value:.2f} ×" for name, value in found.items()), sep="\n")
    write_report(options, summary=found, results=answers.to_json())


if __name__ == "__main__":
    main()
