"""Every op as compiled commands for the CPU, as `backends.reference` defines it, at the speed of memory.

An op makes a few commands: compiled functions with their arguments, and a barrier if threads read each other's results.
They are appended to the active recording, or run immediately as a table of their own. Both use the same code, so a
recorded step gives the same bits.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.delta_net.commands import gated_delta_net as gated_delta_net
from infer.compute.backends.cpu.experts.commands import (
    add_down,
    exchange_sums,
    expert_inputs,
    gate_and_up,
    route,
    waves,
    weigh_shared,
)
from infer.compute.backends.cpu.isa import instruction_set, stored_form
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.projections import (
    activations_of,
    add_rows,
    append_matmul,
    epilogue_of,
    is_in_blocks,
    matmul_arguments,
    own_columns,
    packed,
    project,
)
from infer.compute.backends.cpu.projections import gate_inputs as gate_inputs
from infer.compute.backends.cpu.projections import per_layer_inputs as per_layer_inputs
from infer.compute.backends.cpu.recording import Run, scope
from infer.compute.backends.cpu.records import (
    ADD_ROWS,
    ATTEND,
    CHUNK,
    EMBED,
    EPILOGUE,
    FEWEST_FOR_MANY,
    MAX_HEAD_DIM,
    NORM_AFTER,
    NORM_CENTRED,
    SHORT_CONV,
    SPLIT_TOKENS,
    SUM_NORM,
    attend_scratch_bytes,
)
from infer.compute.backends.cpu.sampling.launch import choose_tokens as choose_tokens
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, BARRIER_IF_MERGED, NO_BARRIER, Arguments
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.backends.cpu.weights.prepare_weights import prepare as prepare
from infer.compute.backends.reference_attention import attention_weights as attention_weights
from infer.compute.backends.reference_parts import normalize as normalize
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.recurrent_cache import ConvCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ConvWeights, ExpertWeights, Heads, Norm, Projection, TextInputWeights, Weight
from infer.compute.quantization.kv_formats import check_kv_type, key_block_bytes, value_block_bytes
from infer.compute.quantization.kv_layout import LayerCache
from infer.errors import InvalidRequestError


def embed(
    table: Weight, token_ids: Int[Tensor, "tokens"], scale: float, norm_eps: float | None = None
) -> Float[Tensor, "tokens hidden"]:
    weight = packed(table)
    rows, features = weight.shape
    with scope("embed", tokens=token_ids) as run:
        out = run.tensor("x", run.capacity, features)
        arguments = Arguments(EMBED, table=weight.data, group_bytes=weight.group_bytes, num_rows=rows)
        arguments.set(in_features=features, out=out, scale=scale, norm_eps=-1 if norm_eps is None else norm_eps)
        run.append(
            "rows", arguments, BARRIER, ".weights.embed:make_embed", weight.layout.type, instruction_set().inputs
        )
        return out


def add_text_inputs(
    x: Float[Tensor, "tokens hidden"], step: Step, second_starts: Int[Tensor, "rows"] | None, weights: TextInputWeights
) -> Float[Tensor, "tokens hidden"]:
    with scope("embed", step=step) as run:
        _append_text_inputs(run, x, second_starts, weights)
        return x


def norm_project(x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection) -> Activations:
    with scope(projection.label, num_tokens=len(x)) as run:
        x, norm = _centred(run, x, norm)
        out, first = run.columns("projected", run.capacity, projection.out_features, projection.shares)
        project(run, Activations(x), norm, projection, (out, first))
        return Activations(run.gathered(out, projection.shares))


def head(
    x: Float[Tensor, "tokens hidden"],
    logit_indices: Int[Tensor, "logits"],
    norm: Norm,
    projection: Projection,
    softcap: float | None = None,
) -> Float[Tensor, "logits vocab"]:
    with scope("head", num_tokens=len(x), logit_indices=logit_indices) as run:
        x, before = _centred(run, x, norm)
        source, cap = Activations(x), softcap or 0
        logits, first = run.columns("logits", run.max_logits, projection.out_features, projection.shares)
        kind = "plain" if softcap is None else "capped"
        project(run, source, before, projection, (logits, first), kind=kind, of_logits=True, softcap=cap)
        return run.gathered(logits, projection.shares)


def project_add(
    residual: Float[Tensor, "tokens hidden"],
    x: Activations,
    projection: Projection,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    with scope(projection.label, num_tokens=len(x.floats)) as run:
        shares = projection.shares
        if post_norm is None and shares is None and scale == 1:
            project(run, x, None, projection, (residual, 0), kind="add")
            return residual
        # Another rank may still read the sum before this one, so each matrix has a buffer of its own.
        role = "" if shares is None else projection.label.rpartition(".")[2] + " "
        y, first = run.columns(f"{role}before post norm", run.capacity, projection.out_features, shares)
        project(run, x, None, projection, (y, first))
        y = run.gathered(y, shares)
        add_rows(run, residual, y, post_norm, scale)
        return residual


def project_add_norm(
    residual: Float[Tensor, "tokens hidden"], x: Activations, projection: Projection, norm: Norm
) -> Float[Tensor, "tokens hidden"]:
    with scope(projection.label, num_tokens=len(x.floats)) as run:
        y = run.tensor("before post norm", run.capacity, projection.out_features)
        project(run, x, None, projection, (y, 0))
        _append_sum_norm(run, residual, y, norm, residual)
        return residual


def norm_activate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection, activation: Activation
) -> Activations:
    with scope(projection.label, num_tokens=len(x)) as run:
        x, norm = _centred(run, x, norm)
        out, first = run.columns("hidden", run.capacity, projection.out_features, projection.shares)
        project(run, Activations(x), norm, projection, (out, first), kind=f"only_{activation}")
        return Activations(run.gathered(out, projection.shares))


def norm_gate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
) -> Activations:
    features, shares = gate_up.out_features // 2, gate_up.shares
    with scope(gate_up.label, num_tokens=len(x)) as run:
        x, norm = _centred(run, x, norm)
        source = Activations(x)
        out, first = run.columns("hidden", run.capacity, features, shares)
        halves = _gate_and_up(gate_up)
        if halves is None:
            biases = (None, None) if gate_up.bias is None else gate_up.bias.split(features)
            for part, bias, kind in zip(gate_up.parts, biases, ("plain", activation), strict=True):
                project(run, source, norm, Projection((part,), bias), (out, first), kind=kind)
            return Activations(run.gathered(out, shares))
        epilogue, (weight, second) = epilogue_of((out, first), 0, features, gate_up.bias), halves
        if gate_up.bias is not None:
            epilogue.set(second_bias=gate_up.bias[features:])
        offer = run.offer("hidden", epilogue, shares, floats=out) if is_in_blocks(features, shares) else None
        function = compiled_address(".matmul.matmul:make_gate", EPILOGUE, activation)
        arguments = matmul_arguments(run, weight, -(-features // LANES), second)
        arguments.set(
            epilogue=function, epilogue_arguments=epilogue.address, **activations_of(run, source, norm, weight)
        )
        arguments.keeps.append(epilogue)
        append_matmul(run, weight, arguments, BARRIER)
        return Activations(run.gathered(out, shares), offer)


def add_experts(
    residual: Float[Tensor, "tokens hidden"],
    norm: Norm | None,
    experts: ExpertWeights,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    num_tokens, shared, norms, total = len(residual), experts.shared, experts.norms, residual
    router_norm, expert_norm = (norm, norm) if norms is None else (norms.router, norms.experts)
    if shared is not None:  # of the residual stream as it is before anything is added
        shared_hidden = norm_gate(residual, norm, shared.gate_up, experts.activation)
        weights = None if shared.gate is None else weigh_shared(residual, norm, shared.gate)
    with scope(experts.router_logits.label, num_tokens=num_tokens) as run:
        routing = route(run, residual, router_norm, experts)
    with scope(experts.gate.label, num_tokens=num_tokens) as run:
        inputs = expert_inputs(run, residual, expert_norm, experts, routing)
        if norms is not None or post_norm is not None or scale != 1:
            total = run.tensor("expert total", run.capacity, residual.shape[1])
            arguments = Arguments(ADD_ROWS, residual=total, features=total.shape[1], rows_per_token=1)
            run.append("clear", arguments, BARRIER, ".activations:clear_rows")
        for tables in waves(run, experts, routing):
            run.enter(experts.gate.label)
            hidden = gate_and_up(run, inputs, experts, tables)
            run.enter(experts.down.label)
            add_down(run, hidden, experts, tables, total)
    if shared is not None and norms is None:
        kind = "add" if weights is None else "weighted"
        with scope(shared.down.label, num_tokens=num_tokens) as run:
            own = total, own_columns(shared.down, total.shape[1])[0]
            project(run, shared_hidden, None, shared.down, own, kind=kind, weights=weights)
    if experts.down.shares is not None:
        with scope(experts.down.label, num_tokens=num_tokens) as run:
            exchange_sums(run, total, experts.down.shares)
    if shared is not None and norms is not None:
        with scope(shared.down.label, num_tokens=num_tokens) as run:
            y, first = run.columns("before post norm", run.capacity, shared.down.out_features, shared.down.shares)
            project(run, shared_hidden, None, shared.down, (y, first))
            y = run.gathered(y, shared.down.shares)
            add_rows(run, total, y, norms.post_shared, own_norm=norms.post_experts)
    if total is not residual:
        with scope(experts.down.label, num_tokens=num_tokens) as run:
            add_rows(run, residual, total, post_norm, scale)
    return residual


def _gate_and_up(gate_up: Projection) -> tuple[PackedWeight, int] | None:
    """Return gate's weight and the address of up's groups; None if the two cannot be computed together.

    They must have one layout, and whole groups of rows if they share a weight or have a bias.
    """
    weights = [packed(part) for part in gate_up.parts]
    features = gate_up.out_features // 2
    if gate_up.bias is not None and features % LANES:
        return None
    if len(weights) == 1 and features % LANES == 0:
        return weights[0], weights[0].data_at(features // LANES)
    if len(weights) == 2 and weights[0].layout == weights[1].layout and weights[0].shape == weights[1].shape:
        return weights[0], weights[1].data_at()
    return None


def append_keys(kv: Activations, heads: Heads, layer: LayerCache, step: Step) -> None:
    floats = kv.floats
    with scope("keys", step=step) as run:
        arguments = _attend_arguments(replace(heads, has_keys=True), layer)
        arguments.set(only_stores=1, q=floats, k=floats, qkv_bytes=4 * floats.shape[1])
        arguments.set(v=floats.data_ptr() + 4 * heads.num_kv_heads * heads.head_dim)
        form = stored_form(layer.kv_type, heads.precision, heads.head_dim)
        run.append("rotate", arguments, BARRIER, ".attention.rotation:make_rotate", form)


def attend(qkv: Activations, heads: Heads, layer: LayerCache, step: Step) -> Activations:
    features, pages = heads.num_heads * heads.head_dim, layer.pages
    kv_type = stored_form(layer.kv_type, heads.precision, heads.head_dim)
    has_sink_queries = pages.last_position is not None and heads.rope is not None
    chunks = -(-pages.table.shape[1] * pages.page_tokens // CHUNK)
    with scope("attend", step=step) as run:
        arguments = _attend_arguments(heads, layer)
        out, first = run.columns("attended", run.capacity, features, heads.shares)
        split = min(run.capacity, SPLIT_TOKENS)
        scratch_bytes = attend_scratch_bytes(heads.head_dim)
        floats = qkv.floats
        arguments.set(q=floats, qkv_bytes=4 * floats.shape[1])  # which checks and keeps it; they begin within it:
        arguments.set(**{name: floats.data_ptr() + 4 * start for name, start in zip("qkv", heads.starts, strict=True)})
        if heads.gate_start is not None:
            arguments.set(gates=floats.data_ptr() + 4 * heads.gate_start, are_gates_of_heads=heads.are_gates_of_heads)
            arguments.set(is_gate_softplus=heads.gate_curve == "softplus")
        arguments.set(
            queries=run.tensor("queries", run.capacity * (2 if has_sink_queries else 1), features),
            sink_queries_at=4 * run.capacity * features if has_sink_queries else 0,
            partials=run.tensor("partials", heads.num_heads, split, chunks, heads.head_dim + LANES),
            num_chunks=chunks,
            scratch=run.tensor("attention scratch", run.max_threads, scratch_bytes, dtype=torch.uint8),
            scratch_bytes=scratch_bytes,
            out=out,
            out_heads=out.shape[1] // heads.head_dim,
            first_head=first // heads.head_dim,
        )
        run.append("rotate", arguments, BARRIER, ".attention.rotation:make_rotate", kv_type)
        has_many = kv_type != "f32"
        few_barrier = NO_BARRIER if has_many else BARRIER_IF_MERGED
        run.append("few", arguments, few_barrier, ".attention.attention:make_attend_few", kv_type)
        if has_many:
            arguments.set(fewest_for_many=FEWEST_FOR_MANY)
            run.append("many", arguments, BARRIER_IF_MERGED, ".attention.attention:make_attend_many", kv_type)
        run.append("merge", arguments, BARRIER, ".attention.attention:finish")
        offer = run.offer("attended", arguments, heads.shares) if is_in_blocks(features, heads.shares) else None
        return Activations(run.gathered(out, heads.shares), offer)


def short_conv(projected: Activations, weights: ConvWeights, layer: ConvCache, step: Step) -> Activations:
    num_taps, features = weights.taps.shape
    pages, inputs = layer.pages, layer.inputs
    with scope("conv", step=step) as run:
        out = run.tensor("mixed", run.capacity, features)
        arguments = Arguments(SHORT_CONV, projected=projected.floats, taps=weights.taps, num_taps=num_taps, out=out)
        arguments.set(features=features, inputs=inputs.data_ptr(), page_bytes=4 * inputs.stride(0))
        arguments.keeps.append(layer)
        arguments.set(table=pages.table, table_stride=pages.table.shape[1])
        arguments.set(page_bits=pages.page_tokens.bit_length() - 1)
        if weights.bias is not None:
            arguments.set(bias=weights.bias)
        run.append("short conv", arguments, BARRIER, ".delta_net.inputs:short_conv")
        return Activations(out, run.offer("mixed", arguments, None) if is_in_blocks(features, None) else None)


def _attend_arguments(heads: Heads, layer: LayerCache) -> Arguments:
    if heads.head_dim > MAX_HEAD_DIM:
        raise InvalidRequestError(f"head_dim must be at most {MAX_HEAD_DIM}, got {heads.head_dim}")
    dim, keys, values, pages = heads.head_dim, layer.keys, layer.values, layer.pages
    check_kv_type(layer.kv_type, dim)
    sizes = key_block_bytes(layer.kv_type, dim), value_block_bytes(layer.kv_type, dim)
    for blocks, size in zip((keys, values), sizes, strict=True):
        if blocks.shape[3] != size or blocks.stride()[2:] != (size, 1):
            raise InvalidRequestError(f"a head's blocks of {layer.kv_type} must be contiguous and of {size} bytes")
    arguments = Arguments(ATTEND, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, dim=dim)
    arguments.set(num_new_heads=heads.num_kv_heads if heads.has_keys else 0)
    arguments.set(v_eps=-1 if heads.v_eps is None else heads.v_eps)
    arguments.set(scale=heads.scale, softcap=heads.softcap or 0)
    if heads.num_ahead:
        assert pages.ends is not None
        arguments.set(num_ahead=heads.num_ahead, ends=pages.ends)
    if heads.query_scales is not None:
        arguments.set(query_scales=heads.query_scales)
    if heads.sinks is not None:
        arguments.set(sink_logits=heads.sinks)
    norms = heads.q_norm, heads.k_norm
    arguments.set(
        norm_form=NORM_AFTER if heads.are_norms_after else NORM_CENTRED if norms[0] and norms[0].is_centred else 0,
        norms=[0 if norm is None else norm.weight for norm in norms],
        eps=[0 if norm is None else norm.eps for norm in norms],
        norm_strides=[0 if norm is None or len(norm.weight) == dim else 4 * dim for norm in norms],
    )
    if heads.rope is not None:
        cos, sin = heads.rope.cos, heads.rope.sin
        arguments.set(cos=cos, sin=sin, half=cos.shape[2], set_bytes=cos[0].nbytes if len(cos) > 1 else 0)
    arguments.keeps.append(layer)
    arguments.set(keys=keys.data_ptr(), key_page_stride=keys.stride(1), key_stride=keys.stride(0))
    arguments.set(values=values.data_ptr(), value_page_stride=values.stride(1), value_stride=values.stride(0))
    arguments.set(table=pages.table, table_stride=pages.table.shape[1], page_bits=pages.page_tokens.bit_length() - 1)
    arguments.set(shifts=pages.shifts, sinks=pages.sinks, windows=pages.windows, rope_sets=pages.rope_sets)
    arguments.set(last_position=-1 if pages.last_position is None else pages.last_position)
    return arguments


def _append_sum_norm(run: Run, x: Tensor, y: Tensor | None, norm: Norm | None, out: Tensor) -> Arguments:
    """Append out = norm(x + y) for each row, and return the command's arguments. out may be x."""
    arguments = Arguments(SUM_NORM, x=x, out=out, features=x.shape[1])
    if norm is not None:
        arguments.set(weight=norm.weight.float().contiguous(), eps=norm.eps, is_centred=norm.is_centred)
    if norm is not None and norm.bias is not None:
        arguments.set(bias=norm.bias.float().contiguous())
    if y is not None:
        arguments.set(y=y)
    run.append("sum_norm", arguments, BARRIER, ".activations:sum_norm")
    return arguments


def _centred(run: Run, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
    """Return norm(x) and None if the norm subtracts the mean or adds a bias, which no product does for itself."""
    if norm is None or not (norm.is_centred or norm.bias is not None):
        return x, norm
    out = run.tensor("normed", run.capacity, x.shape[1])
    _append_sum_norm(run, x, None, norm, out)
    return out, None


def _append_text_inputs(
    run: Run, x: Tensor, second_starts: Int[Tensor, "rows"] | None, weights: TextInputWeights
) -> None:
    """Append x = norm(x + types + positions)."""
    arguments = _append_sum_norm(run, x, None, weights.norm, x)
    if weights.types is not None:
        assert second_starts is not None
        arguments.set(types=weights.types, last_type=len(weights.types) - 1, second_starts=second_starts)
    if weights.positions is not None:
        arguments.set(embedded_positions=weights.positions)
