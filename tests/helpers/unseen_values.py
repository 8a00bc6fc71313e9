"""A claim about every backend: a key or value beyond its type's range changes no token that does not see it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from infer.compute.operands.weights import Heads
from layer_caches import Attend, attend_in_steps, make_heads, make_layer

KEY, VALUE = 4, 6  # of the first head of keys, and of values, in heads of q, k and v
Faults = Sequence[tuple[int, float]]
FAULTS: Faults = [(VALUE, number) for number in (1e5, -1e5, 1e30, math.inf, math.nan)]
FAULTS = [*FAULTS, (KEY, 1e5), (KEY, math.nan)]


class Span(NamedTuple):
    """A row's tokens, and the one of them whose key or value is wrong. A token sees `sinks` and a window, or all."""

    length: int
    wrong: int
    window: int = 0
    sinks: int = 0

    def unaware(self) -> Tensor:
        """Return True for each token that does not see the wrong one."""
        tokens = torch.arange(self.length)
        return (tokens < self.wrong) | ((tokens >= self.wrong + self.window) if self.window else torch.tensor(False))


def check_unseen(
    attend: Attend, kv_type: str, dim: int, span: Span, ways: Sequence[Sequence[int]], faults: Faults = FAULTS
) -> None:
    """Check each fault in each way of dividing the tokens into steps. All ways have the same bits."""
    heads = make_heads(4, 2, dim, 16)
    qkv, unaware = torch.randn(span.length, 8, dim, generator=torch.manual_seed(0)), span.unaware()
    healthy = [_attended(attend, heads, kv_type, span, qkv, sizes) for sizes in ways]
    for head, number in faults:
        wrong = qkv.clone()
        wrong[span.wrong, head + 1, 5] = number
        found = [_attended(attend, heads, kv_type, span, wrong, sizes) for sizes in ways]
        for own, right in zip(found, healthy, strict=True):
            assert torch.equal(own[unaware], right[unaware]), (head, number)
            assert torch.equal(own[:, :2], right[:, :2]), "the heads of other keys"
            is_nan = own[~unaware, 2:].isnan()
            assert not is_nan.any() if math.isfinite(number) else is_nan.all(), (head, number)
            assert torch.equal(own.nan_to_num(7), found[0].nan_to_num(7)), (head, number)


def _attended(attend: Attend, heads: Heads, kv_type: str, span: Span, qkv: Tensor, sizes: Sequence[int]) -> Tensor:
    layer = make_layer(heads, 1, span.length, kv_type, window=span.window)
    layer = replace(layer, pages=replace(layer.pages, sinks=torch.tensor([span.sinks])))
    return attend_in_steps(heads, layer, qkv, sizes, attend=attend).view(len(qkv), 4, heads.head_dim)
