"""Each op as a few commands: compiled functions, their buffers, a barrier where threads read each other's work."""

import numpy as np
import torch
from torch import Tensor

from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.isa import instruction_set
from infer.backends.cpu.layouts import BLOCK, LANES, PANEL, SPARE_TOKENS
from infer.backends.cpu.packed_weight import PackedWeight
from infer.backends.cpu.recording import Arguments, Run
from infer.backends.cpu.records import (
    ADD_ROWS,
    ATTEND,
    CHUNK,
    EMBED,
    EPILOGUE,
    FEWEST_FOR_MANY,
    GROUPS_PER_THREAD,
    MATMUL,
    MAX_HEAD_DIM,
    NORMALIZE,
    SPLIT_TOKENS,
    attend_scratch_bytes,
)
from infer.backends.cpu.table import BARRIER, BARRIER_IF_MANY, NO_BARRIER
from infer.errors import InvalidRequestError
from infer.operands.architecture import Activation
from infer.operands.group import Shares
from infer.operands.weights import Heads, Norm, Projection, Weight
from infer.quantization.kv_formats import check_kv_type, key_block_bytes, value_block_bytes
from infer.quantization.kv_layout import LayerCache

_CACHED_ACTIVATIONS = 1 << 19  # bytes of activations that should stay in a core's cache while weights stream by


def embed(run: Run, table: Weight, scale: float) -> Tensor:
    weight = _packed(table)
    out = run.tensor("x", run.capacity, weight.in_features)
    arguments = np.zeros(1, EMBED)
    arguments["table"], arguments["group_bytes"] = weight.data_at(), weight.group_bytes
    arguments["num_rows"], arguments["in_features"] = weight.shape
    arguments["out"], arguments["scale"] = out.data_ptr(), scale
    function = compiled_address(".packing:make_embed", EMBED, weight.layout.type, instruction_set().inputs)
    run.append(function, arguments, BARRIER, "rows", weight, out)
    return out


def norm_project(run: Run, x: Tensor, norm: Norm | None, projection: Projection) -> Tensor:
    out, first = run.columns("projected", run.capacity, projection.out_features, projection.shares)
    _project(run, x, norm, projection, (out, first))
    return run.gathered(out, projection.shares)


def head(run: Run, x: Tensor, norm: Norm, projection: Projection, softcap: float | None) -> Tensor:
    logits, first = run.columns("logits", run.max_logits, projection.out_features, projection.shares)
    _project(run, x, norm, projection, (logits, first), of_logits=True, softcap=softcap)
    return run.gathered(logits, projection.shares)


def project_add(run: Run, residual: Tensor, x: Tensor, projection: Projection, post_norm: Norm | None) -> Tensor:
    _check_rows(residual)
    shares = projection.shares
    if post_norm is None and shares is None:
        _project(run, x, None, projection, (residual, 0), adding=True)
        return residual
    y, first = run.columns("before post norm", run.capacity, projection.out_features, shares)
    _project(run, x, None, projection, (y, first))
    y = run.gathered(y, shares)
    arguments = np.zeros(1, ADD_ROWS)
    arguments["residual"], arguments["y"], arguments["features"] = residual.data_ptr(), y.data_ptr(), y.shape[1]
    keeps: tuple[object, ...] = (residual, y)
    if post_norm is not None:
        weight = post_norm.weight.float().contiguous()
        arguments["weight"], arguments["eps"] = weight.data_ptr(), post_norm.eps
        keeps = (residual, y, weight)
    name = "add" if post_norm is None else "post_norm"
    run.append(compiled_address(".activations:make_add_rows", ADD_ROWS), arguments, BARRIER, name, *keeps)
    return residual


