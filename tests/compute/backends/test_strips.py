"""Prompts have the bits of single tokens. Weights are unpacked once for many tokens, and read packed for one."""

import numpy as np
import pytest
import torch

from block_scales import FLOATS
from extent import slow_except
from infer.compute import ops
from infer.compute.backends.cpu import isa
from infer.compute.backends.cpu.isa import BY_NAME, usable_instruction_sets
from infer.compute.backends.cpu.layouts import LAYOUTS, PLANES
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.operands.weights import Norm, Projection
from kernel_digests import numbers, sized

CPU = torch.device("cpu")
ROWS = 9 * 16  # units of two groups, and one of a single group
TOKENS = 9 * 16 + 5  # panels of more than one strip, and a part of a panel
SEEN = (0, 15, 16, 127, 128, 143, 144, 148)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)


@pytest.mark.parametrize(
    ("type_", "precision", "isa"),
    slow_except(
        [(type_, "exact", "") for type_ in ("F32", "Q8_0", "Q4_K", "F8_E4M3")],
        [
            *((type_, "exact", "") for type_ in LAYOUTS),
            *((type_, "fast", "") for type_ in ("Q6_K", "IQ2_XS")),
            *((type_, "exact", "avx2") for type_ in ("Q4_K", "F16")),
        ],
    ),
)
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    type_: str, precision: ops.Precision, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa:
        if BY_NAME[isa] not in usable_instruction_sets():
            pytest.skip(f"hardware: a CPU with {isa}")
        monkeypatch.setenv("INFER_ISA", isa)
    rng, columns = np.random.default_rng(0), 264 if type_ in FLOATS else 1280  # three strips, the last of them shorter
    weight = ops.prepare(Projection((sized(rng, type_, ROWS, columns),)), CPU, precision)
    x = numbers(rng, TOKENS, columns)
    prompt = ops.norm_project(x, None, weight).floats
    for token in SEEN:
        alone = ops.norm_project(x[token : token + 1], None, weight).floats[0]
        assert torch.equal(prompt[token], alone), token


def test_gate_and_up_have_the_bits_of_tokens_one_by_one() -> None:
    rng = np.random.default_rng(0)
    both = ops.prepare(Projection(tuple(sized(rng, "F8_E4M3", 64, 1280) for _ in range(2))), CPU)
    x, norm = numbers(rng, 37, 1280), Norm(torch.ones(1280), 1e-5)
    prompt = ops.norm_gate(x, norm, both, "silu").floats
    for token in (0, 31, 32, 36):
        assert torch.equal(prompt[token], ops.norm_gate(x[token : token + 1], norm, both, "silu").floats[0])


@pytest.mark.parametrize("is_halved", [True, False])
def test_types_that_are_read_without_much_work_are_not_unpacked_by_wide_tiles(
    is_halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "halves_vectors", lambda: is_halved)

    def unpacks(isa: str, type_: str, precision: str) -> bool:
        instructions, layout = BY_NAME[isa], LAYOUTS[type_]
        return instructions.unpacks_strips(layout, instructions.form(layout, PLANES[precision]))

    packed = ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "F32", "BF16")
    assert not any(unpacks("avx512vnni", type_, "exact") for type_ in packed)
    assert unpacks("avx512vnni", "F16", "exact") == is_halved
    assert not unpacks("avx512bf16", "BF16", "fast")
    assert all(unpacks("avx512vnni", type_, "exact") for type_ in ("IQ1_S", "IQ2_XS", "IQ3_XXS", "F8_E4M3"))
    assert all(unpacks("avx2", type_, "exact") for type_ in ("Q4_0", "Q4_K", "Q6_K", "F16"))
    assert not any(unpacks("amx", type_, "exact") for type_ in ("Q4_K", "IQ2_XS"))
