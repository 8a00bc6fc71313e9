"""What choosing a token costs, step by step: ours, its definition in torch, a sort-based pipeline, and Hugging Face's.

    python benchmarks/bench_sampler.py                          36 cases: some twenty minutes
    python benchmarks/bench_sampler.py --quick                  batches of 1 and 8 at 49,152 words, in under a minute
    python benchmarks/bench_sampler.py --batches 1 --vocabularies 262144 --threads 1 2

All sides see the same logits: a text's, from SmolLM2 (49,152) and Gemma (262,144) where those are installed, normal × 3
elsewhere. They take turns within each round, so that a busy machine slows all of them; the table has medians over the
rounds. `one read` is the largest of all the logits by numpy, which is what nobody can do without. `infer, recorded` is
what a decode step pays: the commands of the recorded table, without Python. Logits are warm where they fit a cache.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
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

from command_line import REPORTS, available_cores, make_parser
from infer import LLM, SamplingParams, __version__, ops
from infer.backends.cpu.recording import EagerRun
from infer.backends.cpu.sample_rows import SampleArguments
from infer.backends.cpu.sampling import commands
from infer.backends.cpu.table import Walk
from infer.backends.cpu.threads import team
from infer.errors import InvalidRequestError
from infer.llm import set_num_threads
from infer.sampling import sampler
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History
from machine import cpu_model

TEXT = Path(__file__).parent / "precision_text.txt"
MODEL_BY_VOCABULARY = {49_152: "smollm2", 262_144: "gemma3-270m"}
CONTEXT_TOKENS, PROMPT_TOKENS = 1000, 500
SETTLE_SECONDS = 0.02
SECONDS_PER_TURN = 0.02  # a side repeats within its turn until this is over

READ, OURS, RECORDED, DEFINITION = "one read", "infer", "infer, recorded", "torch, definition"
SORTED, PEER = "torch, sorted", "transformers"

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": {17: 2.0, 1000: -1.0, 40_000: -100.0},
    },
}


@dataclass(frozen=True)
class Case:
    """One batch. Every row has the configuration's values, a seed of its own and 1,000 tokens behind it."""

    configuration: str
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
    return Case(configuration, values, logits, context, columns, history, positions)


def make_logits(vocab_size: int, num_rows: int) -> tuple[Tensor, str]:
    """Rows of real logits where a model with this vocabulary is installed, and where they come from."""
    name = MODEL_BY_VOCABULARY.get(vocab_size)
    if name is not None:
        try:
            llm = LLM(name)
        except InvalidRequestError:
            pass
        else:
            token_ids = llm.tokenizer.encode(TEXT.read_text("utf-8"))[:num_rows]
            logits = llm.logits(token_ids)
            if logits.shape == (num_rows, vocab_size):
                return logits.contiguous(), name
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3, "normal × 3"


# The sides: each is a function that chooses a token for every row


Choose = Callable[[], Any]


def make_sides(case: Case) -> dict[str, Choose]:
    flat = case.logits.numpy().reshape(-1)
    arguments = (case.logits, case.columns, case.history, case.positions, None)
    return {
        READ: flat.max,
        OURS: lambda: ops.choose_tokens(*arguments),
        DEFINITION: lambda: sampler.choose_tokens(*arguments),
        SORTED: make_sorted(case),
        PEER: make_transformers(case),
    }


def make_sorted(case: Case) -> Choose:
    """The usual batched pipeline: penalties by counting, filters on sorted rows, exponential noise."""
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
    """Its processors and warpers in its order, then multinomial. It has no frequency and presence penalties."""
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
    """The sampler's commands as a recorded step walks them. They edit the logits, which are put back before each."""

    def __init__(self, case: Case) -> None:
        self._logits, self._case = case.logits.clone(), case
        arguments = SampleArguments(self._logits, case.positions.data_ptr(), position_offset=0)
        arguments.bind(case.columns, case.history)
        run = EagerRun(len(case.columns), len(case.columns))
        run.state["num_tokens"] = run.state["num_logits"] = len(case.columns)
        run.commands += commands(arguments)
        self._run, self._walk, self.labels = run, Walk(run.commands), [command.label for command in run.commands]
        self._cycles = np.zeros(len(self.labels), np.int64)
        self._walk.arguments["times"] = self._cycles.ctypes.data

    def measure(self) -> tuple[float, list[float]]:
        """Seconds of a walk, and of each command in it."""
        self._logits.copy_(self._case.logits)
        self._cycles[:] = 0
        started = time.perf_counter()
        team().run(self._walk, self._run.state)
        seconds = time.perf_counter() - started
        shares = self._cycles / max(1, int(self._cycles.sum()))
        return seconds, [seconds * float(share) for share in shares]

    def token_ids(self) -> list[int]:
        found: list[int] = self._keeps[-1].tolist()
        return found


# Measuring


@dataclass
class Finding:
    """Seconds of one side in one case: a median over the rounds, and over them by stage where a side has stages."""

    threads: int
    vocab_size: int
    logits: str
    batch: int
    configuration: str
    side: str
    rounds: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return median(self.rounds)


def settle() -> None:
    """Let the threads of the side before go to sleep: ours and torch's wait for work awake, each in the other's way."""
    time.sleep(SETTLE_SECONDS)


def turn(choose: Choose) -> float:
    """Seconds of a call: the median over a turn, behind one call that does not count."""
    settle()
    choose()
    times: list[float] = []
    while sum(times) < SECONDS_PER_TURN or len(times) < 3:
        started = time.perf_counter()
        choose()
        times.append(time.perf_counter() - started)
        if times[-1] > 1:
            break
    return median(times)


