"""Digests of the CPU kernels' results: the same lines on every machine and instruction set that has FMA.

    python tests/helpers/kernel_digests.py                       every case
    python tests/helpers/kernel_digests.py Q4_K attend           the cases whose names begin so
    python tests/helpers/kernel_digests.py "answer llama: "      the same for answers of whole models (answer_cases.py)
    INFER_ISA=avx2 python tests/helpers/kernel_digests.py        by another instruction set

Inputs are whole numbers divided by powers of two, so that they do not depend on a library of mathematics.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from answer_cases import CASES, Case
from answer_runs import answers_in
from block_scales import FLOATS, stored_weight
from infer.compute import ops
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Router
from infer.compute.operands.step import Step
from infer.compute.operands.weights import (
    ExpertNorms,
    ExpertWeights,
    FilePlace,
    Heads,
    Norm,
    PerLayerWeights,
    Projection,
    RopeTable,
    SharedExpert,
    StoredWeight,
    UnreadWeight,
)
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from layer_caches import make_layer
from steps import join

CPU = torch.device("cpu")
ROWS, COLUMNS, COUNT = 51, 512, 6


def numbers(rng: np.random.Generator, *shape: int) -> Tensor:
    """Return whole multiples of 1/1024 in [-4, 4)."""
    return torch.from_numpy(rng.integers(-4096, 4096, shape).astype(np.float32) / 1024)


def make_weight(rng: np.random.Generator, type_: str) -> StoredWeight:
    return sized(rng, type_, ROWS, COLUMNS)


def sized(rng: np.random.Generator, type_: str, rows: int, columns: int) -> StoredWeight:
    def draw_scales(shape: tuple[int, ...]) -> NDArray[np.float64]:
        return rng.integers(-64, 64, shape) / 4096

    return stored_weight(rng, type_, rows, columns, lambda shape: numbers(rng, *shape).numpy(), draw_scales)


def ready(*parts: StoredWeight, precision: ops.Precision = "exact") -> Projection:
    return ops.prepare(Projection(parts), CPU, precision)


def stacked(rng: np.random.Generator, type_: str, rows: int, columns: int, count: int = COUNT) -> Projection:
    return ready(*(sized(rng, type_, rows, columns) for _ in range(count)))


def digest(results: Iterable[Tensor]) -> str:
    seen = hashlib.sha256()
    for result in results:
        seen.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]


def products(type_: str, precision: ops.Precision) -> Iterator[Tensor]:
    rng = np.random.default_rng(1)
    weight = ready(make_weight(rng, type_), precision=precision)
    for num_tokens in (1, 2, 3, 4, 5, 8, 19, 64):  # AMX takes 32 and more
        yield ops.norm_project(numbers(rng, num_tokens, COLUMNS), None, weight).floats


def prompt(type_: str, precision: ops.Precision) -> Iterator[Tensor]:
    """Yield products with enough rows and tokens for three strips of unpacked weights and a panel after them."""
    rng = np.random.default_rng(11)
    columns = 264 if type_ in FLOATS else 1280
    weight = ready(sized(rng, type_, 9 * 16, columns), precision=precision)
    yield ops.norm_project(numbers(rng, 9 * 16 + 5, columns), None, weight).floats


def embedding(type_: str) -> Iterator[Tensor]:
    weight = ready(make_weight(np.random.default_rng(2), type_))
    yield ops.embed(weight.parts[0], torch.tensor([0, 50, 7, 16]), 1.0)


def attention(kv_type: str, *, has_gates: bool = False, window: int = 100) -> Iterator[Tensor]:
    """Yield the results for prompts, tokens and drafts of two rows, the second with a window."""
    rng = np.random.default_rng(3)
    rope = RopeTable(numbers(rng, 1, 512, 32) / 4, numbers(rng, 1, 512, 32) / 4)
    gates = 10 * 64  # their first column
    heads = Heads(6, 2, 64, 0.125, rope, Norm(numbers(rng, 64), 1e-5), None, gate_start=gates if has_gates else None)
    layer = make_layer(heads, 2, 512, kv_type)
    layer.pages.windows[1] = window
    for chunks in ([(0, 0, 70)], [(1, 0, 300)], [(0, 70, 1)], [(0, 71, 3), (1, 300, 1)], [(1, 301, 40), (0, 74, 17)]):
        step = join([Step.of([1] * count, start, row=row) for row, start, count in chunks])
        qkv = numbers(rng, len(step.tokens), gates + (6 * 64 if has_gates else 0))
        yield ops.attend(Activations(qkv), heads, layer, step).floats


def activation(name: Any) -> Iterator[Tensor]:
    rng = np.random.default_rng(4)
    gate_up = ready(make_weight(rng, "Q8_0"), make_weight(rng, "Q8_0"))
    norm = Norm(numbers(rng, COLUMNS), 1e-5)
    yield ops.norm_gate(numbers(rng, 3, COLUMNS), norm, gate_up, name).floats


def experts(type_: str, scores: Any) -> Iterator[Tensor]:
    """Yield the results of a shared expert and of six others, of which each token chooses two."""
    rng, hidden, inner = np.random.default_rng(6), 256, 64
    router = Router(COUNT, 2, scores, is_normalized=scores == "softmax", has_correction=scores == "sigmoid")
    router = replace(router, weighs_inputs=scores == "sigmoid_of_chosen")
    shared = SharedExpert(
        ready(sized(rng, type_, inner, hidden), sized(rng, type_, inner, hidden)),
        ready(sized(rng, "Q8_0", hidden, inner)),
        ready(sized(rng, "F32", 1, hidden)),
    )
    weights = ExpertWeights(
        router=router,
        router_logits=ready(sized(rng, "F32", COUNT, hidden)),
        correction=numbers(rng, COUNT) if router.has_correction else None,
        gate=stacked(rng, type_, inner, hidden),
        up=stacked(rng, type_, inner, hidden),
        down=stacked(rng, "Q8_0", hidden, inner),
        activation="silu",
        shared=shared,
    )
    for num_tokens in (1, 40):
        yield ops.add_experts(numbers(rng, num_tokens, hidden), Norm(numbers(rng, hidden), 1e-5), weights, None)


def experts_with_norms() -> Iterator[Tensor]:
    """Yield the results of experts in parallel to an MLP, as in Gemma 4."""
    rng, hidden, inner = np.random.default_rng(8), 256, 64

    def norm() -> Norm:
        return Norm(numbers(rng, hidden), 1e-6)

    weights = ExpertWeights(
        router=Router(COUNT, 2, "softmax", is_normalized=True, has_expert_scales=True),
        router_logits=ready(sized(rng, "F32", COUNT, hidden)),
        correction=None,
        gate=stacked(rng, "Q8_0", inner, hidden),
        up=stacked(rng, "Q8_0", inner, hidden),
        down=stacked(rng, "Q8_0", hidden, inner),
        activation="gelu_tanh",
        shared=SharedExpert(*(stacked(rng, "Q4_K", hidden, hidden, count) for count in (2, 1)), None),
        expert_scales=numbers(rng, COUNT),
        norms=ExpertNorms(*(norm() for _ in range(4))),
    )
    for num_tokens in (1, 40):
        yield ops.add_experts(numbers(rng, num_tokens, hidden), norm(), weights, norm(), 0.75)


def per_layer_inputs(type_: str) -> Iterator[Tensor]:
    """Yield the inputs of three layers from a table in a file, and the result of a layer's gate."""
    rng, num_layers, dim, hidden, vocab = np.random.default_rng(9), 3, 256, 128, 20
    whole = sized(rng, type_, vocab, num_layers * dim)
    with tempfile.TemporaryFile() as file:
        file.write(whole.data.contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        table = UnreadWeight(type_, whole.shape, whole.data.__getitem__, FilePlace(file.fileno(), 0))
        context = ready(sized(rng, "F32", num_layers * dim, hidden))
        weights = PerLayerWeights(table, 0.75, context, Norm(numbers(rng, dim), 1e-6))
        gate = ready(sized(rng, "F32", dim, hidden))
        for num_tokens in (1, 17):
            x, token_ids = numbers(rng, num_tokens, hidden), torch.from_numpy(rng.integers(0, vocab, num_tokens))
            inputs = ops.per_layer_inputs(x, token_ids, weights)
            yield inputs
            yield ops.gate_inputs(x, gate, "gelu_tanh", inputs, dim).floats


def answer(case: Case) -> Iterator[Tensor]:
    """Yield the bytes of an answer's row, of which `data/answers.json` stores the same on every CPU."""
    with tempfile.TemporaryDirectory() as folder, answers_in(Path(folder)) as answers:
        yield torch.frombuffer(bytearray(json.dumps(answers.of(case)), "utf-8"), dtype=torch.uint8)


def cases() -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Return the cases by name. They are not computed yet."""
    for type_ in BLOCK_TYPES:
        yield f"{type_} exact", products(type_, "exact")
        if type_ not in FLOATS:
            yield f"{type_} fast", products(type_, "fast")
            yield f"{type_} fast prompt", prompt(type_, "fast")
        yield f"{type_} exact prompt", prompt(type_, "exact")
        yield f"{type_} embed", embedding(type_)
    for kv_type in ("f32", "f16", "bf16", "q8", "q4"):
        yield f"attend {kv_type}", attention(kv_type)
    yield "attend f32 with gates", attention("f32", has_gates=True)
    yield "attend f32 in chunks", attention("f32", window=-100)
    for name in ("silu", "gelu_tanh"):
        yield f"gate {name}", activation(name)
    for scores in ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"):
        yield f"experts {scores}", experts("Q4_K", scores)
    yield "experts with norms", experts_with_norms()
    for type_ in ("BF16", "Q4_0", "Q6_K"):
        yield f"per-layer inputs {type_}", per_layer_inputs(type_)
    for case in CASES:
        if case.model != "gguf":  # AArch64's folder has no `gguf` package
            yield f"answer {case.name}", answer(case)


def main(prefixes: list[str]) -> None:
    ops.set_num_threads(1)
    for name, results in cases():
        if not prefixes or name.startswith(tuple(prefixes)):
            print(f"{name:<26} {digest(results)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
