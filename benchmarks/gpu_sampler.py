"""`check_gpu`'s sections on the sampler: tokens and log-probabilities compared with `sampling.sampler`, and times.

Tokens are compared with the definition on the same device and on the CPU: all three must agree. A timing is the median
of CUDA events around replays of a graph. Each replay has another buffer of logits, so that a cache has nothing that a
model would not have left there. The torch definition runs eagerly, in turns with it. Goals for 64 rows of 128,256
words on an H200: 20 µs for temperature and noise, 100 µs for top-k with top-p.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_weights import captured, microseconds
from infer.compute import ops
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.compute.sampling.masks import num_mask_words
from infer.sampling_params import SamplingParams

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "noise": {"temperature": 1.0},
    "temperature": {"temperature": 0.8},
    "top_k + top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "everything": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.2, "logit_bias": {7: 2.0, 11: -3.0},
    },
    "wide top_p": {"temperature": 2.0, "top_p": 0.99},
    "wide top_k": {"temperature": 2.0, "top_k": 20_000},
    "temperature last": {"temperature": 1.5, "top_p": 0.8, "temperature_last": True},
}  # fmt: skip
GOALS_MICROSECONDS = {"noise": 20.0, "temperature": 20.0, "top_k + top_p": 100.0}
BUFFERS = 4
CONTEXT = 200


def make_logits(kind: str, num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Return float32 logits on the CPU: normal, peaked like a model's, flat, tied like bfloat16's, or extreme."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "peaked":
        return normal * 2.0 - 3.0 * torch.rand(num_rows, vocab_size, generator=generator).log()
    if kind == "tied":
        return (normal * 3).bfloat16().float().round()
    return normal * {"normal": 3.0, "flat": 0.01, "extreme": 1e37}[kind]


def make_columns(
    options: dict[str, Any], num_rows: int, vocab_size: int, device: torch.device
) -> tuple[SamplingColumns, History]:
    """Return columns whose rows have different seeds, which are the same on every device."""
    generator = random.Random(0)
    options = {**options}
    if (options.get("top_k") or 0) >= vocab_size:
        options["top_k"] = vocab_size // 2
    params = [SamplingParams(seed=generator.getrandbits(64), **options) for _ in range(num_rows)]
    columns = SamplingColumns.of(params, vocab_size, num_prompt_tokens=[CONTEXT // 2] * num_rows, device=device)
    history = History(num_rows, 2 * CONTEXT, vocab_size, device)
    for slot in columns.history_slot[columns.history_slot >= 0].tolist():
        history.begin(slot, [generator.randrange(vocab_size) for _ in range(CONTEXT)], CONTEXT // 2)
    return columns, history


def check_tokens(device: torch.device, num_rows: int, vocab_sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the number of tokens that differ, for each configuration and kind of logits."""
    for vocab_size in vocab_sizes:
        for name, options in CONFIGURATIONS.items():
            here, there = (
                make_columns(options, num_rows, vocab_size, where) for where in (torch.device("cpu"), device)
            )
            for seed, kind in enumerate(("normal", "peaked", "flat", "tied", "extreme")):
                logits, positions = make_logits(kind, num_rows, vocab_size, seed), torch.arange(num_rows) + CONTEXT
                words = torch.randint(-(2**31), 2**31, (num_rows, num_mask_words(vocab_size)), dtype=torch.int64)
                allowed = words.to(torch.int32) if kind == "normal" else None
                on_cpu = sampler.choose_tokens(logits, *here, positions, allowed)
                arguments = (logits.to(device), *there, positions.to(device))
                mask = None if allowed is None else allowed.to(device)
                torch_there = sampler.choose_tokens(*arguments, mask).cpu()
                with ops.using("cuda"):
                    ours = ops.choose_tokens(*arguments, mask).cpu()
                differ = int((ours != on_cpu).sum()), int((ours != torch_there).sum())
                yield {
                    "op": "sampler", "vocab_size": vocab_size, "configuration": name, "logits": kind, "rows": num_rows,
                    "differ_from_torch_on_cpu": differ[0], "differ_from_torch_on_device": differ[1],
                    "is_right": not any(differ),
                }  # fmt: skip


def check_logprobs(device: torch.device, num_rows: int, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yield the number of rows that differ from the CPU's in any bit, for each kind of sampling."""
    from infer.compute.backends.cuda.graphs import CudaGraphs, Repeats
    from infer.compute.backends.cuda.sampling.logprobs import Logprobs
    from infer.compute.backends.cuda.sampling.sampler import choose_by, tiling_of

    logits, positions = make_logits("peaked", num_rows, vocab_size, 0), torch.arange(num_rows) + CONTEXT
    for name in ("greedy", "temperature", "top_k + top_p", "everything", "wide top_p", "temperature last"):
        for mode in ("raw", "processed"):
            options = CONFIGURATIONS[name] | {"logprobs": 5, "logprobs_mode": mode}
            here, (columns, history) = (
                make_columns(options, num_rows, vocab_size, where) for where in (torch.device("cpu"), device)
            )
            logprobs = Logprobs(device, CudaGraphs(device) if device.type == "cuda" else Repeats())
            records = logprobs.records(columns, num_rows, torch.zeros(1, dtype=torch.int64, device=device))
            token_ids = choose_by(
                tiling_of(vocab_size), logits.to(device), columns, history, positions.to(device), None, None, records
            ).tolist()
            fetched = logprobs.fetch(columns, num_rows)
            assert fetched is not None
            ops.backend_of(device).synchronize()
            lines = [range(row, row + 1) for row in range(num_rows)]
            found = fetched.of(lines, [[token_id] for token_id in token_ids])
            expected = sampler.sample(logits, *here, positions)
            differ = sum(found[row] != [expected.logprob_of(row, 5)] for row in range(num_rows))
            what = {"op": "log-probabilities", "configuration": name, "mode": mode, "rows": num_rows}
            yield {**what, "differ": differ, "is_right": not differ}


def time_configuration(name: str, device: torch.device, num_rows: int, vocab_size: int, rounds: int) -> dict[str, Any]:
    columns, history = make_columns(CONFIGURATIONS[name], num_rows, vocab_size, device)
    positions = torch.arange(num_rows, device=device) + CONTEXT
    buffers = [make_logits("peaked", num_rows, vocab_size, seed).to(device) for seed in range(BUFFERS)]

    def ours(logits: Tensor) -> Callable[[], Tensor]:
        return lambda: ops.choose_tokens(logits, columns, history, positions)

    with ops.using("cuda"):
        graphs = [captured(ours(logits)) for logits in buffers]
        sides = {
            "graph": [graph.replay for graph in graphs] * 25,
            "launched": [ours(logits) for logits in buffers] * 5,
            "read": [lambda x=logits: x.amax() for logits in buffers] * 25,
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds + 1):
            for side, steps in sides.items():
                times[side].append(microseconds(steps))
    medians = {f"{side}_microseconds": statistics.median(values[1:]) for side, values in times.items()}
    goal = GOALS_MICROSECONDS.get(name)
    return {"configuration": name, "rows": num_rows, "vocab_size": vocab_size, **medians, "goal_microseconds": goal}
