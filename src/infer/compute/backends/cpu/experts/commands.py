"""A layer of experts as commands: route and group, gate and up of each slot, down into the residual stream.

A slot is a token of an expert. Slots stand expert after expert, and so do their activations.

If the experts are read from a file, and a step may need more of them than memory has frames for, its experts are
computed in waves, in ascending order. So each token's sum has the same order as without waves.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.expert_records import EXPERT_FETCH, EXPERT_INPUTS, ROUTING
from infer.compute.backends.cpu.experts.expert_store import LayerFrames
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.layouts import LANES, SPARE_TOKENS
from infer.compute.backends.cpu.projections import is_in_blocks, matmul_arguments, own_columns, packed, project
from infer.compute.backends.cpu.recording import Run, scope
from infer.compute.backends.cpu.records import COPY_COLUMNS, EPILOGUE, EXPERT_MATMUL
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, READ_BARRIER, Arguments
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.backends.cpu.workspace import has_odd_bias
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.group import Shares
from infer.compute.operands.weights import ExpertWeights, Norm, Projection

_TABLES = ("counts", "starts", "active", "num_active")  # of `ROUTING`, which the commands after it read


def weigh_shared(x: Tensor, norm: Norm | None, gate: Projection) -> Tensor:
    """Return sigmoid(gate · norm(x)) of each token."""
    with scope(gate.label, num_tokens=len(x)) as run:
        weights = run.tensor("shared weights", run.capacity, 1)
        project(run, Activations(x), norm, gate, (weights, 0), kind="sigmoid")
        return weights


def route(run: Run, x: Tensor, norm: Norm | None, experts: ExpertWeights) -> Arguments:
    """Append the commands that choose experts. Return the record with the addresses of each expert's tokens."""
    router = experts.router
    count, num_slots = router.num_experts, run.capacity * router.num_chosen
    scores = run.tensor("expert scores", run.capacity, count)
    project(run, Activations(x), norm, experts.router_logits, (scores, 0))
    arguments = Arguments(ROUTING, scores=scores, keys=run.tensor("expert keys", run.capacity, count))
    arguments.set(num_experts=count, num_chosen=router.num_chosen, is_normalized=int(router.is_normalized))
    arguments.set(floor=router.floor, scale=router.scale)
    if experts.correction is not None:
        arguments.set(correction=experts.correction)
    if experts.expert_scales is not None:
        arguments.set(expert_scales=experts.expert_scales)
    sizes = {"chosen": num_slots, "counts": count, "starts": count, "active": count, "num_active": 1}
    for name, size in (sizes | {"tokens": num_slots}).items():
        arguments.set(**{name: run.tensor(f"expert {name}", size, dtype=torch.int64)})
    for name in ("chosen_weights", "weights"):
        arguments.set(**{name: run.tensor(f"expert {name}", num_slots)})
    run.append("route", arguments, BARRIER, ".experts.kernels:make_route", router.scores)
    run.append("group", arguments, BARRIER, ".experts.kernels:group")
    return arguments


def expert_inputs(
    run: Run, x: Tensor, norm: Norm | None, experts: ExpertWeights, routing: Arguments
) -> dict[int, Tensor]:
    """Append the activations of all slots, of norm(x), and return them for each form that gate and up take."""
    of_slots = ("tokens", "weights") if experts.router.weighs_inputs else ("tokens",)
    by_form = dict[int, Tensor]()
    for weight in (_stacked(experts.gate), _stacked(experts.up)):
        if weight.form not in by_form:
            records = _records(run, "inputs", weight, run.capacity * experts.router.num_chosen)
            by_form[weight.form] = _inputs(run, x, norm, weight, routing, records, of_slots)
    return by_form


