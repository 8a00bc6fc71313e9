"""`check_gpu`'s section on the ops that read weights: their values, their bits for any number of tokens, their speed.

Values are compared with float64 products of what the file's blocks and the quantised activations mean. A trial of
invariance takes a random number of tokens at random places of a batch: each must have the bits that it has in the
batch. A timing replays a graph of launches over as many matrices as exceed the cache, and is held against the rate at
which the same device copies memory.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infer.backends import cuda
from infer.backends.cuda.activations import quantized
from infer.backends.cuda.layouts import LAYOUTS
from infer.backends.reference import dense
from infer.operands.weights import Norm, Projection, StoredWeight
from infer.quantization.ggml_types import BLOCK_TYPES

TOLERANCE = 1e-5  # of the largest value
CACHE_BYTES = 1 << 28
FAST = ("Q8_0", "Q4_1", "Q6_K", "IQ4_NL")  # types that are multiplied with one plane, too
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HALVES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}  # f16 fields of a block; others begin so


def make_weight(type_: str, rows: int, columns: int, seed: int = 0) -> StoredWeight:
    """Random bits, scales and minima between ± 0.01."""
    generator = torch.Generator().manual_seed(seed)
    if type_ in _FLOATS:
        return StoredWeight(type_, (rows, columns), torch.randn(rows, columns, generator=generator).to(_FLOATS[type_]))
    kind, layout = BLOCK_TYPES[type_], LAYOUTS[type_]
    blocks = torch.randint(0, 256, (rows * columns // kind.block_size, kind.block_bytes), generator=generator)
    blocks = blocks.to(torch.uint8)
    for at in _HALVES_AT.get(type_, (0, 2) if layout.has_minimum else (0,)):
        halves = (torch.rand(len(blocks), 1, generator=generator) * 0.02 - 0.01).half()
        blocks[:, at : at + 2] = halves.view(torch.uint8)
    if type_ == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 8 + 118
    return StoredWeight(type_, (rows, columns), blocks.reshape(rows, -1))


def make_activations(tokens: int, columns: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(device)


def meant(x: Tensor, weight: StoredWeight, planes: int) -> Tensor:
    """float64 values of the activations that the matrix is multiplied with."""
    if LAYOUTS[weight.type].is_float:
        return x.double()
    codes, scales, _ = quantized(x, None, planes)
    integers = codes.view(torch.int8).view(len(x), planes, -1, 32).double()
    whole = integers[:, 0] * 256 + integers[:, 1] if planes == 2 else integers[:, 0]
    return (whole * scales.double()[:, :, None]).flatten(1)


def check_values(device: torch.device, rows: int, columns: int, token_counts: list[int]) -> Iterator[dict[str, Any]]:
    """The largest error of each type, precision and number of tokens, over the largest value."""
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
                got = cuda.norm_project(x, None, prepared).cpu().double()
                error = float((got - expected).abs().max() / expected.abs().max())
                yield {
                    "op": f"product, {precision}", "type": type_, "tokens": tokens, "error": error,
                    "is_right": error < TOLERANCE,
                }  # fmt: skip


def check_invariance(
    device: torch.device, rows: int, columns: int, most_tokens: int, trials: int
) -> Iterator[dict[str, Any]]:
    """For each type: in how many trials a token's bits depended on the tokens beside it."""
    generator, norm = random.Random(0), Norm(torch.ones(columns, device=device), 1e-5)
    for type_ in LAYOUTS:
        gate_up = Projection(tuple(make_weight(type_, rows, columns, seed) for seed in (1, 2)))
        prepared = cuda.prepare(gate_up, device)
        x = make_activations(most_tokens, columns, 3, device)
        whole = cuda.norm_gate(x, norm, prepared, "silu")
        wrong = 0
        for _ in range(trials):
            count = generator.choice([1, 2, 8, 9, 16, 33, most_tokens - 1])
            first = generator.randrange(max(1, most_tokens - count + 1))
            part = cuda.norm_gate(x[first : first + count], norm, prepared, "silu")
            wrong += not torch.equal(part, whole[first : first + count])
        yield {"op": "invariance", "type": type_, "tokens": most_tokens, "error": wrong, "is_right": wrong == 0}


def copy_rate(device: torch.device) -> float:
    """Bytes a second that the device reads and writes when it copies memory."""
    source = torch.zeros(CACHE_BYTES, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * CACHE_BYTES / (_replayed(lambda: target.copy_(source), 1) * 1e-6)


def time_products(device: torch.device, rows: int, columns: int, token_counts: list[int]) -> Iterator[dict[str, Any]]:
    """Microseconds of a product with its quantisation, and its weights' bytes a second over those of a copy."""
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


def _replayed(launch: Any, count: int) -> float:
    """Microseconds of one of `count` launches in a graph, the least of ten replays."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return min(times)
