"""Attention with its weights: norm → q, k, v; rotate, append to the cache, attend; output → residual stream."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.text_cache import TextCache
from infer.compute.operands.architecture import Norms
from infer.compute.operands.group import Shares
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, Projection
from infer.models.sharding import head_starts, kv_heads_of
from infer.models.weight_loader import WeightLoader

_ALL = 1 << 40  # more tokens than any text has

AnyCache = PagedCache | TextCache


@final
@dataclass(frozen=True)
class LoadedAttention:
    own: Attention  # with only the heads of this rank
    cache_index: int  # index of the cache's layer with its keys and values
    norm: Norm | None
    qkv: Projection  # only q, if the keys are appended before
    heads: Heads
    output: Projection
    post_norm: Norm | None
    sum_norm: Norm | None
    keys: Projection | None  # k and v, if they are needed before any token attends; None: they are parts of qkv

    @classmethod
    def load(cls, attention: Attention, norms: Norms, loader: WeightLoader, cache_index: int) -> Self:
        keys: Projection | None = None
        if attention.is_causal:
            qkv, heads = _load_qkv(attention, loader)
        else:
            heads = replace(_heads(attention, loader), num_ahead=(attention.window or _ALL) - 1, has_keys=False)
            qkv = loader.projection("self_attn.q_proj", label="q")
            keys = loader.projection("self_attn.k_proj", "self_attn.v_proj", label="kv")
        return cls(
            own=replace(attention, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads),
            cache_index=cache_index,
            norm=loader.norm("attention_norm") if norms.before_mixer else None,
            qkv=qkv,
            heads=heads,
            output=loader.by_rows("self_attn.o_proj", label="output"),
            post_norm=loader.norm("post_attention_norm", eps=norms.eps_after) if norms.after else None,
            sum_norm=loader.norm("post_attention_norm") if norms.of_sum else None,
            keys=keys,
        )

    def append_keys(self, x: Float[Tensor, "tokens hidden"], cache: TextCache, step: Step) -> None:
        """Store keys and values of the step's tokens. Tokens before and after them will attend to these."""
        assert self.keys is not None
        ops.append_keys(ops.norm_project(x, self.norm, self.keys), self.heads, cache.layers[self.cache_index], step)

    def add(self, x: Float[Tensor, "tokens hidden"], cache: AnyCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        qkv = ops.norm_project(x, self.norm, self.qkv)
        attended = cache.attend(self.cache_index, qkv, self.heads, step)
        if self.sum_norm is not None:
            return ops.project_add_norm(x, attended, self.output, self.sum_norm)
        return ops.project_add(x, attended, self.output, self.post_norm)


def _qk_norm(attention: Attention, loader: WeightLoader, which: str) -> Norm | None:
    if attention.qk_norm == "head_unweighted":
        return Norm(torch.ones(attention.head_dim, device=loader.backend.device), loader.network.norm_eps)
    if attention.qk_norm == "head_centred":
        heads = range(attention.num_heads if which == "q" else attention.num_kv_heads)
        weights = [loader.vector(f"self_attn.{which}_norm.norms.{head}.weight") for head in heads]
        return Norm(torch.cat(weights), loader.network.norm_eps, is_centred=True)
    return loader.norm(f"self_attn.{which}_norm") if attention.qk_norm else None


def _heads(attention: Attention, loader: WeightLoader) -> Heads:
    """Return the heads of all ranks."""
    dim, num_new = attention.head_dim, attention.num_kv_heads if attention.has_keys else 0
    before_gate = attention.num_heads + 2 * num_new
    return Heads(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=dim,
        scale=attention.scale,
        rope=None if attention.rope is None else loader.rope_tables[attention.rope],
        q_norm=_qk_norm(attention, loader, "q"),
        k_norm=_qk_norm(attention, loader, "k") if attention.has_keys else None,
        softcap=attention.softcap,
        sinks=loader.vector("self_attn.sinks") if attention.has_sinks else None,
        gate_start=dim * before_gate if attention.has_gate else None,
        v_eps=loader.network.norm_eps if attention.has_v_norm and attention.has_keys else None,
        gate_curve=attention.gate_curve,
        are_gates_of_heads=attention.are_gates_of_heads,
        query_scales=None if attention.query_scale is None else loader.query_scales[attention.query_scale],
        has_keys=attention.has_keys,
        are_norms_after=attention.qk_norm == "head_after",
        precision=loader.precision,
    )


def _load_qkv(attention: Attention, loader: WeightLoader) -> tuple[Projection, Heads]:
    """Return this rank's part of the query, key and value projection, and its heads."""
    heads, dim = _heads(attention, loader), attention.head_dim
    names = [f"self_attn.{which}_proj" for which, _ in attention.projected]
    num_new = attention.num_kv_heads if attention.has_keys else 0
    before_v, before_gate = attention.num_heads + num_new, attention.num_heads + 2 * num_new
    if loader.group is None or (starts := head_starts(attention, loader.group.size)) is None:
        return loader.by_rows(*names, label="qkv"), heads
    of_gate = 1 if attention.are_gates_of_heads else dim  # columns of the gates of one head
    shares = Shares(loader.group, tuple(dim * start for start in starts))
    first, end = starts[loader.group.rank], starts[loader.group.rank + 1]
    kv_first, kv_end = kv_heads_of(attention, (first, end))
    sinks = None if heads.sinks is None else heads.sinks[first:end].contiguous()
    heads = replace(heads, num_heads=end - first, num_kv_heads=kv_end - kv_first, sinks=sinks, shares=shares)
    if len({after - before for before, after in pairwise(starts)}) > 1:  # gathering costs less than waiting
        qkv_starts = dim * first, dim * (attention.num_heads + kv_first), dim * (before_v + kv_first)
        gate_start = dim * before_gate + of_gate * first if attention.has_gate else None
        return loader.by_rows(*names, label="qkv"), replace(heads, qkv_starts=qkv_starts, gate_start=gate_start)
    num_new = kv_end - kv_first if attention.has_keys else 0
    ranges = [(dim * first, dim * end), *[(dim * kv_first, dim * kv_end)] * (2 if attention.has_keys else 0)]
    if attention.has_gate:
        ranges.append((of_gate * first, of_gate * end))
        heads = replace(heads, gate_start=dim * (end - first + 2 * num_new))
    return loader.projection(*names, label="qkv", ranges=ranges), heads
