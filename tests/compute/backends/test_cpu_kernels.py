"""Every op of `backends.cpu` against `backends.reference`, and the guarantees of the CPU path to the bit."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from block_scales import FLOATS, stored_weight
from cases import cases
from extent import IS_WHOLE, slow_except
from infer import InvalidRequestError, SamplingParams, sample_token
from infer.compute import ops
from infer.compute.backends import reference
from infer.compute.backends.cpu import operations as cpu
from infer.compute.backends.cpu.capture.forward import CapturedForward
from infer.compute.backends.cpu.isa import BY_NAME, instruction_set, usable_instruction_sets
from infer.compute.backends.cpu.layouts import LAYOUTS
from infer.compute.backends.cpu.recording import Offer, record
from infer.compute.backends.cpu.sample_records import SAMPLE_COLUMNS, SAMPLE_HISTORY, SAMPLE_LISTS
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.step import Chunk, Interrupt, Step
from infer.compute.operands.weights import Heads, Norm, Projection, StoredWeight
from infer.compute.ops import SampledStep
from infer.compute.quantization import ggml_types
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from layer_caches import attend_in_steps, make_heads, make_layer
from refusals import check_refused
from steps import join
from watched import run_python

CPU = torch.device("cpu")
TYPES = sorted(LAYOUTS)
# Others have the parts of their layouts.
ALIKE = {"F16", "IQ2_XXS", "IQ4_NL", "IQ4_XS", "NVFP4", "Q2_0", "Q3_K", "Q4_1", "Q5_0", "Q5_K", "TQ2_0"}
GATED = [("Q4_1", "Q4_1"), ("Q6_K", "Q4_K"), ("F16", "F16"), ("F32", "Q8_0")]
BLOCK_TYPES = [type_ for type_ in TYPES if type_ not in FLOATS]
# A matrix unit multiplies bytes of every type. Types differ in their scales.
SOME = {"exact": ["Q2_K", "Q4_1", "Q6_K", "Q8_0", "MXFP4", "IQ1_M", "NVFP4", "TQ1_0"], "fast": ["Q2_K", "IQ2_XS"]}


@pytest.fixture(autouse=True, scope="module")
def _three_threads():
    set_num_threads(3)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def make_weight(type_: str, rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> StoredWeight:
    """Return random bytes for block types, with scales that make the values about `scale` × small integers."""
    rng = np.random.default_rng(seed)

    def draw_scales(shape: tuple[int, ...]) -> Any:
        return rng.uniform(-1, 1, shape) * scale / 8

    return stored_weight(rng, type_, rows, columns, lambda shape: rng.standard_normal(shape) * scale, draw_scales)


def both(call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    results = []
    for name in ("cpu", "reference"):
        with ops.using(name):
            results.append(call())
    return results[0], results[1]


def prepared(*weights: StoredWeight) -> Projection:
    return ops.prepare(Projection(weights), CPU)


def product(x: Tensor, projection: Projection, residual: Tensor | None = None) -> Tensor:
    """Return a product by the CPU, added to 0 or to a residual."""
    added = torch.zeros(len(x), projection.out_features) if residual is None else residual.clone()
    return cpu.project_add(added, Activations(x), projection, None)


def prepared_plain(*weights: StoredWeight) -> Projection:
    with ops.using("reference"):
        return prepared(*weights)


def assert_near(actual: Tensor, expected: Tensor, relative: float, scale: float | None = None) -> None:
    """Check the largest error, relative to the largest value or to `scale`."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max()
    assert error <= relative * (expected.double().abs().max() if scale is None else scale) + 1e-30


