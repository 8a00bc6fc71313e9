"""A layer of experts as commands: route and group, gate and up of each slot, down into the residual stream.

A slot is a token of an expert. Slots stand expert after expert, and so do their activations.
"""

import torch
from torch import Tensor

from infer.backends.cpu.compile.addresses import compiled_address
from infer.backends.cpu.isa import instruction_set
from infer.backends.cpu.layouts import BLOCK, LANES, SPARE_TOKENS
from infer.backends.cpu.projections import matmul_arguments, packed, project
from infer.backends.cpu.recording import Run, scope
from infer.backends.cpu.records import EPILOGUE, EXPERT_INPUTS, EXPERT_MATMUL, ROUTING
from infer.backends.cpu.threads.dispatch_table import BARRIER, Arguments
from infer.backends.cpu.weights.packed_weight import PackedWeight
from infer.errors import InvalidRequestError
from infer.operands.activation_values import Activations
from infer.operands.weights import ExpertWeights, Norm, Projection

_TABLES = ("counts", "starts", "active", "num_active")  # of `ROUTING`, which the commands after it read


def weigh_shared(x: Tensor, norm: Norm | None, gate: Projection) -> Tensor:
    """Return sigmoid(gate · norm(x)) of each token."""
    with scope(gate.label, num_tokens=len(x)) as run:
        weights = run.tensor("shared weights", run.capacity, 1)
        project(run, Activations(x), norm, gate, (weights, 0), kind="sigmoid")
        return weights


def route(run: Run, x: Tensor, norm: Norm | None, experts: ExpertWeights) -> Arguments:
    """Append what chooses the experts, and return the record that says where it leaves each expert's tokens."""
    router = experts.router
    count, num_slots = router.num_experts, run.capacity * router.num_chosen
    scores = run.tensor("expert scores", run.capacity, count)
    project(run, Activations(x), norm, experts.router_logits, (scores, 0))
    arguments = Arguments(ROUTING, scores=scores, keys=run.tensor("expert keys", run.capacity, count))
    arguments.set(num_experts=count, num_chosen=router.num_chosen, is_normalized=int(router.is_normalized))
    arguments.set(floor=router.floor, scale=router.scale)
    if experts.correction is not None:
        arguments.set(correction=experts.correction)
    sizes = {"chosen": num_slots, "counts": count, "starts": count, "active": count, "num_active": 1}
    for name, size in (sizes | {"tokens": num_slots}).items():
        arguments.set(**{name: run.tensor(f"expert {name}", size, dtype=torch.int64)})
    for name in ("chosen_weights", "weights"):
        arguments.set(**{name: run.tensor(f"expert {name}", num_slots)})
    run.append("route", arguments, BARRIER, ".experts.kernels:make_route", router.scores)
    run.append("group", arguments, BARRIER, ".experts.kernels:group")
    return arguments


def gate_and_up(run: Run, x: Tensor, norm: Norm | None, experts: ExpertWeights, routing: Arguments) -> Tensor:
    """Append gate and up of all slots, and return the activations that down takes.

    Gate and up are multiplied together if they have one layout. Then their product may be quantised while it is made.
    """
    gate, up, down = (_stacked(each, experts) for each in (experts.gate, experts.up, experts.down))
    num_slots, features = run.capacity * experts.router.num_chosen, gate.out_features // experts.router.num_experts
    hidden, records = run.tensor("expert hidden", num_slots, features), _records(run, "hidden", down, num_slots)
    is_paired = gate.layout == up.layout
    is_quantized = is_paired and features % BLOCK == 0 and not down.layout.is_float
    bias, second_bias = experts.gate.bias, experts.up.bias
    if is_paired:
        inputs = _inputs(run, x, norm, gate, routing, _records(run, "inputs", gate, num_slots), by_token=True)
        epilogue = _epilogue(hidden, bias, second_bias)
        if is_quantized:
            epilogue.set(quantized=records, form=down.form)
        function = compiled_address(".matmul.matmul:make_gate", EPILOGUE, experts.activation)
        _append(run, "wide", gate, experts, routing, inputs, epilogue, function, second_weights=up.data_at())
    else:
        for weight, kind, own in ((gate, "plain", bias), (up, experts.activation, second_bias)):
            inputs = _inputs(run, x, norm, weight, routing, _records(run, "inputs", weight, num_slots), by_token=True)
            function = compiled_address(".matmul.matmul:make_store", EPILOGUE, kind)
            _append(run, "wide", weight, experts, routing, inputs, _epilogue(hidden, own), function)
    return records if is_quantized else _inputs(run, hidden, None, down, routing, records, by_token=False)


