"""`attend` on the host: the launches of `rotate_append` and `attend_chunks`, and the buffers between them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.compute.backends.cuda.activations import Quantized, Twin, activations_of_all, room_for, twin_of
from infer.compute.backends.cuda.attention_chunks import attend_chunks
from infer.compute.backends.cuda.attention_items import (
    CHUNK,
    FIELDS,
    LOG2_E,
    SLOTS,
    ChunkParts,
    Items,
    Results,
    num_splits,
)
from infer.compute.backends.cuda.kv_blocks import make_blocks
from infer.compute.backends.cuda.rotation import (
    CENTRED_NORM,
    HEAD_NORM,
    NO_NORM,
    NORM_AFTER,
    WHOLE_NORM,
    Columns,
    Rotation,
    rotate_append,
)
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm
from infer.compute.quantization.kv_formats import KV_TYPES, QUANTIZED
from infer.compute.quantization.kv_layout import LayerCache, Pages

QUERIES = 16  # of a program: rows of a tensor core's product


def attend(qkv: Activations, heads: Heads, layer: LayerCache, step: Step) -> Activations:
    floats, planes, dim, pages = qkv.floats, twin_of(qkv).planes, heads.head_dim, layer.pages
    num_tokens, kv_heads = len(floats), heads.num_kv_heads
    cache, kv_type = make_blocks(layer), KV_TYPES.index(layer.kv_type)
    size, group = max(16, triton.next_power_of_2(dim)), heads.num_heads // kv_heads
    group_size = triton.next_power_of_2(group)
    half = 0 if heads.rope is None else heads.rope.cos.shape[-1]
    shape = {"DIM": dim, "SIZE": size, "KV_TYPE": kv_type, "HAS_FAR": pages.last_position is not None}
    queries = max(QUERIES, group_size)

    near = torch.empty(num_tokens, heads.num_heads, dim, device=floats.device)
    far = torch.empty_like(near) if shape["HAS_FAR"] else near
    chunks = triton.cdiv(pages.table.shape[1] * pages.page_tokens, CHUNK.value)
    items, num_planners = _items(step, layer.pages, kv_heads, queries // group_size, chunks)
    parts = _parts(min(num_tokens * chunks, SLOTS + chunks) if chunks > 1 else 1, kv_heads, queries, dim, floats.device)
    rotate_append[num_tokens + num_planners, kv_heads](
        floats, near, far, items, num_planners, len(items.fields), len(parts.sums), step.rows, step.positions,
        _rotation(heads, pages, near), cache, _columns(heads, floats.shape[1]),
        NUM_HEADS=heads.num_heads, KV_HEADS=kv_heads, HALF=half, GROUP_SIZE=group_size,
        Q_NORM=_kind(heads, heads.q_norm), K_NORM=_kind(heads, heads.k_norm), SPLITS=num_splits(kv_heads),
        TILE=queries // group_size, **shape, num_warps=4, **EXACT,
    )  # fmt: skip

    out = torch.empty_like(near)
    left = room_for(out, planes) if heads.shares is None else None
    to, leaves = (Quantized(out, out, out), 0) if left is None else (left.in_bytes(), planes)
    has_softcap = heads.softcap is not None
    scale = float(heads.scale) * (1.0 if has_softcap else LOG2_E.value)
    attend_chunks[len(items.fields), kv_heads](
        near, far, out, to, parts, items, step.rows, step.positions, num_tokens, cache, scale, heads.softcap or 1.0,
        _results(heads, floats), NUM_HEADS=heads.num_heads, GROUP=group, GROUP_SIZE=group_size, QUERIES=queries,
        LEAVES=leaves, HAS_SOFTCAP=has_softcap, **shape, **tuning_of(size, layer.kv_type), **EXACT,
    )  # fmt: skip
    return activations_of_all(out.flatten(1), Twin(planes, left), heads.shares)


def tuning_of(size: int, kv_type: str) -> dict[str, int]:
    """Return warps, turns in flight and registers of `attend_chunks` for heads of `size`, by what ptxas makes of it."""
    has_wide_tiles = size > 128
    is_converted = kv_type in QUANTIZED
    tuning = {"num_warps": 8 if has_wide_tiles or (is_converted and size > 64) else 4}
    tuning["STAGES"] = 1 if has_wide_tiles and kv_type in ("f32", "q4") else 2  # 99 KB of shared memory on sm_89
    if has_wide_tiles and kv_type == "f32":
        tuning["num_warps"] = 16  # with 8 ptxas spills on sm_89
    if torch.version.hip is None:  # four programs per multiprocessor, three, or one
        fits_four = size <= 64 and kv_type in ("f16", "bf16")
        tuning["maxnreg"] = {4: 128 if fits_four else 168, 8: 255, 16: 128}[tuning["num_warps"]]
    return tuning


def _items(step: Step, pages: Pages, kv_heads: int, tile: int, chunks: int) -> tuple[Items, int]:
    """Return the items of all layers of a page group, and the number of programs that plan them: 1 in the first layer.

    There is room for any step of as many tokens whose rows have up to `chunks` chunks.
    """
    key, num_tokens, device = (pages, kv_heads, tile), len(step.rows), step.rows.device
    if key in step.shared:
        return step.shared[key], 0
    capacity = num_tokens + min(num_splits(kv_heads), num_tokens * (chunks - 1))
    fields = torch.empty(capacity, FIELDS.value, dtype=torch.int32, device=device)
    items = Items(fields, torch.empty(num_tokens, kv_heads, dtype=torch.int32, device=device))
    step.shared[key] = items
    return items, 1


def _rotation(heads: Heads, pages: Pages, anything: Tensor) -> Rotation:
    rope, q_norm, k_norm = heads.rope, heads.q_norm, heads.k_norm
    return Rotation(
        q_norm=anything if q_norm is None else q_norm.weight,
        k_norm=anything if k_norm is None else k_norm.weight,
        q_eps=0.0 if q_norm is None else q_norm.eps,
        k_eps=0.0 if k_norm is None else k_norm.eps,
        cos=anything if rope is None else rope.cos,
        sin=anything if rope is None else rope.sin,
        set_size=0 if rope is None else rope.cos.stride(0),
        num_sets=1 if rope is None else len(rope.cos),
        rope_sets=pages.rope_sets,
        last_position=0 if pages.last_position is None else pages.last_position,
        v_eps=heads.v_eps or 0.0,
        query_scales=anything if heads.query_scales is None else heads.query_scales,
        HAS_V_NORM=tl.constexpr(heads.v_eps is not None),
        HAS_SCALES=tl.constexpr(heads.query_scales is not None),
    )


def _columns(heads: Heads, width: int) -> Columns:
    return Columns(*map(tl.constexpr, (width, *heads.starts, heads.has_keys)))


def _results(heads: Heads, qkv: Tensor) -> Results:
    has_gates = heads.gate_start is not None
    return Results(
        sinks=qkv if heads.sinks is None else heads.sinks,
        gates=qkv,
        WIDTH=tl.constexpr(qkv.shape[1]),
        GATE_START=tl.constexpr(heads.gate_start or 0),
        HAS_SINKS=tl.constexpr(heads.sinks is not None),
        CURVE=tl.constexpr(heads.gate_curve if has_gates else ""),
        ARE_OF_HEADS=tl.constexpr(heads.are_gates_of_heads),
    )


def _kind(heads: Heads, norm: Norm | None) -> int:
    if norm is None:
        return int(NO_NORM.value)
    if norm.is_centred:
        return int(CENTRED_NORM.value)
    kind = NORM_AFTER if heads.are_norms_after else HEAD_NORM if len(norm.weight) == heads.head_dim else WHOLE_NORM
    return int(kind.value)


def _parts(slots: int, kv_heads: int, queries: int, dim: int, device: torch.device) -> ChunkParts:
    shape = slots, kv_heads, queries
    largests, sums = (torch.empty(shape, device=device) for _ in range(2))
    return ChunkParts(largests, sums, torch.empty(*shape, dim, device=device))