@pytest.mark.slow
@pytest.mark.parametrize("type_", slow_except(("F32", "Q4_K", "Q8_0"), TYPES if IS_WHOLE else sorted({*TYPES} - ALIKE)))
@settings(max_examples=4, deadline=None)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 3),
    tokens=st.integers(1, 35),
    magnitude=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_a_projection_agrees_with_reference(
    type_: str, rows: int, blocks: int, tokens: int, magnitude: float, seed: int
) -> None:
    columns = blocks * (13 if type_ in FLOATS else ggml_types.BLOCK_TYPES[type_].block_size)
    weight = make_weight(type_, rows, columns, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator) * magnitude
    residual = torch.randn(tokens, rows, generator=generator) * magnitude
    norm = Norm(torch.rand(columns, generator=generator) + 0.5, 1e-6)
    largest_sum = float(reference.dense(weight).double().abs().sum(1).max())
    actual, expected = both(lambda: ops.norm_project(x, norm, prepared(weight)).floats)
    assert_near(actual, expected, 2e-5, largest_sum * float(reference.normalize(x, norm).abs().max()))
    actual, expected = both(lambda: ops.project_add(residual.clone(), Activations(x), prepared(weight), None))
    assert_near(actual, expected, 2e-5, largest_sum * float(x.abs().max()) + float(residual.abs().max()))


@pytest.mark.parametrize("type_", slow_except(["F32"], ["F32", "F16"]))
def test_fp8_gives_the_bits_of_floats_that_have_its_numbers(type_: str) -> None:
    """F16 has them if scales are powers of two, and F32 nearly always."""
    weight, x = make_weight("F8_E4M3", 50, 384), torch.randn(35, 384)
    scales = weight.data.view(50, 3, 132)[..., :4]
    if type_ == "F16":
        scales.copy_((2.0 ** torch.randint(-6, 3, (50, 3, 1))).view(torch.uint8))
    values = reference.dense(weight)
    floats = StoredWeight(type_, weight.shape, values.to(FLOATS[type_]))
    assert torch.equal(floats.data.float(), values)
    for tokens in (1, 2, 7, 35):
        found = [ops.norm_project(x[:tokens], None, prepared(each)).floats for each in (weight, floats)]
        assert torch.equal(*found)


@pytest.mark.parametrize("type_", slow_except(["F32", "Q4_K"], ["F32", "BF16", "Q4_1", "Q4_K"]))
def test_normed_embedding_rows_agree_with_reference(type_: str) -> None:
    weight, ids = make_weight(type_, 50, 512, seed=3), torch.tensor([0, 15, 49])
    actual, expected = both(lambda: ops.embed(prepared(weight).parts[0], ids, 1.0, 1e-5))
    assert_near(actual, expected, 1e-6)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize(
    ("activation", "types"),
    [
        *slow_except(["F32"], [(name, types) for name in ("silu", "gelu_tanh") for types in GATED]),
        *((name, ("Q8_0", "Q8_0")) for name in get_args(Activation) if name != "xielu"),
    ],
)
def test_a_gated_activation_agrees_with_reference(activation: str, types: tuple[str, str]) -> None:
    x, norm = torch.randn(19, 256), Norm(torch.rand(256) + 0.5, 1e-5)
    gate, up = (make_weight(type_, 96, 256, seed, scale=0.1) for seed, type_ in enumerate(types))
    actual, expected = both(lambda: ops.norm_gate(x, norm, prepared(gate, up), activation).floats)
    assert_near(actual, expected, 1e-4)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_an_activation_is_right_from_tiny_to_huge_values_and_shows_a_nan(activation: Activation) -> None:
    gate = torch.cat([torch.linspace(-12, 12, 473), torch.tensor([1e-30, -1e-6, 60.0, -200.0, 1e4, 0.0, math.nan])])
    weight = StoredWeight("F32", (960, 1), torch.cat([gate, torch.ones(480)]).unsqueeze(1))
    is_xielu = activation == "xielu"  # which has no gate, and an edge that is not at 0 here
    curve = torch.tensor([0.8, 1.1, 0.5, -0.7]) if is_xielu else None
    compute = ops.norm_activate if is_xielu else ops.norm_gate

    def run() -> Tensor:
        return compute(torch.ones(1, 1), None, replace(prepared(weight), curve=curve), activation).floats[0, :480]

    actual, expected = both(run)
    assert actual[-1].isnan()
    assert torch.allclose(actual[:-1], expected[:-1], rtol=1e-6, atol=1e-6)


