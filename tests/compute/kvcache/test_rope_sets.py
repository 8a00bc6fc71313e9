"""Two sets of rope factors in one table: each row's tokens rotate by its own set, with any neighbours in a step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from extent import slow_except
from infer.compute import ops
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, RopeTable
from infer.compute.quantization.kv_layout import LayerCache
from layer_caches import make_layer
from steps import join

NUM_HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 48, 300
SETS = [0, 1, 1, 0]
CHUNKS = [200, 1, 3, 40, 1, 55]  # tokens of each row in a step: many, one, a few


def make_table(half: int) -> RopeTable:
    thetas = torch.stack([base ** -torch.linspace(0, 1, half) for base in (50.0, 900.0)])
    angles = torch.arange(LENGTH)[:, None] * thetas[:, None]
    return RopeTable(angles.cos(), angles.sin())


def heads_of(table: RopeTable) -> Heads:
    return Heads(NUM_HEADS, KV_HEADS, DIM, DIM**-0.5, table, None, None)


def only(table: RopeTable, index: int) -> RopeTable:
    return RopeTable(table.cos[index : index + 1].clone(), table.sin[index : index + 1].clone())


def layer_of(sets: list[int], furthest: int | None) -> LayerCache:
    layer = make_layer(heads_of(make_table(4)), len(sets), LENGTH, window=90)
    sinks = torch.full((len(sets),), 4)
    return replace(layer, pages=replace(layer.pages, sinks=sinks, rope_sets=torch.tensor(sets), furthest=furthest))


def qkv_of(row: int) -> Tensor:
    return torch.randn(LENGTH, (NUM_HEADS + 2 * KV_HEADS) * DIM, generator=torch.manual_seed(row))


def attend_all(layer: LayerCache, heads: Heads, rows: list[int]) -> Tensor:
    """Return the attended values, [rows, tokens, out]. Row i of the layer gets the keys and values of `rows[i]`."""
    out, start = [], 0
    for size in CHUNKS:
        step = join([Step.of([1] * size, start, row=row) for row in range(len(rows))])
        qkv = torch.cat([qkv_of(row)[start : start + size] for row in rows])
        out.append(ops.attend(Activations(qkv), heads, layer, step).floats.unflatten(0, (len(rows), size)))
        start += size
    return torch.cat(out, dim=1)


@pytest.mark.parametrize(
    ("kernels", "half", "furthest"),
    slow_except([("cpu", 5, 99)], [("cpu", 16, None), ("cpu", 5, 99), ("reference", 5, None), ("reference", 16, 99)]),
)
def test_each_row_turns_by_its_own_set(kernels: str, half: int, furthest: int | None) -> None:
    table = make_table(half)
    with ops.using(kernels):
        found = attend_all(layer_of(SETS, furthest), heads_of(table), list(range(len(SETS))))
        for row, index in enumerate(SETS):
            alone = attend_all(layer_of([0], furthest), heads_of(only(table, index)), [row])[0]
            assert torch.allclose(found[row], alone, atol=1e-6)
            assert kernels == "reference" or torch.equal(found[row], alone)
            other = attend_all(layer_of([0], furthest), heads_of(only(table, 1 - index)), [row])[0]
            assert (found[row] - other).abs().max() > 1e-3


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_table_of_one_set_serves_every_row(kernels: str) -> None:
    heads = heads_of(only(make_table(16), 0))
    with ops.using(kernels):
        assert torch.equal(attend_all(layer_of([1], None), heads, [3]), attend_all(layer_of([0], None), heads, [3]))
