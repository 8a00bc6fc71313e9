"""Measure the cost of choosing a token: infer, a pipeline of torch that sorts, and Hugging Face's processors.

    python benchmarks/bench_sampler.py                          36 cases: about twenty minutes
    python benchmarks/bench_sampler.py --quick                  batches of 1 and 8 at 49,152 words, in under a minute
    python benchmarks/bench_sampler.py --batches 1 --vocabularies 262144 --threads 2

Microseconds. All sides see the same logits: those of a text if SmolLM2 (49,152 words) or Gemma (262,144) is installed,
otherwise normal × 3. `one read` is numpy's largest logit of all, which no side can do without. `infer` is what a decode
step pays: the commands of the recorded table, without Python. Its tokens must be those of the sampler's definition.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from harness import compare, make_parser, print_head, write_report
from infer import LLM, SamplingParams
from infer.compute.backends.cpu.recording import EagerRun
from infer.compute.backends.cpu.sampling.launch import SampleArguments, choice_commands
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.errors import InvalidRequestError
from infer.llm import set_num_threads

TEXT = Path(__file__).parent / "precision_text.txt"
MODEL_BY_VOCABULARY = {49_152: "smollm2", 262_144: "gemma3-270m"}
CONTEXT_TOKENS, PROMPT_TOKENS = 1000, 500
SECONDS_PER_TURN = 0.02  # a side repeats its work for this time
OURS, READ, SORTED, PEER = "infer", "one read", "torch, sorted", "transformers"

_FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k top-p": _FILTERED,
    "everything": _FILTERED
    | {"min_p": 0.02, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    | {"logit_bias": {17: 2.0, 1000: -1.0, 40_000: -100.0}},
}

Choose = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One batch. Every row has the same parameters, its own seed and 1,000 tokens before it."""

    values: dict[str, Any]
    logits: Tensor
    context: Tensor  # [rows, 1000]
    columns: SamplingColumns
    history: History
    positions: Tensor


def make_case(configuration: str, logits: Tensor) -> Case:
    num_rows, vocab_size = logits.shape
    values = CONFIGURATIONS[configuration]
    draw = np.random.default_rng(num_rows)
    context = torch.from_numpy(np.minimum(draw.zipf(1.3, (num_rows, CONTEXT_TOKENS)), vocab_size) - 1)
    columns = SamplingColumns.of(
        [SamplingParams(seed=seed, **values) for seed in range(num_rows)],
        vocab_size,
        num_prompt_tokens=[PROMPT_TOKENS] * num_rows,
    )
    history = History(num_rows if columns.has_penalty else 0, CONTEXT_TOKENS + 1, vocab_size)
    for slot in range(history.num_slots):
        history.begin(slot, context[slot].tolist(), PROMPT_TOKENS)
    positions = torch.full((num_rows,), CONTEXT_TOKENS)
    return Case(values, logits, context, columns, history, positions)


def make_logits(vocab_size: int, num_rows: int) -> Tensor:
    """Return rows of real logits if a model with this vocabulary is installed."""
    if name := MODEL_BY_VOCABULARY.get(vocab_size):
        try:
            llm = LLM(name)
        except InvalidRequestError:
            pass
        else:
            return llm.logits(llm.tokenizer.encode(TEXT.read_text("utf-8"))[:num_rows]).contiguous()
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3


# The sides: each is a function that chooses a token for every row


def make_sorted(case: Case) -> Choose:
    """Return the usual batched pipeline: penalties by counting, filters on sorted rows, exponential noise."""
    values, num_rows = case.values, len(case.logits)
    temperature = torch.full((num_rows, 1), values["temperature"])
    top_k = torch.full((num_rows, 1), values.get("top_k", case.logits.shape[1]))
    top_p, min_p = (torch.full((num_rows, 1), values.get(name, off)) for name, off in (("top_p", 1.0), ("min_p", 0.0)))
    bias = values.get("logit_bias", {})
    bias_ids, biases = torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()))
    output = case.context[:, PROMPT_TOKENS:]
    generator = torch.Generator().manual_seed(1)

    def choose() -> Tensor:
        x = case.logits
        if bias:
            x = x.clone()
            x[:, bias_ids] += biases
        if "repetition_penalty" in values:
            seen = torch.zeros_like(x, dtype=torch.bool).scatter_(1, case.context, True)
            penalty = values["repetition_penalty"]
            x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
            counts = torch.zeros_like(x).scatter_add_(1, output, torch.ones_like(output, dtype=x.dtype))
            x = x - values["frequency_penalty"] * counts - values["presence_penalty"] * (counts > 0)
        if values["temperature"] == 0:
            return x.argmax(-1)
        x = x / temperature
        if "top_k" in values:
            ranked, order = x.sort(-1, descending=True)
            ranked = ranked.masked_fill(torch.arange(x.shape[1]) >= top_k, -torch.inf)
            sums = ranked.softmax(-1).cumsum(-1)
            is_beyond = sums.roll(1, -1) >= top_p
            is_beyond[:, 0] = False
            x = torch.empty_like(x).scatter_(1, order, ranked.masked_fill(is_beyond, -torch.inf))
        probabilities = x.softmax(-1)
        if "min_p" in values:
            lowest = min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < lowest, 0.0)
        return (probabilities / torch.empty_like(x).exponential_(generator=generator)).argmax(-1)

    return choose


