"""`check_gpu`'s section on the ops that read weights: their values, their bits for any number of tokens, their speed.

Values are compared with float64 products of the values of the file's blocks and of the quantised activations. A trial
of invariance takes a random number of tokens at random places of a batch. Each must have the bits that it has in the
batch. A timing replays a graph of launches over as many matrices as exceed the cache. It is compared with the rate at
which the same device copies memory.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infer.compute.backends import cuda
from infer.compute.backends.cuda.activations import quantized
from infer.compute.backends.cuda.layouts import LAYOUTS
from infer.compute.backends.reference_parts import dense
from infer.compute.operands.weights import Norm, Projection, StoredWeight
from random_weights import make_weight

TOLERANCE = 1e-5  # of the largest value
CACHE_BYTES = 1 << 28
COMMON = (
    "Q4_K", "Q6_K", "Q8_0", "BF16", "Q4_0", "Q5_K", "F16", "Q3_K", "Q2_K", "IQ4_XS", "IQ3_XXS", "MXFP4", "Q5_0", "Q4_1",
)  # fmt: skip
FAST = ("Q8_0", "Q4_1", "Q6_K", "IQ4_NL")  # types that are multiplied with one plane, too


def make_activations(tokens: int, columns: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(device)


def meant(x: Tensor, weight: StoredWeight, planes: int) -> Tensor:
    """Return the float64 values of the activations by which the matrix is multiplied."""
    if LAYOUTS[weight.type].is_float:
        return x.double()
    codes, scales, _ = quantized(x, None, planes)
    integers = codes.view(torch.int8).view(len(x), planes, -1, 32).double()
    whole = integers[:, 0] * 256 + integers[:, 1] if planes == 2 else integers[:, 0]
    return (whole * scales.double()[:, :, None]).flatten(1)


def check_values(
    device: torch.device, rows: int, columns: int, token_counts: list[int], types: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the largest error of each type, precision and number of tokens, relative to the largest value."""
    for type_ in types:
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
    device: torch.device, rows: int, columns: int, most_tokens: int, trials: int, types: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield for each type the number of trials in which a token's bits depended on the tokens beside it."""
    generator, norm = random.Random(0), Norm(torch.ones(columns, device=device), 1e-5)
    for type_ in types:
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
    source = torch.zeros(CACHE_BYTES if device.type == "cuda" else 64, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (replayed(lambda: target.copy_(source), 1, device) * 1e-6)


def time_products(
    device: torch.device, rows: int, columns: int, token_counts: list[int], types: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of a product with its quantisation, and its bandwidth relative to a copy's."""
    rate = copy_rate(device)
    for type_ in types:
        matrices = many_matrices(type_, rows, columns, device)
        for tokens in token_counts:
            launch = product_of_each(matrices, tokens, device)
            microseconds = replayed(launch, len(matrices), device)
            share = matrices[0].parts[0].num_bytes / (microseconds * 1e-6) / rate
            yield {"type": type_, "tokens": tokens, "microseconds": microseconds, "share_of_copy_rate": share}


def many_matrices(type_: str, rows: int, columns: int, device: torch.device) -> list[Projection]:
    """Return as many copies of a random matrix as exceed the cache; on a CPU one."""
    weight = make_weight(type_, rows, columns)
    count = max(1, CACHE_BYTES // weight.num_bytes) if device.type == "cuda" else 1
    return [cuda.prepare(Projection((weight,)), device) for _ in range(count)]


def product_of_each(matrices: Sequence[Projection], tokens: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that multiplies random activations by each matrix, and returns the last product."""
    columns = matrices[0].parts[0].in_features
    x, norm = make_activations(tokens, columns, tokens, device), Norm(torch.ones(columns, device=device), 1e-5)

    def launch() -> Tensor:
        for matrix in matrices:
            found = cuda.norm_project(x, norm, matrix).floats
        return found

    return launch


def captured(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def microseconds(launches: Sequence[Callable[[], Any]]) -> float:
    """Return the microseconds per launch, of consecutive launches between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / len(launches)


def replayed(launch: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the microseconds of one of `count` launches in a graph, the least of ten replays. A CPU runs them once."""
    if device.type != "cuda":
        started = time.perf_counter()
        launch()
        return (time.perf_counter() - started) * 1e6 / count
    graph = captured(launch)
    return min(microseconds([graph.replay]) for _ in range(10)) / count