def test_capped_logits_agree_with_reference() -> None:
    x, norm = torch.randn(3, 64), Norm(torch.rand(64) + 0.5, 1e-5)
    for rows in (48, 37):
        weight = make_weight("F32", rows, 64, scale=0.5)
        actual, expected = both(lambda weight=weight: ops.head(x, torch.arange(3), norm, prepared(weight), 2.0))
        assert_near(actual, expected, 1e-5)
        assert actual.abs().max() <= 2.0 < reference.head(x, torch.arange(3), norm, prepared_plain(weight)).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6, 2, 32), (4, 1, 20), (4, 4, 16)])
def test_heads_that_are_normalised_together_agree_with_reference(shape: tuple[int, int, int]) -> None:
    num_heads, kv_heads, dim = shape
    q_norm, k_norm = (Norm(torch.rand(count * dim) + 0.5, 1e-5) for count in (num_heads, kv_heads))
    heads = replace(make_heads(*shape, dim), q_norm=q_norm, k_norm=k_norm)
    check_attention(heads, torch.randn(330, (num_heads + 2 * kv_heads) * dim))


@pytest.mark.slow
def test_parts_of_several_types_biases_and_a_post_norm_agree_with_reference() -> None:
    x, norm, post = torch.randn(5, 256), Norm(torch.rand(256), 1e-5), Norm(torch.rand(75), 1e-5)
    parts = (make_weight("Q4_K", 32, 256), make_weight("Q4_K", 16, 256, 1), make_weight("F32", 27, 256, 2))
    bias, residual = torch.randn(75), torch.randn(5, 75)

    def run() -> Tensor:
        projection = ops.prepare(Projection(parts, bias), CPU)
        inner = ops.norm_project(x, norm, prepared(make_weight("Q8_0", 256, 256)))
        return ops.project_add(residual.clone(), inner, projection, post)

    actual, expected = both(run)
    assert_near(actual, expected, 1e-4)  # two projections in a row, 16 bits each