def waves(run: Run, experts: ExpertWeights, routing: Arguments) -> Iterator[Arguments]:
    """Divide the step's experts into waves that fit the frames, and yield the tables of each wave.

    Before each yield, the commands are appended that read the wave's experts from the file.
    """
    own = experts.frames
    if not isinstance(own, LayerFrames):
        yield routing
        return
    router, most = experts.router, min(own.pool.plan.num_frames, experts.router.num_experts)
    num_waves = -(-min(router.num_experts, run.capacity * router.num_chosen) // most)
    needed, missing = run.tensor("expert needed", num_waves, dtype=torch.int64), ("expert missing", most)
    run.check_after(own.store.check)
    for wave in range(num_waves):
        tables, own_needed = Arguments(ROUTING), needed[wave : wave + 1]
        tables.record[:] = routing.record
        tables.keeps.append(routing)
        tables.set(num_active=own_needed)
        tables.record["active"] += 8 * most * wave
        arguments = Arguments(EXPERT_FETCH, pool=own.pool.arguments.address, first_expert=own.first_expert)
        _copy(arguments, routing, ("active", "num_active"))
        arguments.set(first=most * wave, most=most, num_needed=own_needed)
        arguments.set(missing=run.tensor(*missing, dtype=torch.int64))
        arguments.set(num_missing=run.tensor("expert num missing", 1, dtype=torch.int64))
        arguments.keeps.append(own)
        run.append("choose", arguments, BARRIER, ".experts.kernels:choose")
        run.append("fetch", arguments, READ_BARRIER, ".experts.kernels:fetch")
        yield tables


def gate_and_up(run: Run, inputs: Mapping[int, Tensor], experts: ExpertWeights, routing: Arguments) -> Tensor | int:
    """Append gate and up of all slots, and return the activations that down takes, or their address.

    `inputs` has the activations that `expert_inputs` returns.

    Gate and up are multiplied together if they have one layout. Then their product may be quantised while it is made.
    """
    gate, up, down = (_stacked(each) for each in (experts.gate, experts.up, experts.down))
    num_slots, features = run.capacity * experts.router.num_chosen, gate.out_features // experts.router.num_experts
    shares, width = experts.gate.shares, down.in_features
    hidden, first = run.columns("expert hidden", num_slots, features, shares)
    is_paired = gate.layout == up.layout and not has_odd_bias(features, experts.gate.bias is not None)
    quantized: Tensor | int | None = None
    bias, second_bias = experts.gate.bias, experts.up.bias
    if is_paired:
        epilogue = _epilogue(hidden, (first, first + features), bias, second_bias)
        if is_in_blocks(width, shares):
            quantized = _make_quantized(run, epilogue, down, num_slots, shares)
        function = compiled_address(".matmul.matmul:make_gate", EPILOGUE, experts.activation)
        activations = inputs[gate.form]
        _append(run, "wide", gate, experts, routing, activations, epilogue, function, second_weights=up.data_at())
    else:
        for weight, kind, own in ((gate, "plain", bias), (up, experts.activation, second_bias)):
            function = compiled_address(".matmul.matmul:make_store", EPILOGUE, kind)
            epilogue = _epilogue(hidden, (first, first + features), own)
            _append(run, "wide", weight, experts, routing, inputs[weight.form], epilogue, function)
    hidden = run.gathered(hidden, shares)
    if quantized is not None:
        return quantized
    return _inputs(run, hidden, None, down, routing, _records(run, "hidden", down, num_slots))


def add_down(run: Run, hidden: Tensor | int, experts: ExpertWeights, routing: Arguments, residual: Tensor) -> None:
    """Append the commands that add weight × down(hidden) of each slot to its token's row, in this rank's columns.

    If the experts' inputs are weighted, the commands add down(hidden).
    """
    epilogue = _epilogue(residual, own_columns(experts.down, residual.shape[1]), experts.down.bias)
    _copy(epilogue, routing, ("tokens", "weights"))
    kind = "by_token" if experts.router.weighs_inputs else "weighted"
    function = compiled_address(".matmul.matmul:make_store", EPILOGUE, kind)
    _append(run, "narrow", _stacked(experts.down), experts, routing, hidden, epilogue, function)


def exchange_sums(run: Run, residual: Tensor, shares: Shares) -> None:
    """Append the commands that gather the residual stream's columns: each rank has added to its own columns only."""
    first, end = shares.own
    sums, column = run.columns("expert sums", run.capacity, end - first, shares)
    _copy_columns(run, (residual, first), (sums, column), end - first)
    _copy_columns(run, (run.gathered(sums, shares), 0), (residual, 0), shares.width)


def _copy_columns(run: Run, source: tuple[Tensor, int], target: tuple[Tensor, int], num_columns: int) -> None:
    """Append the command that copies columns of each token.

    `source` and `target` are each a matrix and the first of its columns.
    """
    arguments = Arguments(COPY_COLUMNS, source=source[0], target=target[0], num_columns=num_columns)
    arguments.set(source_stride=source[0].shape[1], target_stride=target[0].shape[1])
    for name, (_, first) in (("source", source), ("target", target)):
        arguments.record[name] += 4 * first
    run.append("copy", arguments, BARRIER, ".ranks.gather:copy_columns")


def _stacked(projection: Projection) -> PackedWeight:
    """Return the matrix of all experts. Each begins with a group of 16 rows."""
    (part,) = projection.parts
    return packed(part)


def _records(run: Run, role: str, weight: PackedWeight, num_slots: int) -> Tensor:
    return run.tensor(f"expert {role} quantized", (num_slots + SPARE_TOKENS) * weight.token_bytes, dtype=torch.uint8)


def _inputs(
    run: Run, x: Tensor, norm: Norm | None, weight: PackedWeight, routing: Arguments, records: Tensor,
    of_slots: tuple[str, ...] = (),
) -> Tensor:  # fmt: skip
    """Append the activations of each slot, of norm(x). `of_slots` has `tokens` if rows of x are tokens, not slots.

    It has `weights` if these multiply the activations, which needs a norm.
    """
    arguments = Arguments(EXPERT_INPUTS, x=x, out=records, features=weight.in_features, form=weight.form)
    arguments.set(token_bytes=weight.token_bytes)
    if norm is not None:
        arguments.set(weight=norm.weight.float().contiguous(), eps=norm.eps)
    assert norm is not None or "weights" not in of_slots
    _copy(arguments, routing, _TABLES + of_slots)
    run.append("inputs", arguments, BARRIER, ".experts.kernels:inputs")
    return records


def _make_quantized(
    run: Run, epilogue: Arguments, down: PackedWeight, num_slots: int, shares: Shares | None
) -> Tensor | int | None:
    """Let gate and up also write their product as the activations of down, and return these, or their address.

    Return None if the ranks must gather the product first.
    """
    if shares is None:
        records = _records(run, "hidden", down, num_slots)
        epilogue.set(quantized=records, form=down.form)
        return records
    offer = run.offer("expert hidden", epilogue, shares)
    return None if offer is None else offer.redeem(down.form, (num_slots + SPARE_TOKENS) * down.token_bytes)


def _epilogue(
    out: Tensor, columns: tuple[int, int], bias: Tensor | None, second_bias: Tensor | None = None
) -> Arguments:
    """Return the arguments of an epilogue that writes a range of the columns of `out`."""
    first, end = columns
    arguments = Arguments(EPILOGUE, out=out, row_stride=out.shape[1], first_column=first, num_columns=end - first)
    for name, tensor in (("bias", bias), ("second_bias", second_bias)):
        if tensor is not None:
            arguments.set(**{name: tensor})
    return arguments


def _append(
    run: Run, order: str, weight: PackedWeight, experts: ExpertWeights, routing: Arguments, activations: Tensor | int,
    epilogue: Arguments, function: int, second_weights: int = 0,
) -> None:  # fmt: skip
    rows = weight.out_features // experts.router.num_experts
    num_groups = -(-rows // LANES)
    arguments = matmul_arguments(run, weight, num_groups, second_weights, EXPERT_MATMUL)
    arguments.set(activations=activations, epilogue=function, epilogue_arguments=epilogue.address)
    arguments.set(expert_bytes=num_groups * weight.group_bytes, expert_rows=rows)
    if isinstance(experts.frames, LayerFrames):
        arguments.set(expert_bytes=experts.frames.pool.plan.form.num_bytes, frames=experts.frames.frames)
    _copy(arguments, routing, _TABLES)
    arguments.keeps.append(epilogue)
    variant = weight.layout.type, weight.planes, instruction_set().name, order
    run.append(f"experts {weight.layout.type}", arguments, BARRIER, ".experts.kernels:make_multiply", *variant)


def _copy(arguments: Arguments, source: Arguments, names: tuple[str, ...]) -> None:
    """Copy fields from the record of `source`, and keep `source` and the memory that it points to alive."""
    for name in names:
        arguments.record[name] = source.record[name]
    arguments.keeps.append(source)
