"""Claims about the error of attention in Triton's interpreter, which is as small as that of sums in float32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer.compute.backends import reference
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_layout import LayerCache, decode_keys, decode_values, key_parts, value_parts
from layer_caches import make_layer

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends import cuda

pytestmark = pytest.mark.usefixtures("quick_interpreter")
DIM, CONTEXT = 32, 330
HEADS = Heads(4, 1, DIM, DIM**-0.5, None, None, None)


def filled(kv_type: str, keys: Tensor, values: Tensor) -> LayerCache:
    """Return a cache of one row; its slots after the context are NaN."""
    layer = make_layer(HEADS, 1, CONTEXT + 40, kv_type, fill=0x7E if kv_type in ("q8", "q4") else 0xFF)
    qkv = torch.cat([torch.zeros(CONTEXT, 4 * DIM), keys, values], dim=1)
    reference.attend(Activations(qkv), HEADS, layer, Step.of([1] * CONTEXT))
    return layer


def in_float64(layer: LayerCache, q: Tensor, heads: Heads = HEADS) -> Tensor:
    """Return the attention of q [heads, dim] to the first CONTEXT + 1 slots."""
    keys = decode_keys(key_parts(layer.keys, layer.kv_type), layer.kv_type).flatten(0, -2)[: CONTEXT + 1]
    values = decode_values(value_parts(layer.values, layer.kv_type), layer.kv_type).flatten(0, -2)[: CONTEXT + 1]
    weights = torch.softmax(q.double() @ keys.double().T * heads.scale, dim=-1)
    return (weights @ values.double()).flatten()


def errors(kv_type: str, q: Tensor, keys: Tensor, values: Tensor) -> tuple[float, float]:
    """Return the largest error of the kernels and of float32, relative to the largest value."""
    qkv, step, found = torch.cat([q.flatten(), keys[-1], values[-1]])[None], Step.of([1], CONTEXT), []
    for ops in (cuda, reference):
        layer = filled(kv_type, keys, values)
        attended = ops.attend(Activations(qkv), HEADS, layer, step).floats[0]
        expected = in_float64(layer, q)
        found.append(float((attended.double() - expected).abs().max() / expected.abs().max()))
    return found[0], found[1]


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8", "q4"])
def test_the_error_is_that_of_float32(kv_type: str) -> None:
    worst, worst_of_float32 = 0.0, 0.0
    for seed in range(3):
        generator = torch.manual_seed(seed)
        q, keys, values = (torch.randn(n, DIM, generator=generator) for n in (4, CONTEXT, CONTEXT))
        ours, float32 = errors(kv_type, q * 3, keys, values)
        worst, worst_of_float32 = max(worst, ours), max(worst_of_float32, float32)
    assert worst < 1e-6
    assert worst <= 3 * worst_of_float32


@pytest.mark.parametrize(
    ("kv_type", "scale"), [(kv_type, scale) for kv_type in ("f16", "bf16") for scale in (1e-6, 1e6)] + [("q8", 1e3)]
)
def test_queries_and_keys_of_any_size_are_multiplied_as_exactly(kv_type: str, scale: float) -> None:
    """Halves end at 65,504, and lose bits below 6e-5. Scales of quantised keys are halves, too."""
    q, keys, values = (torch.randn(n, DIM, generator=torch.manual_seed(5)) for n in (4, CONTEXT, CONTEXT))
    ours, float32 = errors(kv_type, q * scale, keys / scale if kv_type != "f16" else keys, values)
    assert ours <= max(3 * float32, 1e-6)


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8"])
def test_many_small_weights_beside_a_large_one_keep_their_bits(kv_type: str) -> None:
    """The value of the largest weight is 0. The other weights are 2^-14 of it, so the result is their sum."""
    q, keys = torch.zeros(4, DIM), torch.zeros(CONTEXT, DIM)
    q[:, 0], keys[17, 0] = DIM**0.5, 14 * 0.6931471805599453
    values = torch.rand(CONTEXT, DIM, generator=torch.manual_seed(2)) + 0.5
    values[17] = 0
    ours, float32 = errors(kv_type, q, keys, values)
    assert ours <= max(3 * float32, 1e-6)


@pytest.mark.parametrize(("kv_type", "size"), [("bf16", 1e30), ("q8", 1e6)])
def test_values_that_no_half_can_hold_are_added(kv_type: str, size: float) -> None:
    q, keys, values = (torch.randn(n, DIM, generator=torch.manual_seed(8)) for n in (4, CONTEXT, CONTEXT))
    ours, float32 = errors(kv_type, q, keys, values * size)
    assert ours <= max(3 * float32, 1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_query_that_is_not_finite_gives_nan_only_to_its_head() -> None:
    q, keys, values = (torch.randn(n, DIM, generator=torch.manual_seed(1)) for n in (4, CONTEXT, CONTEXT))
    q[1, 3] = float("nan")
    layer = filled("f16", keys, values)
    qkv = torch.cat([q.flatten(), keys[-1], values[-1]])[None]
    attended = cuda.attend(Activations(qkv), replace(HEADS), layer, Step.of([1], CONTEXT)).floats.view(4, DIM)
    assert attended[1].isnan().all()
    assert torch.isfinite(attended[[0, 2, 3]]).all()
