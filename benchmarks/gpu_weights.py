"""`check_gpu`'s section on the ops that read weights: their values, their bits for any number of tokens, their speed.

Values are compared with float64 products of what the file's blocks and the quantised activations mean. A trial of
invariance takes a random number of tokens at random places of a batch: each must have the bits that it has in the
batch. A timing replays a graph of launches over as many matrices as exceed the cache, and is held against the rate at
which the same device copies memory.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infer.backends import cuda
from infer.backends.cuda.activations import quantized
from infer.backends.cuda.layouts import LAYOUTS
from infer.backends.reference_parts import dense
from infer.operands.weights import Norm, Projection, StoredWeight
from random_weights import make_weight

TOLERANCE = 1e-5  # of the largest value
CACHE_BYTES = 1 << 28
FAST = ("Q8_0", "Q4_1", "Q6_K", "IQ4_NL")  # types that are multiplied with one plane, too


def make_activations(tokens: int, columns: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(device)


def meant(x: Tensor, weight: StoredWeight, planes: int) -> Tensor:
    """Return the float64 values of the activations that the matrix is multiplied with."""
    if LAYOUTS[weight.type].is_float:
        return x.double()
    codes, scales, _ = quantized(x, None, planes)
    integers = codes.view(torch.int8).view(len(x), planes, -1, 32).double()
    whole = integers[:, 0] * 256 + integers[:, 1] if planes == 2 else integers[:, 0]
    return (whole * scales.double()[:, :, None]).flatten(1)


def check_values(device: torch.device, rows: int, columns: int, token_counts: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the largest error of each type, precision and number of tokens, relative to the largest value."""
    for type_ in LAYOUTS:
        weight = make_weight(type_, rows, columns)
        table = cuda.prepare(Projection((weight,)), device).parts[0]
        ids = torch.tensor([0, rows - 1], device=device)
        wrong = float((cuda.embed(table, ids, 1.0).cpu() - dense(weight)[ids.cpu()].float()).abs().max())
        yield {"op": "embed", "type": type_, "tokens": 2, "error": wrong, "is_right": wrong == 0}
        for precision, planes in (("exact", 2), ("fast", 1))[: 1 + (type_ in FAST)]:
            prepared = cuda.prepare(Projection((weight,)), device, precision)
            for tokens in token_counts:
                x = make_activations(tokens, columns, tokens, device)
                expected = meant(x, weight, planes).cpu() @ dense(weight).double().T
                got = cuda.norm_project(x, None, prepared).floats.cpu().double()
                error = float((got - expected).abs().max() / expected.abs().max())
                yield {
                    "op": f"product, {precision}", "type": type_, "tokens": tokens, "error": error,
                    "is_right": error < TOLERANCE,
                }  # fmt: skip


def check_invariance(
    device: torch.device, rows: int, columns: int, most_tokens: int, trials: int
) -> Iterator[dict[str, Any]]:
    """Yield for each type the number of trials in which a token's bits depended on the tokens beside it."""
    generator, norm = random.Random(0), Norm(torch.ones(columns, device=device), 1e-5)
    for type_ in LAYOUTS:
        gate_up = Projection(tuple(make_weight(type_, rows, columns, seed) for seed in (1, 2)))
        prepared = cuda.prepare(gate_up, device)
        x = make_activations(most_tokens, columns, 3, device)
        whole = cuda.norm_gate(x, norm, prepared, "silu").floats
        wrong = 0
        for _ in range(trials):
            count = generator.choice([1, 2, 8, 9, 16, 33, most_tokens - 1])
            first = generator.randrange(max(1, most_tokens - count + 1))
            part = cuda.norm_gate(x[first : first + count], norm, prepared, "silu").floats
            wrong += not torch.equal(part, whole[first : first + count])
        yield {"op": "invariance", "type": type_, "tokens": most_tokens, "error": wrong, "is_right": wrong == 0}


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second that the device reads and writes when it copies memory."""
    source = torch.zeros(CACHE_BYTES, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * CACHE_BYTES / (_replayed(lambda: target.copy_(source), 1) * 1e-6)


def time_products(device: torch.device, rows: int, columns: int, token_counts: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of a product with its quantisation, and its bandwidth relative to a copy's."""
    rate = copy_rate(device)
    for type_ in LAYOUTS:
        weight = make_weight(type_, rows, columns)
        count = max(1, CACHE_BYTES // weight.num_bytes)
        matrices = [cuda.prepare(Projection((weight,)), device) for _ in range(count)]
        for tokens in token_counts:
            x = make_activations(tokens, columns, tokens, device)
            norm = Norm(torch.ones(columns, device=device), 1e-5)

            def every_matrix(x: Tensor = x, norm: Norm = norm, matrices: list[Projection] = matrices) -> None:
                for matrix in matrices:
                    cuda.norm_project(x, norm, matrix)

            microseconds = _replayed(every_matrix, count)
            share = matrices[0].parts[0].num_bytes / (microseconds * 1e-6) / rate
            yield {"type": type_, "tokens": tokens, "microseconds": microseconds, "share_of_copy_rate": share}


def captured(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def microseconds(launches: Sequence[Callable[[], Any]]) -> float:
    """Return the microseconds per launch, of launches one after another between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / len(launches)


def _replayed(launch: Callable[[], Any], count: int) -> float:
    """Return the microseconds of one of `count` launches in a graph, the least of ten replays."""
    graph = captured(launch)
    return min(microseconds([graph.replay]) for _ in range(10)) / count
