"""SnapKV (arXiv:2404.14469): keep only those tokens of a long prompt that its last tokens attend to."""

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.cache_settings import OBSERVED_TOKENS
from infer.compute.kvcache.page_rows import GroupRows
from infer.compute.kvcache.paged import PagedCache, Positions
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_layout import LayerCache
from infer.errors import OutOfPagesError

POOLED = 7  # neighbouring slots that are scored together


@final
class PromptCompression:
    """Prompt compression for a cache whose policy is snapkv."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._chosen: dict[int, Int64[Tensor, "kv_heads kept"]] = {}  # by layer

    def shortage(self, row: int) -> str:
        """Return which pages are missing to compress a row's prompt, or an empty string if there are enough."""
        length, uncompressed = self._cache.lengths[row], self._uncompressed(row)
        if not uncompressed or length <= self._cache.settings.eviction_window:
            return ""
        return self._cache.shortage(row, self._written(length, uncompressed))

    def after_prompt(self, row: int, token_ids: Sequence[int], forward: Callable[[Step], object]) -> None:
        """Compress a committed prompt: keep the first tokens, the last tokens, and the tokens that the last attend to.

        `token_ids` are the row's tokens. A prompt that fits the window is kept whole. For a longer prompt, the last
        tokens are computed again; `forward` runs a step over the cache, op by op. Raises OutOfPagesError if pages are
        shared with another row and cannot be copied. A loaded row may then have lost some tokens: `lengths` reports how
        many are left.
        """
        cache, length, settings = self._cache, self._cache.lengths[row], self._cache.settings
        if not (uncompressed := self._uncompressed(row)):
            return
        num_kept = min(length, settings.eviction_window)
        if num_kept < length:
            self._observe(row, token_ids[:length], uncompressed, forward)
        for rows in uncompressed:
            if not rows.can_compress(row):  # computing again took a page, so the row now slides for lack of memory
                continue
            if num_kept < length:
                cache.memory.keep_slots(rows, row, self._chosen)
            rows.compress(row, length, num_kept)
        self._chosen.clear()
        cache.memory.publish()

    def _observe(
        self, row: int, token_ids: Sequence[int], uncompressed: Sequence[GroupRows], forward: Callable[[Step], object]
    ) -> None:
        """Compute the last tokens again, and record the slots that they attend to."""
        cache, start = self._cache, len(token_ids) - OBSERVED_TOKENS
        if what := cache.make_own(row, self._written(len(token_ids), uncompressed)):
            raise OutOfPagesError(what)
        cache.truncate(row, start)
        # The windows of a loaded row have only what the next token sees, so then all tokens are computed again.
        for first in range(cache.lengths[row], start, cache.step_tokens):
            self._run(row, token_ids[first : min(first + cache.step_tokens, start)], forward)
        cache.observer = self._note
        try:
            self._run(row, token_ids[start:], forward)
        finally:
            cache.observer = None

    def _uncompressed(self, row: int) -> list[GroupRows]:
        """Return the groups whose part of the row is to be compressed."""
        cache, is_limited = self._cache, self._cache.settings.memory_threshold_mb is not None
        groups = [rows for rows in cache.groups if rows.can_compress(row)]
        return [] if groups and is_limited and not cache.is_short_of_memory() else groups

    def _written(self, length: int, uncompressed: Sequence[GroupRows]) -> list[Positions]:
        """Return the positions of a prompt that are written while it is compressed."""
        kept = [(rows, 0, self._cache.settings.eviction_window) for rows in uncompressed]
        return kept + [(rows, length - OBSERVED_TOKENS, length) for rows in self._cache.groups]

    def _run(self, row: int, token_ids: Sequence[int], forward: Callable[[Step], object]) -> None:
        cache = self._cache
        cache.reserve(row, len(token_ids))
        forward(Step.of(token_ids, cache.lengths[row], row=row))
        cache.commit(row, len(token_ids))

    def _note(self, layer: int, qkv: Float[Tensor, "tokens out"], heads: Heads, step: Step) -> None:
        cache = self._cache
        if any(layer in rows.group.layers for rows in cache.groups if rows.group.is_late):
            kept = cache.memory.layers[layer]
            assert isinstance(kept, LayerCache)
            weights = ops.attention_weights(qkv, heads, kept, step)
            prefix, window = cache.settings.protected_prefix, cache.settings.eviction_window
            self._chosen[layer] = choose_slots(weights, prefix, window)


def choose_slots(
    weights: Float[Tensor, "kv_heads group tokens slots"], num_first: int, num_kept: int
) -> Int64[Tensor, "kv_heads kept"]:
    """Return the slots to keep, in ascending order, separately for each head of keys and values.

    `weights` is the attention of a prompt's last tokens over the whole prompt. The first `num_first` slots and the
    slots of those last tokens are kept. Between them, the slots with the most attention are kept. Attention is summed
    over tokens and over the heads of a group, then replaced by the maximum of its neighbourhood. Among equal slots the
    first is kept.
    """
    num_last, length = weights.shape[2:]
    votes = weights[..., num_first : length - num_last].sum((1, 2))
    pooled = F.max_pool1d(votes, POOLED, stride=1, padding=POOLED // 2)
    best = pooled.sort(dim=-1, descending=True, stable=True).indices[:, : num_kept - num_first - num_last]
    slots = torch.arange(length, device=weights.device).expand(len(weights), -1)
    return torch.cat([slots[:, :num_first], best.sort().values + num_first, slots[:, length - num_last :]], dim=-1)