def recorded_turn(recorded: Recorded) -> tuple[float, list[float]]:
    settle()
    recorded.measure()
    found: list[tuple[float, list[float]]] = []
    while sum(seconds for seconds, _ in found) < SECONDS_PER_TURN or len(found) < 3:
        found.append(recorded.measure())
    return sorted(found, key=lambda each: each[0])[len(found) // 2]


def definition_stages(case: Case, tries: int) -> dict[str, float]:
    """Seconds of each step of the definition, and of the noise and the largest behind them."""
    times: dict[str, list[float]] = {}
    arguments = (case.logits, case.columns, case.history, case.positions, None)
    for _ in range(tries):
        began = started = time.perf_counter()
        for name, _ in sampler.stages(*arguments):
            now = time.perf_counter()
            times.setdefault(name, []).append(now - started)
            started = now
        between = time.perf_counter() - began
        began = time.perf_counter()
        sampler.choose_tokens(*arguments)
        times.setdefault("noise and largest", []).append(max(0.0, time.perf_counter() - began - between))
    return {name: median(each) for name, each in times.items()}


def measure(case: Case, logits: str, threads: int, rounds: int) -> list[Finding]:
    sides, recorded = make_sides(case), Recorded(case)
    recorded.measure()
    expected = sides[DEFINITION]().tolist()
    for name, token_ids in ((OURS, sides[OURS]().tolist()), (RECORDED, recorded.token_ids())):
        if token_ids != expected:
            raise SystemExit(f"{name} and the definition disagree: {case.configuration}, {list(case.logits.shape)}")
    names = [READ, OURS, RECORDED, DEFINITION, SORTED, PEER]
    batch, vocab_size = case.logits.shape
    found = {name: Finding(threads, vocab_size, logits, batch, case.configuration, name) for name in names}
    stages: list[list[float]] = []
    for index in range(rounds):
        for name in (*names[index % len(names) :], *names[: index % len(names)]):
            if name == RECORDED:
                seconds, parts = recorded_turn(recorded)
                stages.append(parts)
            else:
                seconds = turn(sides[name])
            found[name].rounds.append(seconds)
    found[RECORDED].stages = {
        label: median(parts) for label, parts in zip(recorded.labels, zip(*stages, strict=True), strict=True)
    }
    found[DEFINITION].stages = definition_stages(case, min(rounds, 3))
    return list(found.values())


def measure_all(options: argparse.Namespace) -> Iterator[list[Finding]]:
    """A case at a time."""
    for threads in options.threads:
        set_num_threads(threads)
        torch.set_num_threads(threads)
        for vocab_size in options.vocabularies:
            rows, source = make_logits(vocab_size, max(options.batches))
            for batch in options.batches:
                for configuration in options.configurations:
                    with torch.inference_mode():
                        case = make_case(configuration, rows[:batch].clone())
                        yield measure(case, source, threads, options.rounds)


# The report


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def header() -> str:
    names = [READ, RECORDED, OURS, DEFINITION, SORTED, PEER]
    return (
        f"{'thr':>3} {'vocabulary':>10} {'batch':>5} {'configuration':13} "
        + " ".join(f"{name:>17}" for name in names)
        + f" {'reads':>6} {'sorted/ours':>11} {'theirs/ours':>11}"
    )


def line(findings: Sequence[Finding]) -> str:
    by_side = {finding.side: finding for finding in findings}
    first, ours = findings[0], by_side[RECORDED].seconds
    names = [READ, RECORDED, OURS, DEFINITION, SORTED, PEER]
    return (
        f"{first.threads:3d} {first.vocab_size:10,d} {first.batch:5d} {first.configuration:13} "
        + " ".join(f"{shown(by_side[name].seconds):>17}" for name in names)
        + f" {ours / by_side[READ].seconds:5.1f}×"
        + f" {by_side[SORTED].seconds / ours:10.1f}× {by_side[PEER].seconds / ours:10.1f}×"
    )


def stage_lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        if finding.stages:
            parts = ", ".join(f"{name} {shown(seconds)}" for name, seconds in finding.stages.items())
            yield f"      {finding.side}: {parts}"


def write_report(findings: Sequence[Finding], rounds: int) -> Path:
    now = datetime.now(UTC)
    REPORTS.mkdir(parents=True, exist_ok=True)
    path = REPORTS / f"sampler-{now:%Y%m%d-%H%M%S}.json"
    report = {
        "timestamp": now.isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": available_cores(),
        "infer_version": __version__,
        "torch_version": torch.__version__,
        "rounds": rounds,
        "context_tokens": CONTEXT_TOKENS,
        "configurations": {name: {**values} for name, values in CONFIGURATIONS.items()},
        "findings": [asdict(finding) | {"seconds": finding.seconds} for finding in findings],
    }
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return path


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--vocabularies", type=int, nargs="+")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of ours and of torch")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--stages", action="store_true", help="print the time of each stage too")
    parser.add_argument("--no-report", action="store_true", help="leave no JSON in benchmarks/reports")
    options = parser.parse_args()
    options.batches = options.batches or ([1, 8] if options.quick else [1, 8, 64])
    options.vocabularies = options.vocabularies or ([49_152] if options.quick else [49_152, 128_256, 262_144])
    options.rounds = options.rounds or (3 if options.quick else 7)
    return options


def main() -> None:
    options = parse_arguments()
    print(
        f"{cpu_model()}, {available_cores()} cores; medians of {options.rounds} rounds, in which the sides take turns"
    )
    print(f"reads: recorded / one read; sorted and theirs ({PEER}) over recorded\n\n{header()}", flush=True)
    findings: list[Finding] = []
    for found in measure_all(options):
        findings += found
        print(line(found), flush=True)
        if options.stages:
            print(*stage_lines(found), sep="\n", flush=True)
    if not options.no_report:
        print(f"\n{write_report(findings, options.rounds)}")


if __name__ == "__main__":
    main()