def make_transformers(case: Case) -> Choose:
    """Return transformers' processors and warpers in its order, then multinomial. It has only one of the penalties."""
    values, processors = case.values, LogitsProcessorList()
    if "logit_bias" in values:
        sequence_bias = {(token_id,): bias for token_id, bias in values["logit_bias"].items()}
        processors.append(SequenceBiasLogitsProcessor(sequence_bias))
    if "repetition_penalty" in values:
        processors.append(RepetitionPenaltyLogitsProcessor(values["repetition_penalty"]))
    if values["temperature"] != 0:
        processors.append(TemperatureLogitsWarper(values["temperature"]))
        for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
            if name in values:
                processors.append(warper(values[name]))

    def choose() -> Tensor:
        scores = processors(case.context, case.logits)
        if values["temperature"] == 0:
            return torch.as_tensor(scores.argmax(-1))
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]

    return choose


class Recorded:
    """The sampler's commands as a recorded step runs them. They edit the logits: each run begins with a copy."""

    def __init__(self, case: Case) -> None:
        self._logits, self._case = case.logits.clone(), case
        self._arguments = SampleArguments(self._logits, case.positions.data_ptr(), position_offset=0)
        self._arguments.bind(case.columns, case.history)
        self._run = EagerRun(len(case.columns), len(case.columns))
        self._run.state["num_tokens"] = self._run.state["num_logits"] = len(case.columns)
        self._run.commands += choice_commands(self._arguments)
        self._table = DispatchTable(self._run.commands)

    def seconds(self) -> float:
        self._logits.copy_(self._case.logits)
        started = time.perf_counter()
        thread_pool().run(self._table, self._run.state)
        return time.perf_counter() - started

    def token_ids(self) -> list[int]:
        return list(self._arguments.sampled[: len(self._case.columns)])


def timed(choose: Choose) -> Callable[[], float]:
    def seconds() -> float:
        started = time.perf_counter()
        choose()
        return time.perf_counter() - started

    return seconds


class Batch:
    """The sides of one case, each a function that returns the seconds of one choice."""

    def __init__(self, configuration: str, logits: Tensor) -> None:
        case = make_case(configuration, logits)
        recorded = Recorded(case)
        recorded.seconds()
        expected = sampler.choose_tokens(case.logits, case.columns, case.history, case.positions, None).tolist()
        if recorded.token_ids() != expected:
            raise SystemExit(f"infer and the definition disagree: {configuration}, {list(logits.shape)}")
        self.sides = {
            OURS: recorded.seconds,
            READ: timed(case.logits.numpy().reshape(-1).max),
            SORTED: timed(make_sorted(case)),
            PEER: timed(make_transformers(case)),
        }

    def microseconds(self, case: str, side: str, turn: int) -> float:
        """Return the median over a turn, after one call that does not count."""
        time.sleep(SECONDS_PER_TURN)  # until the threads of the previous side sleep
        self.sides[side]()
        times: list[float] = []
        while (sum(times) < SECONDS_PER_TURN or len(times) < 3) and not (times and times[-1] > 1):
            times.append(self.sides[side]())
        return 1e6 * median(times)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, threads=1, rounds=7)
    parser.add_argument("--quick", action="store_true", help="three rounds, one vocabulary, batches of 1 and 8")
    parser.add_argument("--batches", type=int, nargs="+", help="rows (1 8 64)")
    parser.add_argument("--vocabularies", type=int, nargs="+", help="words (49152 128256 262144)")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 3)
    options.batches = options.batches or ([1, 8] if options.quick else [1, 8, 64])
    options.vocabularies = options.vocabularies or ([49_152] if options.quick else [49_152, 128_256, 262_144])
    return options


def main() -> None:
    options = parse_arguments()
    print_head(options, "microseconds")
    set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    results = dict[str, Any]()
    for vocab_size in options.vocabularies:
        rows = make_logits(vocab_size, max(options.batches))
        for batch in options.batches:
            for configuration in options.configurations:
                with torch.inference_mode():
                    sides = Batch(configuration, rows[:batch].clone())
                    case = f"{batch} × {vocab_size}, {configuration}"
                    found = compare([case], sides.sides, options.rounds, sides.microseconds)
                results |= found.to_json()
    write_report(options, microseconds=results)


if __name__ == "__main__":
    main()