def norm_gate(run: Run, x: Tensor, norm: Norm | None, gate_up: Projection, activation: Activation) -> Tensor:
    features, shares = gate_up.out_features // 2, gate_up.shares
    out, first = run.columns("hidden", run.capacity, features, shares)
    arguments = _epilogue((out, first), 0, features, gate_up.bias)
    halves = _gate_and_up(gate_up)
    if halves is None:
        both = run.tensor("gate and up", run.capacity, 2 * features)
        _project(run, x, norm, gate_up, (both, 0))
        arguments["both"] = both.data_ptr()
        function = compiled_address(".matmul:make_gate_rows", EPILOGUE, activation)
        run.append(function, arguments, BARRIER, "gate", both, out)
        return run.gathered(out, shares)
    weight, second = halves
    if _is_in_blocks(features, shares):
        run.produced(out, arguments, shares)
    function = compiled_address(".matmul:make_gate", EPILOGUE, activation)
    source = _activations(run, x, norm, weight, of_logits=False)
    groups = -(-features // LANES)
    _matmul(run, weight, groups, second, source, (function, arguments), BARRIER, of_logits=False)
    return run.gathered(out, shares)


def _gate_and_up(gate_up: Projection) -> tuple[PackedWeight, int] | None:
    """Gate's weight and the address of up's groups, if the two have one type."""
    weights = [_packed(part) for part in gate_up.parts]
    features = gate_up.out_features // 2
    if gate_up.bias is not None and features % LANES:
        return None
    if len(weights) == 1 and features % LANES == 0:
        return weights[0], weights[0].data_at(features // LANES)
    if len(weights) == 2 and weights[0].layout == weights[1].layout and weights[0].shape == weights[1].shape:
        return weights[0], weights[1].data_at()
    return None


def attend(run: Run, qkv: Tensor, heads: Heads, layer: LayerCache) -> Tensor:
    arguments = _attend_arguments(heads, layer)
    dim, features = heads.head_dim, heads.num_heads * heads.head_dim
    _check_rows(qkv)
    out, first = run.columns("attended", run.capacity, features, heads.shares)
    has_far = layer.pages.furthest is not None and heads.rope is not None
    queries = run.tensor("queries", run.capacity * (2 if has_far else 1), features)
    chunks = -(-layer.pages.table.shape[1] * layer.pages.page_tokens // CHUNK)
    split = min(run.capacity, SPLIT_TOKENS)
    partials = run.tensor("partials", heads.num_heads, split, chunks, dim + LANES)
    arguments["q"], arguments["k"], arguments["v"] = (qkv.data_ptr() + 4 * start for start in heads.starts)
    arguments["qkv_bytes"] = 4 * qkv.shape[1]
    arguments["out"], arguments["queries"] = out.data_ptr(), queries.data_ptr()
    arguments["partials"], arguments["num_chunks"] = partials.data_ptr(), chunks
    arguments["far_bytes"] = 4 * run.capacity * features if has_far else 0
    scratch = run.tensor("attention scratch", run.max_threads, attend_scratch_bytes(dim), dtype=torch.uint8)
    arguments["out_heads"], arguments["first_head"] = out.shape[1] // dim, first // dim
    arguments["scratch"], arguments["scratch_bytes"] = scratch.data_ptr(), scratch.shape[1]
    keeps = (qkv, heads, layer, out, queries, partials, scratch)
    rotate = compiled_address(".rotation:make_rotate", ATTEND, layer.kv_type)
    few = compiled_address(".attention:make_attend_few", ATTEND, layer.kv_type)
    finish = compiled_address(".attention:make_finish", ATTEND)
    run.append(rotate, arguments, BARRIER, "rotate", keeps)
    if layer.kv_type == "f32":
        run.append(few, arguments, BARRIER, "few", keeps)
    else:
        arguments["fewest_for_many"] = FEWEST_FOR_MANY
        many = compiled_address(".attention:make_attend_many", ATTEND, layer.kv_type)
        run.append(few, arguments, NO_BARRIER, "few", keeps)
        run.append(many, arguments, BARRIER, "many", keeps)
    run.append(finish, arguments, BARRIER, "merge", keeps)
    if _is_in_blocks(features, heads.shares):
        run.produced(out, arguments, heads.shares)
    return run.gathered(out, heads.shares)


def _attend_arguments(heads: Heads, layer: LayerCache) -> Arguments:
    if heads.head_dim > MAX_HEAD_DIM:
        raise InvalidRequestError(f"head_dim must be at most {MAX_HEAD_DIM}, got {heads.head_dim}")
    dim, keys, values = heads.head_dim, layer.keys, layer.values
    check_kv_type(layer.kv_type, dim)
    sizes = key_block_bytes(layer.kv_type, dim), value_block_bytes(layer.kv_type, dim)
    for blocks, size in zip((keys, values), sizes, strict=True):
        if blocks.shape[3] != size or blocks.stride()[2:] != (size, 1):
            raise InvalidRequestError(f"a head's blocks of {layer.kv_type} must be contiguous and of {size} bytes")
    arguments = np.zeros(1, ATTEND)
    arguments["num_heads"], arguments["num_kv_heads"], arguments["dim"] = heads.num_heads, heads.num_kv_heads, dim
    arguments["scale"], arguments["softcap"] = heads.scale, heads.softcap or 0
    for index, norm in enumerate((heads.q_norm, heads.k_norm)):
        if norm is not None:
            _check_vector(norm.weight)
            arguments["norms"][0, index], arguments["eps"][0, index] = norm.weight.data_ptr(), norm.eps
            arguments["norm_strides"][0, index] = 4 * dim if len(norm.weight) > dim else 0
    if heads.rope is not None:
        _check_rows(heads.rope.cos)
        _check_rows(heads.rope.sin)
        arguments["cos"], arguments["sin"] = heads.rope.cos.data_ptr(), heads.rope.sin.data_ptr()
        arguments["half"] = heads.rope.cos.shape[2]
        arguments["set_bytes"] = heads.rope.cos[0].nbytes if len(heads.rope.cos) > 1 else 0
    arguments["keys"], arguments["values"] = keys.data_ptr(), values.data_ptr()
    arguments["key_page_stride"], arguments["value_page_stride"] = keys.stride(1), values.stride(1)
    arguments["key_stride"], arguments["value_stride"] = keys.stride(0), values.stride(0)
    pages = layer.pages
    arguments["furthest"] = -1 if pages.furthest is None else pages.furthest
    arguments["table_stride"], arguments["page_bits"] = pages.table.shape[1], pages.page_tokens.bit_length() - 1
    for name, values in (
        ("table", pages.table),
        ("shifts", pages.shifts),
        ("sinks", pages.sinks),
        ("windows", pages.windows),
        ("rope_sets", pages.rope_sets),
    ):
        if values.dtype != torch.int64 or not values.is_contiguous():
            raise InvalidRequestError(f"the {name} of a cache must be contiguous int64, got {values.dtype}")
        arguments[name] = values.data_ptr()
    return arguments


def _is_in_blocks(features: int, shares: Shares | None) -> bool:
    """Whether each block of quantised activations is one rank's."""
    return all(start % BLOCK == 0 for start in ((features,) if shares is None else shares.starts))


# Projections


def _project(
    run: Run,
    x: Tensor,
    norm: Norm | None,
    projection: Projection,
    to: tuple[Tensor, int],
    *,
    adding: bool = False,
    of_logits: bool = False,
    softcap: float | None = None,
) -> None:
    """out = project(norm(x)), or out += it, or out = softcap × tanh(it / softcap). `to` is out and its first column."""
    plain = ".matmul:make_store" if softcap is None else ".matmul:make_store_capped"
    function = compiled_address(".matmul:make_add" if adding else plain, EPILOGUE)
    sources: dict[int, tuple[int, int]] = {}
    column = 0
    for index, part in enumerate(projection.parts):
        weight = _packed(part)
        form = instruction_set().form(weight.layout, weight.planes)
        if form not in sources:
            sources[form] = _activations(run, x, norm, weight, of_logits=of_logits)
        arguments = _epilogue(to, column, weight.out_features, projection.bias)
        arguments["softcap"] = softcap or 0
        column += weight.out_features
        barrier = BARRIER if index == len(projection.parts) - 1 else NO_BARRIER
        epilogue = (function, arguments)
        _matmul(run, weight, weight.num_groups, 0, sources[form], epilogue, barrier, of_logits=of_logits)


def _epilogue(to: tuple[Tensor, int], column: int, num_columns: int, bias: Tensor | None) -> Arguments:
    """`column` is the first one of a projection, whose first goes to that of `to`."""
    arguments, (out, first) = np.zeros(1, EPILOGUE), to
    arguments["out"], arguments["row_stride"] = out.data_ptr(), out.shape[1]
    arguments["first_column"], arguments["num_columns"] = first + column, num_columns
    arguments["bias"] = 0 if bias is None else bias.data_ptr() + 4 * column
    return arguments


def _activations(run: Run, x: Tensor, norm: Norm | None, weight: PackedWeight, *, of_logits: bool) -> tuple[int, int]:
    """Where norm(x) lies as activation records, and how far apart the threads' own copies of a single token.

    A tile may read SPARE_TOKENS more than there are.
    """
    _check_rows(x)
    layout = weight.layout
    form = instruction_set().form(layout, weight.planes)
    token_bytes = layout.num_records(weight.in_features) * layout.activation_bytes(form)
    if norm is None and not layout.is_float:
        address = run.quantized(x, form, (run.capacity + SPARE_TOKENS) * token_bytes)
        if address is not None:
            return address, 0
    copies = max(run.max_logits if of_logits else run.capacity, run.max_threads)
    records = run.tensor("activations", (copies + SPARE_TOKENS) * token_bytes, dtype=torch.uint8)
    arguments = np.zeros(1, NORMALIZE)
    arguments["x"], arguments["out"], arguments["features"] = x.data_ptr(), records.data_ptr(), weight.in_features
    arguments["private_bytes"], arguments["of_logits"] = token_bytes, of_logits
    arguments["form"] = form
    keeps: tuple[object, ...] = (x, records)
    if norm is not None:
        scale = norm.weight.float().contiguous()
        arguments["weight"], arguments["eps"] = scale.data_ptr(), norm.eps
        keeps = (x, records, scale)
    function = compiled_address(".activations:make_normalize", NORMALIZE)
    run.append(function, arguments, BARRIER_IF_MANY, "normalize", *keeps)
    return records.data_ptr(), token_bytes


def _matmul(
    run: Run,
    weight: PackedWeight,
    num_groups: int,
    second_weights: int,
    source: tuple[int, int],
    epilogue: tuple[int, Arguments],
    barrier: int,
    *,
    of_logits: bool,
) -> None:
    layout, planes, isa = weight.layout, weight.planes, instruction_set()
    num_records = layout.num_records(weight.in_features)
    token_bytes = num_records * layout.activation_bytes(isa.form(layout, planes))
    arguments = np.zeros(1, MATMUL)
    arguments["first_weights"], arguments["second_weights"] = weight.data_at(), second_weights
    arguments["group_bytes"], arguments["num_groups"] = weight.group_bytes, num_groups
    pairs = num_groups % 2 == 0 if second_weights else num_groups >= GROUPS_PER_THREAD * run.num_threads
    arguments["groups_per_unit"] = 2 if pairs else 1
    arguments["num_records"], arguments["of_logits"] = num_records, of_logits
    arguments["activations"], arguments["private_bytes"] = source
    panels = max(1, _CACHED_ACTIVATIONS // token_bytes // PANEL)
    arguments["tokens_per_block"] = panels * PANEL
    arguments["epilogue"], arguments["epilogue_arguments"] = epilogue[0], epilogue[1].ctypes.data
    keeps: list[object] = [weight, epilogue[1]]
    if isa.may_use_matrices(layout) and run.capacity >= PANEL:
        tiles = int(arguments["groups_per_unit"][0]) * (2 if second_weights else 1)
        num_bytes = tiles * num_records * layout.unpacked_bytes
        unpacked = run.tensor("unpacked weights", run.max_threads, num_bytes, dtype=torch.uint8)
        arguments["unpacked"], arguments["unpacked_bytes"] = unpacked.data_ptr(), num_bytes
        keeps.append(unpacked)
    function = compiled_address(".matmul:make_matmul", MATMUL, layout.type, planes, isa.name)
    run.append(function, arguments, barrier, f"matmul {layout.type}", *keeps)


def _packed(weight: Weight) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise InvalidRequestError(f"the CPU kernels take packed weights (ops.prepare), got {type(weight).__name__}")
    return weight


def _check_rows(x: Tensor) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise InvalidRequestError(f"the CPU kernels take contiguous float32 activations, got {x.dtype}")


def _check_vector(x: Tensor) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise InvalidRequestError(f"a norm's weight must be contiguous float32, got {x.dtype}")
