"""The commands of a projection: its activations, its product, and what is done with each result.

The ops of `PerLayerInput` are here, too: all layers' inputs of a token, and the gate with which a layer takes its own.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.layouts import BLOCK, PANEL, SPARE_TOKENS
from infer.compute.backends.cpu.recording import Offer, Run, scope
from infer.compute.backends.cpu.records import ADD_ROWS, EMBED_FROM_FILE, EPILOGUE, MATMUL, NORMALIZE
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, BARRIER_IF_MANY, NO_BARRIER, Arguments
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.backends.cpu.workspace import groups_per_unit
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.group import Shares
from infer.compute.operands.weights import Norm, PerLayerWeights, Projection, UnreadWeight, Weight
from infer.errors import InvalidRequestError

_CACHED_ACTIVATIONS = 1 << 19  # bytes of activations that should stay in a core's cache while weights stream by


def project(
    run: Run,
    x: Activations,
    norm: Norm | None,
    projection: Projection,
    to: tuple[Tensor, int],
    *,
    kind: str = "plain",
    of_logits: bool = False,
    softcap: float = 0,
    weights: Tensor | None = None,
    factors: tuple[Tensor, int] | None = None,
) -> None:
    """Append the commands of projection(norm(x)). Results go to f32 `to[0]`, from column `to[1]` on, as `kind` says.

    `matmul.make_store` defines the kinds. `of_logits`: only the tokens with logits. `weights`, f32 [slots], multiply
    rows of the kind "weighted". `factors` are the f32 matrix, and its first column, that a "gate_…" kind gates.
    """
    function = compiled_address(".matmul.matmul:make_store", EPILOGUE, kind)
    sources: dict[int, dict[str, int]] = {}
    column = 0
    for index, part in enumerate(projection.parts):
        weight = packed(part)
        if weight.form not in sources:
            sources[weight.form] = activations_of(run, x, norm, weight, of_logits=of_logits)
        epilogue = epilogue_of(to, column, weight.out_features, projection.bias)
        epilogue.set(softcap=softcap)
        if weights is not None:
            epilogue.set(weights=weights)
        if projection.curve is not None:
            epilogue.set(curve=projection.curve)
        if factors is not None:
            epilogue.set(factors=factors[0].data_ptr() + 4 * (factors[1] + column), factor_stride=factors[0].shape[1])
            epilogue.keeps.append(factors[0])
        column += weight.out_features
        arguments = matmul_arguments(run, weight, weight.num_groups, second_weights=0)
        arguments.set(epilogue=function, epilogue_arguments=epilogue.address, of_logits=of_logits)
        arguments.set(**sources[weight.form])
        arguments.keeps.append(epilogue)
        append_matmul(run, weight, arguments, BARRIER if index == len(projection.parts) - 1 else NO_BARRIER)


def epilogue_of(to: tuple[Tensor, int], column: int, num_columns: int, bias: Tensor | None) -> Arguments:
    """Return an epilogue's arguments. `column` is relative to the projection, which begins at the column of `to`."""
    out, first = to
    arguments = Arguments(EPILOGUE, out=out, row_stride=out.shape[1], num_columns=num_columns)
    arguments.set(first_column=first + column)
    if bias is not None:
        arguments.set(bias=bias[column:])
    return arguments


def activations_of(
    run: Run, x: Activations, norm: Norm | None, weight: PackedWeight, *, of_logits: bool = False
) -> dict[str, int]:
    """Return the address of norm(x) as activation records, and the distance of the threads' own copies of a single
    token.

    A tile may read SPARE_TOKENS beyond the last token.
    """
    form, token_bytes = weight.form, weight.token_bytes
    if norm is None and isinstance(x.twin, Offer):
        address = x.twin.redeem(form, (run.capacity + SPARE_TOKENS) * token_bytes)
        if address is not None:
            return {"activations": address, "private_bytes": 0}
    if isinstance(x.twin, Offer):
        x.twin.keep_floats()
    copies = max(run.max_logits if of_logits else run.capacity, run.max_threads)
    records = run.tensor("activations", (copies + SPARE_TOKENS) * token_bytes, dtype=torch.uint8)
    arguments = Arguments(NORMALIZE, x=x.floats, out=records, features=weight.in_features, form=form)
    arguments.set(private_bytes=token_bytes, of_logits=of_logits)
    if norm is not None:
        arguments.set(weight=norm.weight.float().contiguous(), eps=norm.eps)
    run.append("normalize", arguments, BARRIER_IF_MANY, ".activations:normalize")
    return {"activations": records.data_ptr(), "private_bytes": token_bytes}