def add_down(run: Run, hidden: Tensor, experts: ExpertWeights, routing: Arguments, residual: Tensor) -> None:
    """Append what adds weight × down(hidden) of each slot to the row of its token."""
    epilogue = _epilogue(residual, experts.down.bias)
    _copy(epilogue, routing, ("tokens", "weights"))
    function = compiled_address(".matmul.matmul:make_store", EPILOGUE, "weighted")
    _append(run, "narrow", _stacked(experts.down, experts), experts, routing, hidden, epilogue, function)


def _stacked(projection: Projection, experts: ExpertWeights) -> PackedWeight:
    """Return the matrix of all experts. Each must begin with a group of 16 rows, and all must be of one type."""
    if len(projection.parts) != 1 or projection.out_features % (experts.router.num_experts * LANES):
        raise InvalidRequestError(
            f"{projection.label}: the experts of a layer must be of one type, with a multiple of {LANES} rows each"
        )
    return packed(projection.parts[0])


def _records(run: Run, role: str, weight: PackedWeight, num_slots: int) -> Tensor:
    return run.tensor(f"expert {role} quantized", (num_slots + SPARE_TOKENS) * weight.token_bytes, dtype=torch.uint8)


def _inputs(
    run: Run, x: Tensor, norm: Norm | None, weight: PackedWeight, routing: Arguments, records: Tensor, *, by_token: bool
) -> Tensor:
    """Append the activations of each slot: of norm(x), whose rows are tokens if `by_token`, and slots otherwise."""
    arguments = Arguments(EXPERT_INPUTS, x=x, out=records, features=weight.in_features, form=weight.form)
    arguments.set(token_bytes=weight.token_bytes)
    if norm is not None:
        arguments.set(weight=norm.weight.float().contiguous(), eps=norm.eps)
    _copy(arguments, routing, _TABLES)
    if by_token:
        _copy(arguments, routing, ("tokens",))
    run.append("inputs", arguments, BARRIER, ".experts.kernels:inputs")
    return records


def _epilogue(out: Tensor, bias: Tensor | None, second_bias: Tensor | None = None) -> Arguments:
    arguments = Arguments(EPILOGUE, out=out, row_stride=out.shape[1], num_columns=out.shape[1])
    for name, tensor in (("bias", bias), ("second_bias", second_bias)):
        if tensor is not None:
            arguments.set(**{name: tensor})
    return arguments


def _append(
    run: Run, order: str, weight: PackedWeight, experts: ExpertWeights, routing: Arguments, activations: Tensor,
    epilogue: Arguments, function: int, second_weights: int = 0,
) -> None:  # fmt: skip
    rows = weight.out_features // experts.router.num_experts
    arguments = matmul_arguments(run, weight, rows // LANES, second_weights, EXPERT_MATMUL)
    arguments.set(activations=activations, epilogue=function, epilogue_arguments=epilogue.address)
    arguments.set(expert_bytes=rows // LANES * weight.group_bytes, expert_rows=rows)
    _copy(arguments, routing, _TABLES)
    arguments.keeps.append(epilogue)
    variant = weight.layout.type, weight.planes, instruction_set().name, order
    run.append(f"experts {weight.layout.type}", arguments, BARRIER, ".experts.kernels:make_multiply", *variant)


def _copy(arguments: Arguments, source: Arguments, names: tuple[str, ...]) -> None:
    """Set fields of one record as they are in another, which is kept alive with what it points to."""
    for name in names:
        arguments.record[name] = source.record[name]
    arguments.keeps.append(source)
