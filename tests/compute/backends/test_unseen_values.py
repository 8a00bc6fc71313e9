"""Keys and values beyond their type's range, on the reference and on a CPU: `unseen_values` has the claim."""

import math

import pytest
import torch

from extent import slow_except
from infer.compute.backends import reference
from infer.compute.backends.cpu import operations as cpu
from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.compute.quantization.kv_layout import decode_keys, decode_values, encode_keys, encode_values
from layer_caches import attend_in_steps, make_layer
from unseen_values import Span, check_unseen

SPANS = {
    "all": (Span(274, 259), [[274], [250, *[1] * 24], [250, 4, 20], [256, 3, 15], [259, 15]]),
    "window": (Span(60, 37, window=9, sinks=2), [[60], [1] * 60, [30, 8, 4, 18]]),
}


@pytest.mark.parametrize(
    ("kv_type", "dim"), slow_except([("f32", 32), ("f16", 20)], [*((kv_type, 32) for kv_type in KV_TYPES), ("f16", 20)])
)
@pytest.mark.parametrize("name", SPANS)
def test_a_wrong_position_changes_no_token_that_does_not_see_it(name: str, kv_type: str, dim: int) -> None:
    check_unseen(cpu.attend, kv_type, dim, *SPANS[name])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_the_definition_shows_no_token_a_value_that_it_does_not_see(kv_type: str) -> None:
    for span in (Span(20, 9), Span(20, 9, window=4)):
        check_unseen(reference.attend, kv_type, 32, span, [[20]])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_numbers_are_stored_as_the_largest_of_their_type(kv_type: str) -> None:
    for number in (65_504.0, 65_519.0, 65_520.0, 1e5, 1e30):
        x = torch.full((1, 32), number)
        x[0, ::2] = -number
        for encode, decode in ((encode_keys, decode_keys), (encode_values, decode_values)):
            found = decode(encode(x, kv_type), kv_type)
            assert found.isfinite().all()
            if number <= 65_504:
                assert torch.allclose(found, x, rtol=4e-3)
        if kv_type == "f16":
            assert torch.equal(decode_values(encode_values(x, "f16"), "f16"), x.clamp(-65_504, 65_504))


def test_a_chunk_whose_keys_are_all_wrong_is_not_left_out() -> None:
    heads = Heads(2, 1, 32, 32**-0.5, None, None, None)
    qkv = torch.randn(300, 4, 32)
    qkv[:256, 2, 3] = math.nan
    for sizes in ([300], [256, 44]):
        assert attend_in_steps(heads, make_layer(heads, 1, 300), qkv, sizes).isnan().all()