def matmul_arguments(
    run: Run, weight: PackedWeight, num_groups: int, second_weights: int, record: np.dtype[Any] = MATMUL
) -> Arguments:
    layout, num_records = weight.layout, weight.layout.num_records(weight.in_features)
    per_unit = groups_per_unit(num_groups, run.num_threads, is_pair=second_weights != 0)
    arguments = Arguments(record, first_weights=weight.data, second_weights=second_weights, num_groups=num_groups)
    arguments.set(group_bytes=weight.group_bytes, groups_per_unit=per_unit, num_records=num_records)
    factor = 2 if instruction_set().unpacks_strips(layout, weight.form) else 1  # to unpack for twice the tokens
    cached = factor * _CACHED_ACTIVATIONS // weight.token_bytes // PANEL
    arguments.set(tokens_per_block=max(factor, cached) * PANEL)
    if instruction_set().may_use_matrices(layout) and run.capacity >= PANEL:
        num_bytes = per_unit * (2 if second_weights else 1) * num_records * layout.unpacked_bytes
        unpacked = run.tensor("unpacked weights", run.max_threads, num_bytes, dtype=torch.uint8)
        arguments.set(unpacked=unpacked, unpacked_bytes=num_bytes)
    return arguments


def append_matmul(run: Run, weight: PackedWeight, arguments: Arguments, barrier: int) -> None:
    variant = weight.layout.type, weight.planes, instruction_set().name
    run.append(f"matmul {weight.layout.type}", arguments, barrier, ".matmul.matmul:make_matmul", *variant)


def add_rows(
    run: Run,
    residual: Tensor,
    y: Tensor,
    norm: Norm | None,
    scale: float = 1.0,
    *,
    own_norm: Norm | None = None,
    rows_per_token: int = 1,
) -> None:
    """Append residual = (own_norm(residual) + norm(y)) × scale, for each of a token's rows by itself."""
    features = y.shape[1] // rows_per_token
    arguments = Arguments(ADD_ROWS, residual=residual, y=y, features=features, scale=scale)
    arguments.set(rows_per_token=rows_per_token)
    if norm is not None:
        arguments.set(weight=norm.weight.float().contiguous(), eps=norm.eps)
    if own_norm is not None:
        assert norm is None or norm.eps == own_norm.eps
        arguments.set(own_weight=own_norm.weight.float().contiguous(), eps=own_norm.eps)
    run.append("add" if norm is None else "post_norm", arguments, BARRIER, ".activations:add_rows")


def own_columns(projection: Projection, width: int) -> tuple[int, int]:
    """Return the range of the columns that this rank computes, of `width` columns."""
    return (0, width) if projection.shares is None else projection.shares.own


def is_in_blocks(features: int, shares: Shares | None) -> bool:
    """Return True if each block of quantised activations belongs to one rank."""
    return all(start % BLOCK == 0 for start in ((features,) if shares is None else shares.starts))


def packed(weight: Weight) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise InvalidRequestError(f"the CPU kernels take packed weights (ops.prepare), got {type(weight).__name__}")
    return weight


def per_layer_inputs(
    x: Float[Tensor, "tokens hidden"], token_ids: Int[Tensor, "tokens"], weights: PerLayerWeights
) -> Float[Tensor, "tokens inputs"]:
    features = weights.projection.out_features
    with scope(weights.projection.label, tokens=token_ids) as run:
        inputs = run.tensor("per-layer inputs", run.capacity, features)
        contexts = run.tensor("per-layer contexts", run.capacity, features)
        _embed_from_file(run, weights.table, weights.table_scale, inputs)
        project(run, Activations(x), None, weights.projection, (contexts, 0))
        add_rows(run, inputs, contexts, weights.norm, rows_per_token=features // weights.dim)
        return inputs


def _embed_from_file(run: Run, table: Weight, scale: float, out: Tensor) -> None:
    """Append what stores the tokens' rows of a table that stays in its file, times scale."""
    assert isinstance(table, UnreadWeight)
    assert table.place is not None
    descriptor, offset = table.place
    arguments = Arguments(EMBED_FROM_FILE, descriptor=descriptor, offset=offset, row_bytes=table.row_bytes)
    arguments.set(in_features=table.in_features, num_rows=table.out_features, out=out, scale=scale)
    arguments.keeps.append(table)
    run.append("rows", arguments, NO_BARRIER, ".weights.embed:make_embed_from_file", table.type)


def gate_inputs(
    x: Float[Tensor, "tokens hidden"],
    gate: Projection,
    activation: Activation,
    inputs: Float[Tensor, "tokens inputs"],
    first_column: int,
) -> Activations:
    with scope(gate.label, num_tokens=len(x)) as run:
        out, first = run.columns("gated inputs", run.capacity, gate.out_features, gate.shares)
        own = first_column if gate.shares is None else first_column + gate.shares.own[0]
        project(run, Activations(x), None, gate, (out, first), kind=f"gate_{activation}", factors=(inputs, own))
        return Activations(run.gathered(out, gate.shares))
