"""`fast` attention to keys and values in bf16, by dot products of AVX512-BF16: one result, near the definition's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer.compute.backends import reference
from infer.compute.backends.cpu import isa
from infer.compute.backends.cpu import operations as cpu
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_layout import LayerCache
from layer_caches import attend_in_steps, make_heads, make_layer, threads
from steps import join
from unseen_values import Span, check_unseen

if not isa.instruction_set().has_pairs:
    pytest.skip("hardware: a CPU with AVX512-BF16", allow_module_level=True)

CAPACITY, LENGTH, CHUNK = 640, 601, 256
SHAPES = [(9, 3, 64), (6, 2, 32), (4, 1, 256), (8, 2, 80)]
WINDOWS = [(0, 0), (0, 100), (4, 20), (20, 12), (260, 10), (0, -23)]  # sinks, window


def make_row(shape: tuple[int, int, int], sinks: int = 0, window: int = 0, page_tokens: int = 64) -> LayerCache:
    """Return a cache whose bytes are all those of NaN, with its pages in another order."""
    layer = make_layer(make_heads(*shape), 3, CAPACITY, "bf16", window=window, fill=0xFF, page_tokens=page_tokens)
    order = torch.randperm(layer.pages.table.numel(), generator=torch.manual_seed(2)).view(layer.pages.table.shape)
    return replace(layer, pages=replace(layer.pages, table=order, sinks=torch.full((3,), sinks)))


def make_fast(shape: tuple[int, int, int], rotated: int = 32) -> tuple[Heads, Tensor]:
    heads, features = make_heads(*shape, rotated), (shape[0] + 2 * shape[1]) * shape[2]
    return replace(heads, precision="fast"), torch.randn(LENGTH, features, generator=torch.manual_seed(4))


def expected(heads: Heads, qkv: Tensor) -> Tensor:
    """Return sums in float64 of queries, keys, values and weights e^(s − m) in bf16. m is a chunk's largest score."""
    counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
    q, k, v = (x.movedim(0, 1) for x in qkv.view(LENGTH, -1, heads.head_dim).split(counts, dim=1))
    k, v = (x.bfloat16().double().repeat_interleave(counts[0] // counts[1], dim=0) for x in (k, v))
    scores = (q * torch.tensor(heads.scale)).bfloat16().double() @ k.mT
    scores.masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    largest, total, values = scores.amax(-1, keepdim=True), torch.zeros(()).double(), torch.zeros(()).double()
    for own, seen in zip(scores.split(CHUNK, dim=-1), v.split(CHUNK, dim=1), strict=True):
        m = own.amax(-1, keepdim=True)
        weights = (own - m).nan_to_num(-torch.inf).exp().float().bfloat16().double() * (m - largest).exp()
        total, values = total + weights.sum(-1, keepdim=True), values + weights @ seen
    return (values / total).movedim(0, 1).flatten(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_weights_are_rounded_and_nothing_else(shape: tuple[int, int, int]) -> None:
    heads, qkv = make_fast(shape, rotated=0)
    errors = (attend_in_steps(heads, make_row(shape), qkv, [LENGTH]) - expected(heads, qkv)).abs().flatten()
    assert errors.sort().values[int(0.98 * len(errors))] < 2e-6
    assert errors.max() < 4e-3  # a weight that is rounded the other way


@pytest.mark.parametrize(("sinks", "window"), WINDOWS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_near_the_definition_in_every_kind(sinks: int, window: int, softcap: float | None) -> None:
    shape = 6, 2, 32
    heads, qkv = make_fast(shape)
    heads = replace(heads, softcap=softcap, sinks=torch.linspace(-6, 6, 6))
    sizes = [300, 1, 3, 1, 200, 4, 1, 91]
    found, exact, wanted = (
        attend_in_steps(own, make_row(shape, sinks, window), qkv, sizes, attend=attend)
        for own, attend in (
            (heads, cpu.attend),
            (replace(heads, precision="exact"), cpu.attend),
            (heads, reference.attend),
        )
    )
    assert (found - wanted).norm() < 4e-3 * wanted.norm()
    assert (exact - wanted).norm() < 2e-6 * wanted.norm()


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (20, 70), (5, 300)])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_pages_threads_and_neighbours_change_no_bit(
    shape: tuple[int, int, int], sinks: int, window: int
) -> None:
    heads, qkv = make_fast(shape)
    whole = attend_in_steps(heads, make_row(shape, sinks, window), qkv, [LENGTH])
    for num_threads, sizes, page_tokens in (
        (1, [1] * 40 + [261] + [3] * 100, 16),
        (2, [300, 301], 256),
        (5, [7] * 85 + [6], 64),
    ):
        with threads(num_threads):
            found = attend_in_steps(heads, make_row(shape, sinks, window, page_tokens), qkv, sizes)
        assert torch.equal(found, whole)
    layer = make_row(shape, sinks, window)
    for start, count in ((0, 290), (290, 1), (291, 3)):
        step = join([Step.of([1] * count, start, row=row) for row in (0, 2, 1)])
        found = cpu.attend(Activations(qkv[start : start + count].repeat(3, 1)), heads, layer, step).floats
        assert torch.equal(found.view(3, count, -1), whole[start : start + count].expand(3, -1, -1))


@pytest.mark.parametrize("span", [Span(274, 259), Span(60, 37, window=9, sinks=2)])
def test_a_wrong_position_changes_no_token_that_does_not_see_it(span: Span) -> None:
    ways = [[span.length], [*[1] * 40, span.length - 40]]
    check_unseen(lambda x, heads, *rest: cpu.attend(x, replace(heads, precision="fast"), *rest), "bf16", 32, span, ways)


def test_other_cpus_heads_and_types_have_the_bits_of_exact_and_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Attention(num_heads=6, num_kv_heads=2, head_dim=32, rope=None, scale=1.0)
    ways = [("fast", "bf16", layer), ("fast", "f16", layer), ("exact", "bf16", layer)]
    ways.append(("fast", "bf16", replace(layer, head_dim=40)))
    assert [isa.stored_form(kv_type, precision, each.head_dim) for precision, kv_type, each in ways] == [
        isa.BF16_PAIRS,
        "f16",
        "bf16",
        "bf16",
    ]
    heads, qkv = make_fast((6, 2, 32))
    monkeypatch.setenv("INFER_ISA", "avx2")
    assert isa.stored_form("bf16", "fast", 32) == "bf16"
    fast, exact = (
        attend_in_steps(each, make_row((6, 2, 32)), qkv, [300, 301])
        for each in (heads, replace(heads, precision="exact"))
    )
    assert torch.equal(fast, exact)