def test_zero_blocks_give_zero_and_denormals_do_not_overflow() -> None:
    x = torch.zeros(2, 64)
    x[1, :32] = 1e-40
    y = product(x, prepared(make_weight("Q8_0", 16, 64)))
    assert torch.equal(y[0], torch.zeros(16))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_row_and_shows(value: float) -> None:
    projection, x = prepared(make_weight("Q8_0", 32, 64)), torch.randn(3, 64)
    clean = product(x, projection)
    x[1, 5] = value
    y = product(x, projection)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert not torch.isfinite(y[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_", "precision"),
    [(type_, precision) for precision in ("exact", "fast") for type_ in (BLOCK_TYPES if IS_WHOLE else SOME[precision])],
)
def test_a_matrix_unit_gives_the_bits_of_the_vector_unit(
    type_: str, precision: ops.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    if BY_NAME["amx"] not in usable_instruction_sets():
        pytest.skip("hardware: a CPU with AMX")
    projection = cpu.prepare(Projection((make_weight(type_, 16 * 51 - 3, 768, 3),)), CPU, precision=precision)
    x, residual = torch.randn(37, 768), torch.randn(37, 16 * 51 - 3)
    for num_tokens in (4, 5, 12, 13, 31, 37):  # on both sides of the sizes at which tiles begin
        results = []
        for name in ("amx", "avx512vnni"):
            monkeypatch.setenv("INFER_ISA", name)
            results.append(product(x[:num_tokens], projection, residual[:num_tokens]))
        assert torch.equal(*results)


def test_fast_precision_is_near_and_cheaper_than_exact() -> None:
    weight, x = make_weight("Q8_0", 64, 256), torch.randn(4, 256)
    norm = Norm(torch.ones(256), 1e-5)
    fast = cpu.norm_project(x, norm, cpu.prepare(Projection((weight,)), CPU, precision="fast")).floats
    exact = cpu.norm_project(x, norm, prepared(weight)).floats
    assert_near(fast, exact, 2e-2)
    assert not torch.equal(fast, exact)
    with pytest.raises(InvalidRequestError, match="precision"):
        cpu.prepare(Projection((weight,)), CPU, precision="best")  # type: ignore[arg-type]


def check_attention(heads: Heads, qkv: Tensor, kv_type: str = "f32") -> Tensor:
    """Compare steps of a prompt, a token and many tokens with the reference, and return their results."""
    actual, expected = (
        attend_in_steps(heads, make_layer(heads, 1, 400, kv_type), qkv, [300, 1, 29], attend=attend)
        for attend in (cpu.attend, reference.attend)
    )
    assert_near(actual, expected, 5e-6 if kv_type == "f32" else 2e-2)
    return actual


def step_of(row: int, start: int, count: int) -> Step:
    return Step.of([1] * count, start, row=row)


@cases(
    "shape window rotated softcap kv_type has_sinks has_gate",
    pytest.param((9, 3, 64), None, 64, None, "f32", False, True, marks=pytest.mark.slow),
    pytest.param((4, 1, 256), 100, 64, 0.5, "f16", False, True, marks=pytest.mark.slow),
    ((4, 4, 40), None, 0, 0.5, "f32", False, False),
    ((6, 2, 20), 7, 20, 3.0, "f32", True, True),
    ((6, 2, 64), 128, 64, None, "f16", True, False),
    pytest.param((8, 2, 128), 300, 64, None, "bf16", True, False, marks=pytest.mark.slow),
    pytest.param((4, 2, 32), 40, 8, None, "q8", False, True, marks=pytest.mark.slow),
    pytest.param((6, 2, 64), 128, 64, None, "q8", True, False, marks=pytest.mark.slow),
    pytest.param((6, 2, 64), None, 64, None, "q4", True, False, marks=pytest.mark.slow),
)
def test_attention_agrees_with_reference(
    shape: tuple[int, int, int],
    window: int | None,
    rotated: int,
    softcap: float | None,
    kv_type: str,
    has_sinks: bool,
    has_gate: bool,
) -> None:
    heads = make_heads(*shape, rotated, is_normed=kv_type != "f32")
    heads = replace(heads, softcap=softcap, sinks=torch.linspace(-6, 6, shape[0]) if has_sinks else None)
    width = (shape[0] + 2 * shape[1]) * shape[2]
    if has_gate:
        heads, width = replace(heads, gate_start=width), width + shape[0] * shape[2]
    caches = [make_layer(heads, 2, 1000, kv_type, window=window) for _ in range(2)]
    steps = [step_of(0, 0, 5), step_of(1, 0, 300), step_of(0, 5, 1), join([step_of(0, 6, 2), step_of(1, 300, 1)])]
    steps += [step_of(1, 301, 600), step_of(1, 901, 3), join([step_of(1, 904, 40), step_of(0, 8, 17)])]
    for index, step in enumerate(steps):
        qkv = torch.randn(len(step.tokens), width, generator=torch.manual_seed(index))
        remaining = iter(caches)
        actual, expected = both(
            lambda qkv=qkv, step=step, left=remaining: ops.attend(Activations(qkv), heads, next(left), step).floats
        )
        assert_near(actual, expected, 5e-6 if kv_type == "f32" else 2e-2)


@pytest.mark.parametrize("of_heads", [True, False])
@pytest.mark.parametrize("curve", ["sigmoid", "softplus"])
def test_output_gates_agree_with_reference(curve: Literal["sigmoid", "softplus"], of_heads: bool) -> None:
    num_heads, dim = 6, 40
    heads = make_heads(num_heads, 2, dim, 32, is_normed=True)
    width = (num_heads + 4) * dim
    heads = replace(heads, gate_start=width, gate_curve=curve, are_gates_of_heads=of_heads)
    check_attention(heads, 8 * torch.randn(330, width + num_heads * (1 if of_heads else dim)))


@pytest.mark.parametrize("kv_type", slow_except(["f32"], ["f32", "q8"]))
def test_scaled_queries_agree_with_reference(kv_type: str) -> None:
    heads = make_heads(4, 2, 32, 32, is_normed=True)
    scaled = replace(heads, query_scales=1 + torch.arange(400.0).div(20).floor())
    qkv = torch.randn(330, 8 * 32)
    plain, found = (check_attention(own, qkv, kv_type) for own in (heads, scaled))
    assert torch.equal(plain[:20], found[:20])
    assert not torch.equal(plain[20:], found[20:])


@pytest.mark.parametrize("count", [1, 40])
def test_a_query_that_is_not_a_number_stays_in_its_head_and_shows(count: int) -> None:
    heads = make_heads(6, 2, 32, 32)
    qkv = torch.randn(300 + count, 10 * 32, generator=torch.manual_seed(0))
    found = []
    for value in (1.0, float("nan")):
        qkv[-1, 2 * 32 + 5] = value
        found.append(attend_in_steps(heads, make_layer(heads, 1, 400, "f16"), qkv, [300, count])[300:])
    is_nan = found[1].isnan()
    assert is_nan[-1, 2 * 32 : 3 * 32].all()
    assert is_nan.sum() == 32
    assert torch.equal(found[0][~is_nan], found[1][~is_nan])


class Tiny:
    """A network of random weights that calls ops as the real forward does."""

    def __init__(self, hidden: int = 64, layers: int = 2, rows: int = 4, capacity: int = 400) -> None:
        self.heads = replace(make_heads(6, 2, 32, 32, is_normed=True), gate_start=320)
        self.norm = Norm(torch.linspace(0.5, 1.5, hidden), 1e-5)

        def project(label: str, *shape: Any) -> Projection:
            return cpu.prepare(Projection((make_weight(*shape, seed=shape[1], scale=0.2),), label=label), CPU)

        parts = {"qkv": ("Q8_0", 512, hidden), "output": ("Q8_0", hidden, 192)}
        parts |= {"gate_up": ("F32", 512, hidden), "down": ("Q4_K", hidden, 256)}
        self.layers = [
            tuple(project(f"L{index}.{name}", *part) for name, part in parts.items()) for index in range(layers)
        ]
        self.embedding = cpu.prepare(Projection((make_weight("Q8_0", 300, hidden, 9, scale=0.5),)), CPU)
        self.caches = [make_layer(self.heads, rows, capacity) for _ in range(layers)]

    def forward(self, step: Step) -> Tensor:
        x = cpu.embed(self.embedding.parts[0], step.tokens, 2.0)
        for (qkv, output, gate_up, down), layer in zip(self.layers, self.caches, strict=True):
            attended = cpu.attend(cpu.norm_project(x, self.norm, qkv), self.heads, layer, step)
            x = cpu.project_add(x, attended, output, None)
            x = cpu.project_add(x, cpu.norm_gate(x, self.norm, gate_up, "silu"), down, self.norm)
        return cpu.head(x, step.logit_indices, self.norm, self.embedding)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


IDS = [(i * 37) % 300 for i in range(330)]


def prefill(tiny: Tiny, run: Callable[[Step], Tensor], sizes: list[int], row: int = 0) -> Tensor:
    spans = pairwise(accumulate(sizes, initial=0))
    steps = [Step.of(IDS[start:end], start, row=row, logit_indices=range(end - start)) for start, end in spans]
    return torch.cat([run(step).clone() for step in steps])


@pytest.mark.slow(cases=1, rest=2)
@pytest.mark.parametrize(
    "sizes", [[1] * 330, [2] * 165, [3] * 110, [5] * 66, [7] * 47 + [1], [16] * 20 + [10], [33] * 10, [300, 30]]
)
def test_chunks_of_any_size_give_the_same_bits(tiny: Tiny, sizes: list[int]) -> None:
    whole = prefill(tiny, tiny.forward, [330])
    assert torch.isfinite(whole).all()
    assert torch.equal(prefill(tiny, tiny.forward, sizes), whole)


def test_neighbours_in_a_batch_change_no_bit(tiny: Tiny) -> None:
    alone = prefill(tiny, tiny.forward, [20], row=1)
    steps = [Step.of(IDS[:20], row=row, logit_indices=range(20)) for row in range(4)]
    assert torch.equal(tiny.forward(join(steps)).view(4, 20, -1), alone.expand(4, -1, -1))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_recording_gives_the_bits_of_the_ops_one_by_one(tiny: Tiny, num_threads: int) -> None:
    captured = CapturedForward(tiny.forward, capacity=64, max_logits=40)
    expected = prefill(tiny, tiny.forward, [330])
    for sizes in ([330], [1] * 330, [50] * 6 + [30]):
        assert torch.equal(prefill(tiny, lambda step: captured.run(step, num_threads), sizes), expected)


# Each row in a multi-step, and rows of different parameters below
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(temperature=0, repetition_penalty=1.3, repetition_window=16),
    SamplingParams(temperature=0.9, repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=-0.5, seed=3),
    SamplingParams(temperature=0.7, logit_bias={5: 3.0, 7: -math.inf}, min_new_tokens=90, stop_token_ids=[11], seed=4),
    SamplingParams(temperature=1.0, allowed_token_ids=range(0, 300, 3), temperature_last=True, top_p=0.8, seed=5),
]


def single_steps(tiny: Tiny, params: SamplingParams, count: int) -> list[int]:
    """Return the tokens by the definition, one forward at a time."""
    context = [7]
    for position in range(count):
        logits = tiny.forward(Step.of(context[-1:], position))[0]
        context.append(sample_token(logits, context, params, num_prompt_tokens=1))
    return context[1:]


def begin_rows(params: list[SamplingParams], capacity: int = 200) -> tuple[SamplingColumns, History]:
    columns = SamplingColumns.of(params, 300, num_prompt_tokens=[1] * len(params))
    history = History(len(params), capacity, 300)
    for slot in range(history.num_slots):
        history.begin(slot, [7])
    return columns, history


@pytest.mark.slow(cases=2, rest=3)
@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_a_multi_step_gives_the_tokens_of_single_steps(tiny: Tiny, params: SamplingParams) -> None:
    captured = CapturedForward(tiny.forward, capacity=64)
    expected = single_steps(tiny, params, 100)
    start = [Chunk(0, [7])], [0]
    whole, cut, interrupted = (
        captured.run_multi_step(SampledStep(*start, *begin_rows([params])), 100, **each).token_ids[0]
        for each in ({}, {"stop_ids": [expected[20], 299]}, {"interrupt": Interrupt(1)})
    )
    assert (whole, cut, interrupted) == (expected, expected[: len(cut)], expected[:1])
    assert cut[-1] in (expected[20], 299)
    columns, history = begin_rows([params])
    (first,), *_ = captured.run_multi_step(SampledStep(*start, columns, history), 40)
    (then,), *_ = captured.run_multi_step(SampledStep([Chunk(0, first[-1:])], [40], columns, history), 60)
    assert first + then == expected


def test_columns_and_histories_have_the_elements_that_kernels_read() -> None:
    columns, history = SamplingColumns.of([SamplingParams(temperature=0)], 8), History(1, 4, 8)
    found = {name: columns.whole[name] for name in SAMPLE_COLUMNS}
    found |= {name: getattr(columns, name) for name in SAMPLE_LISTS}
    found |= {name: getattr(history, name) for name in SAMPLE_HISTORY}
    for name, type_ in (SAMPLE_COLUMNS | SAMPLE_LISTS | SAMPLE_HISTORY).items():
        stored, read = found[name].numpy().dtype, np.dtype(type_)
        assert (stored.itemsize, stored.kind == "f") == (read.itemsize, read.kind == "f"), name


def test_rows_that_join_and_leave_change_nothing_of_a_recording_but_words(tiny: Tiny) -> None:
    """All sequences share one recording, one table, one history and the same columns. Each gets the tokens that it gets
    alone, in any slot and with any neighbours."""
    captured = CapturedForward(tiny.forward, capacity=64)
    columns, history = SamplingColumns(4, 300), History(4, 200, 300)
    tables = set()
    for slots in ([2], [0, 2], [3, 0, 1], [1], [2, 1, 0, 3]):
        expected = []
        for slot in slots:
            params = PARAMS[(slot + len(slots)) % len(PARAMS)]
            columns.write(slot, params, 1)
            history.begin(slot, [7])
            expected.append(single_steps(tiny, params, 6))
        columns.select(slots)
        parts = [Chunk(slot, [7]) for slot in slots]
        found = captured.run_multi_step(SampledStep(parts, [0] * len(slots), columns, history), 5)
        assert found.token_ids == [token_ids[:5] for token_ids in expected]
        last = [Chunk(slot, token_ids[4:5]) for slot, token_ids in zip(slots, expected, strict=True)]
        found = captured.launch(SampledStep(last, [5] * len(slots), columns, history)).wait()
        assert found.token_ids == [token_ids[5:] for token_ids in expected]
        assert captured._multi_step is not None
        assert captured._verifier is not None
        tables |= {captured._multi_step._table.serial, captured._verifier._table.serial}
    assert len(tables) == 2


def test_rows_with_a_penalty_and_no_history_are_refused(tiny: Tiny) -> None:
    captured = CapturedForward(tiny.forward, capacity=64)
    columns = SamplingColumns.of([SamplingParams(temperature=0, presence_penalty=1.0)], 300)
    check_refused(lambda: captured.launch(SampledStep([Chunk(0, [7])], [0], columns)), "need a history of 300 words")


def test_a_row_that_fails_ends_the_multi_step_with_its_code(tiny: Tiny) -> None:
    captured = CapturedForward(tiny.forward, capacity=64)
    columns, history = begin_rows([SamplingParams(temperature=0, allowed_token_ids=[3], logit_bias={3: -math.inf})])
    step = SampledStep([Chunk(0, [7])], [0], columns, history)
    assert captured.run_multi_step(step, 10).token_ids == [[sampler.NOTHING_ALLOWED]]


def test_labels_name_the_layer_and_the_op(tiny: Tiny) -> None:
    labels = [label for label, _ in CapturedForward(tiny.forward, capacity=8).profile(Step.of([1]))]
    assert {"embed.rows", "L0.qkv.normalize", "L1.attend.few", "L1.down.post_norm", "L0.gate_up.normalize"} < {*labels}
    assert "head.normalize" in labels
    assert not {"L0.output.normalize", "L0.down.normalize"} & set(labels)
    assert labels[-1].startswith("head.matmul")


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
# The heads of 20 share blocks of quantised activations.
@pytest.mark.parametrize(
    ("shape", "context", "num_barriers"),
    [((6, 2, 32), 255, 6), ((6, 2, 32), 256, 7), ((24, 8, 32), 256, 6), ((6, 2, 20), 10, 7)],
)
def test_a_layer_meets_before_its_merge_only_if_threads_divide_chunks(
    shape: tuple[int, int, int], context: int, num_barriers: int, kv_type: str
) -> None:
    heads, hidden = make_heads(*shape, rotated=0), 64
    layer, norm = make_layer(heads, 1, 300, kv_type), Norm(torch.ones(hidden), 1e-5)
    attended = shape[0] * shape[2]
    qkv, output, gate_up, down = (
        cpu.prepare(Projection((make_weight("Q8_0", *sizes),)), CPU)
        for sizes in (((shape[0] + 2 * shape[1]) * shape[2], hidden), (hidden, attended), (256, hidden), (hidden, 128))
    )

    def forward(step: Step) -> Tensor:
        x = torch.ones(1, hidden)
        x = cpu.project_add(x, cpu.attend(cpu.norm_project(x, norm, qkv), heads, layer, step), output, None)
        return cpu.project_add(x, cpu.norm_gate(x, norm, gate_up, "silu"), down, None)

    captured = CapturedForward(forward, capacity=1, max_logits=1)
    captured.run(Step.of([1], context), num_threads=2)
    assert captured._recording.state["released"][0] == num_barriers


def test_an_offer_to_quantise_is_redeemed_in_one_form() -> None:
    x, norm = torch.randn(4, 64), Norm(torch.ones(64), 1e-5)
    halves = cpu.prepare(Projection((make_weight("Q8_0", 128, 64),)), CPU)
    assert cpu.norm_gate(x, norm, halves, "silu").twin is None  # run one by one, ops quantise their own floats
    with record(4, 1):
        offer = cpu.norm_gate(x, norm, halves, "silu").twin
        assert isinstance(offer, Offer)
        address = offer.redeem(2, 1000)
        assert address == offer.redeem(2, 1000) == offer.arguments.record["quantized"]
        assert offer.redeem(1, 1000) is None


@pytest.mark.parametrize("types", [("Q8_0",), ("Q8_0", "F32"), ("F32", "Q8_0"), ("F32",)])
def test_floats_are_written_only_if_an_op_reads_them(types: tuple[str, ...]) -> None:
    gate_up = cpu.prepare(Projection((make_weight("Q8_0", 128, 64),)), CPU)
    down = cpu.prepare(Projection(tuple(make_weight(type_, 32, 64) for type_ in types)), CPU)
    with record(4, 1):
        hidden = cpu.norm_gate(torch.randn(4, 64), None, gate_up, "silu")
        cpu.project_add(torch.randn(4, 32 * len(types)), hidden, down, None)
    assert isinstance(hidden.twin, Offer)
    record_ = hidden.twin.arguments.record
    assert record_["out"] == (0 if len(types) == 1 else hidden.floats.data_ptr())
    assert record_["quantized"] != 0


def test_weights_that_were_not_prepared_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prepare"):
        cpu.norm_project(torch.randn(1, 64), None, Projection((make_weight("Q8_0", 32, 64),)))


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_ISA", "mmx")
    check_refused(lambda: instruction_set(), "mmx")


def small_logits() -> Tensor:
    """Make a new network of one layer, and return its logits."""
    torch.manual_seed(0)
    tiny = Tiny(layers=1)
    return prefill(tiny, tiny.forward, [40, 1, 7])


@pytest.fixture(scope="module")
def usual_logits() -> Tensor:
    return small_logits()


@pytest.mark.slow
@pytest.mark.parametrize("isa", list(BY_NAME)[1 if IS_WHOLE else 2 :])
def test_instruction_sets_give_the_same_bits(isa: str, usual_logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is that of this CPU, or compared with its matrix unit above."""
    if BY_NAME[isa] not in usable_instruction_sets():
        pytest.skip(f"hardware: a CPU with {isa}")
    monkeypatch.setenv("INFER_ISA", isa)
    assert torch.equal(small_logits(), usual_logits)


@pytest.mark.slow
def test_a_cpu_without_avx_runs(usual_logits: Tensor) -> None:
    code = "from test_cpu_kernels import small_logits; print(small_logits().flatten()[:20].tolist())"
    portable = {"INFER_ISA": "portable", "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
    values = torch.tensor(json.loads(run_python(code, **portable).stdout))
    assert torch.allclose(values, usual_logits.flatten()[:20], rtol=1e-3, atol=1e-3)
