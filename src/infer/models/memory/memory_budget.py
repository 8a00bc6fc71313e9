"""One budget of memory for a model: weights, steps, history, states and pages, and the option that helps.

`estimate`, the load, the pages of the cache and every refusal read it. It is arithmetic on headers: no torch, and no
allocation.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self, final

from infer.compute.backends.before_load import MemoryRules, StepSizes, memory_rules
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import make_groups, most_pages, q8_pays_from, text_cache_bytes, with_state_memory
from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.limits import HOST_STEP, MAX_STEP_TEXTS, StepLimits
from infer.compute.operands.mixers import Mixer
from infer.errors import InvalidRequestError, ModelError, UnsupportedModelError
from infer.models.memory.memory_estimate import (
    LoadSettings,
    StoredMatrix,
    decode_bytes,
    expert_bytes,
    kv_type_of,
    loaded_types,
    pool_bytes,
    rope_bytes,
    weight_bytes,
)
from infer.request_limits import MAX_CONTEXT, MAX_FULL_CONTEXTS

# Measured resident memory: of a process that has loaded torch and our compiled kernels, and per token of a vocabulary.
PROCESS_BYTES, VOCABULARY_BYTES = 249_000_000, 400
STATES_SHARE = 8  # states of more than one row take an eighth of the memory that one full row leaves
_WORKSPACE_SHARE, _HISTORY_SHARE = 8, 32  # of the memory: for buffers of steps, and for the history of all rows
_VECTORS_SHARE, _SPARE_SHARE = 8, 64  # that the pool of a GPU leaves: for vectors of texts, and for other programs
_VECTORS_STEP, _VECTORS_PAGES = StepLimits(256, 33), 84  # of `hidden_states`, pages beside those of a full row
_FREE_SHARE = 8  # of the memory that experts leave, if they are read from a file without being asked to
_LEAST, _MULTIPLE = 512, 64  # smallest context that is cut to the memory, and its unit
_FULL_MOST = 10**6  # megabytes
_MEGABYTE = 10**6


def context_length(max_seq_len: int | None, architecture: Architecture, cache: CacheSettings) -> int:
    """Return `max_seq_len`. If it is None, return the model's own length, but at most the default.

    Raises InvalidRequestError if `max_seq_len` is not valid for the model.
    """
    if max_seq_len is None:
        return min(architecture.own_length, MAX_CONTEXT)
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 2:
        raise InvalidRequestError(
            f"max_seq_len must be from 2 to the model's own {architecture.most_positions}, got {max_seq_len!r:.80}"
        )
    cache.check_length(max_seq_len, architecture.most_positions)
    if architecture.text_inputs is not None and max_seq_len > architecture.max_positions:
        most = architecture.max_positions
        raise InvalidRequestError(
            f"max_seq_len must be at most the {most} positions that were learned, got {max_seq_len}"
        )
    return max_seq_len


@final
@dataclass(frozen=True)
class MemoryBudget:
    """A model's memory in bytes, in parts: arithmetic on its headers and settings.

    The cache has `num_rows` rows of `num_tokens` tokens in `pool_pages` pages, or pages for all rows when full. If
    `num_rows` is None, it is the smallest cache with which `LLM` opens the model: the rows of a step share the pages of
    one full row, unless `pool_pages` is given, and its states.
    """

    architecture: Architecture
    layers: Sequence[Mixer]  # of the cache
    kv_type: str
    load: LoadSettings
    settings: CacheSettings
    num_tokens: int
    num_rows: int | None = None
    pool_pages: int | None = None
    tensors: Mapping[str, StoredMatrix] | None = None  # None: the weights are loaded, and count no more
    types: Mapping[str, str] | None = None  # of matrices in memory, by name
    matrix_bytes: int = 0
    num_devices: int = 1  # with a memory of their own, which divide weights and cache

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        tensors: Mapping[str, StoredMatrix],
        load: LoadSettings,
        settings: CacheSettings,
        *,
        num_tokens: int,
        num_rows: int | None = None,
        pool_pages: int | None = None,
    ) -> Self:
        """Return the budget of a model that is not loaded yet."""
        types = loaded_types(architecture, tensors, load)
        return cls(
            architecture, architecture.cached_mixers, kv_type_of(architecture, tensors, load, settings), load, settings,
            num_tokens, num_rows, pool_pages, tensors, types,
            weight_bytes(architecture, types, load.device, load.experts_memory),
        )  # fmt: skip

    @property
    def q8_pays_from(self) -> int | None:
        """Context from which `q8_pays_from` recommends q8; None if a policy limits what a step reads."""
        if self.settings.evicts or self.architecture.reads_whole_texts:
            return None
        bytes_of = partial(decode_bytes, self.architecture, self.types or {})
        return q8_pays_from(self.layers, self.kv_type, self.num_tokens, bytes_of)

    # Parts

    @cached_property
    def weights(self) -> int:
        return 0 if self.types is None else self.matrix_bytes + rope_bytes(self.architecture, self.num_tokens)

    @cached_property
    def buffers(self) -> tuple[int, int]:
        """Bytes of the buffers that grow with the tokens of a step, and of all other buffers of steps."""
        network, load = self.architecture, self.load
        if self.types is None and not self._rules.IS_TAKEN_AT_ONCE:  # buffers take memory when they are first written
            return 0, 4 * network.vocab_size * self._num_full
        sizes = StepSizes(self.num_tokens, *load.step, load.precision, load.num_threads)
        growing, others = self._rules.workspace_bytes(network, self.types or {}, sizes, self._num_full)
        text = self.num_tokens if network.reads_whole_texts else 0  # which may have several tiles
        return growing, others + 2 * 4 * text * network.hidden_size

    @property
    def history(self) -> int:
        """Bytes of the sampler's history, which counts tokens per row, with the ids of its rows.

        On the CPU it is of the rows that are full. A device allocates it for all rows.
        """
        rows, id_bytes = (self.load.step.logits, 4) if self._rules.IS_TAKEN_AT_ONCE else (self._num_full, 8)
        return rows * (8 * self.architecture.vocab_size + id_bytes * self.num_tokens)

    @cached_property
    def pools(self) -> tuple[int, int]:
        """Bytes of keys and values, and of states. Raises InvalidRequestError if a row does not fit the pages."""
        settings, pool_pages, step_tokens = self.settings, self.pool_pages, self.load.step.tokens
        if self.architecture.reads_whole_texts:  # two layers of one text, or of the texts of a tile
            sizes = MAX_STEP_TEXTS, max(self.num_tokens, step_tokens)
            return text_cache_bytes(self.architecture.attention[0], *sizes, self.kv_type), 0
        if self.num_rows is None:
            settings, pool_pages = self._with_states(0).settings, pool_pages or self._full_pages
        counts = self.num_tokens, self._most_rows, pool_pages, step_tokens
        return pool_bytes(self.layers, settings, self.kv_type, *counts)

    @property
    def cache(self) -> int:
        return sum(self.pools)

    @property
    def workspace(self) -> int:
        """Bytes of the buffers of steps and of the history. Each of several devices has both."""
        return self.num_devices * (sum(self.buffers) + self.history)

    @property
    def process(self) -> int:
        """Host memory of Python with torch and the vocabulary, a part of which the caller already uses. 0 with CUDA."""
        is_counted = self.types is not None and self.load.device != "cuda"
        return is_counted * (PROCESS_BYTES + VOCABULARY_BYTES * self.architecture.vocab_size)

    @property
    def model(self) -> int:
        """Bytes that a process needs additionally for loading."""
        return self.weights + self.cache + self.workspace

    @property
    def total(self) -> int:
        return self.model + self.process

    @property
    def _rules(self) -> MemoryRules:
        return memory_rules(self.load.device)

    @property
    def _most_rows(self) -> int:
        return self.num_rows or self.load.step.logits

    @property
    def _full_pages(self) -> int:
        return num_pages(self.num_tokens, self.settings.page_tokens)

    @property
    def _row_pages(self) -> int:  # in the group that needs the most
        return most_pages(make_groups(self.layers, self.settings, self.num_tokens, self.load.step.tokens))

    @property
    def _num_full(self) -> int:
        """The number of rows whose history and logits are counted: after loading, of full rows that fit the pages."""
        if self.architecture.reads_whole_texts:
            return 0
        if self.types is None and self.pool_pages is not None:
            return min(self._most_rows, num_pages(self.pool_pages, self._full_pages))
        return self.num_rows or 1

    # What fits

    def with_step_that_fits(self, available: int | None) -> Self:
        """Return the budget with the largest steps that a device with little memory can have.

        Tokens are halved until buffers take an eighth of the memory, but not below 512. Rows are halved until their
        history takes a 32nd, but not below 64. Both are halved further if the model does not fit otherwise.
        """
        budget, (tokens, rows), least = replace(self, pool_pages=None), self.load.step, HOST_STEP
        while available is not None and (tokens // 2 >= least.tokens or rows // 2 >= least.logits):
            each, is_too_large = available // self.num_devices, budget.model > available
            is_long = is_too_large or budget.buffers[0] > each // _WORKSPACE_SHARE
            if tokens // 2 >= least.tokens and is_long:
                tokens //= 2
            elif rows // 2 >= least.logits and (is_too_large or budget.history > each // _HISTORY_SHARE):
                rows //= 2
            else:
                break
            budget = replace(budget, load=replace(self.load, limits=StepLimits(tokens, rows)))
        return replace(self, load=budget.load)

    def with_length_that_fits(self, available: int | None) -> Self:
        """Return the budget with the part of its context that fits, or the whole if no useful part fits."""
        whole = replace(self, pool_pages=None)
        if available is None or whole.model <= available:
            return self
        fits = whole.largest_context(available, self.num_tokens) // _MULTIPLE * _MULTIPLE
        return replace(self, num_tokens=fits) if fits >= _LEAST else self

    def with_experts_that_fit(self, available: int | None) -> "MemoryBudget":
        """Return the budget with as many experts in memory as fit, if no other option makes the model fit.

        The others are read from a file. If possible, an eighth of the memory stays free for more texts and other
        programs. Returns itself if that does not help, or if the settings limit the experts.
        """
        if available is None or self.model <= available or self.load.experts_memory is not None:
            return self
        if self._cache_that_fits(available) or self._weights_that_fit(available):
            return self
        most = available - available // _FREE_SHARE
        return self._with_fewer_experts(most) or self._with_fewer_experts(available) or self

    def largest_context(self, available: int, most: int) -> int:
        """Return the largest number of tokens, at most `most`, for which the model and one row fit; 0 if none does.

        One row must also fit the pages of the pool.
        """

        def is_too_large(count: int) -> bool:
            budget = replace(self, num_tokens=count)
            has_pages = self.pool_pages is None or self.architecture.reads_whole_texts
            return not (has_pages or budget._row_pages <= (self.pool_pages or 0)) or budget.model > available

        return bisect_left(range(1, most + 1), True, key=is_too_large)

    def planned(self, available: int | None, reserved: int = 0) -> "MemoryBudget":
        """Return the budget of the rows of a step, with states and pages that fit beside `reserved` bytes.

        Without `pool_pages` it has pages for 1 to 8 full rows, as many as fit. On a device whose memory is taken at
        once, it has all pages that fit: nothing else will use the memory.
        """
        plan = replace(self, num_rows=self._most_rows)
        counts = [self.pool_pages or self._full_pages * count for count in range(MAX_FULL_CONTEXTS, 0, -1)]
        if available is None:
            return replace(plan._with_states(None), pool_pages=counts[0])
        available -= reserved
        if takes_all := self._rules.IS_TAKEN_AT_ONCE:
            available -= available // _SPARE_SHARE + plan._vectors_bytes(available)
        least = replace(plan._with_states(0), pool_pages=counts[-1])
        plan = plan._with_states((available - least.total) // STATES_SHARE)
        if takes_all and self.pool_pages is None:
            more = range(counts[-1] + 1, self._most_rows * plan._row_pages + 1)
            counts = [counts[-1] + _num_fitting(more, available, lambda count: replace(plan, pool_pages=count))]
        plans = [replace(plan, pool_pages=count) for count in counts]
        return next((each for each in plans if each.total <= available), plans[-1])

    def _vectors_bytes(self, available: int) -> int:
        """Return the memory for vectors of texts, which have a cache of their own; 0 if it would take too much."""
        least = replace(self._with_states(0), pool_pages=self._full_pages)
        load, pages = replace(self.load, limits=_VECTORS_STEP), self._full_pages + _VECTORS_PAGES
        vectors = replace(self, load=load, num_rows=2, pool_pages=pages)._with_states(None).total
        return vectors if vectors <= (available - least.total) // _VECTORS_SHARE else 0

    def _with_states(self, spare_bytes: int | None) -> Self:
        settings = with_state_memory(self.settings, self.layers, self.num_tokens, self._most_rows, spare_bytes)
        return replace(self, settings=settings)

    # Refusals

    def check(self, name: str, available: int | None) -> None:
        """Raise ModelError, with the option that helps, if the model needs more than is available. None: unknown."""
        if available is None or self.model <= available:
            return
        instead = self.option_that_fits(available) or "use a smaller quantisation of it, or a smaller model"
        raise ModelError(
            f"{name} needs {_megabytes(self.model)} MB here ({_megabytes(self.weights)} of weights, "
            f"{_megabytes(self.cache)} of cache for {self.num_tokens:,} tokens, "
            f"{_megabytes(self.workspace)} of workspace), but {_megabytes(available)} MB are available: {instead}"
        )

    def check_rows(self, available: int | None) -> None:
        """Raise InvalidRequestError, with an option that helps, if a loaded model's rows do not fit the memory."""
        if available is None or self.model <= available:
            return
        what = f"{self.num_rows} x {self.num_tokens:,} tokens of cache"
        what += "" if self.pool_pages is None else f" in {self.pool_pages:,} pages"
        one, rows = self, 0
        if self.pool_pages is None:
            one = replace(self, num_rows=1)
            rows = available // one.model
        instead = f"{rows} rows fit" if rows else one.option_that_fits(available) or "free some of it"
        raise InvalidRequestError(
            f"{what} need {_megabytes(self.model)} MB, but {_megabytes(available)} MB are available: {instead}"
        )

    def option_that_fits(self, available: int) -> str | None:
        """Return an option with which the model and its cache fit, as a sentence, or None if none helps."""
        return (
            self._cache_that_fits(available) or self._weights_that_fit(available) or self._experts_that_fit(available)
        )

    def _cache_that_fits(self, available: int) -> str | None:
        plain = replace(self, settings=replace(self.settings, state_memory_mb=None))
        least = plain._with_states(0)
        if (first := least.settings.state_memory_mb) is not None and least.model <= available:
            larger = partial(replace, least.settings)
            sizes = range(first + 1, _FULL_MOST)
            more = _num_fitting(sizes, available, lambda size: replace(least, settings=larger(state_memory_mb=size)))
            return f"state_memory_mb={first + more} fits"
        if self.pool_pages is not None:
            counts = range(self._row_pages, self.pool_pages)
            if fitting := _num_fitting(counts, available, lambda count: replace(self, pool_pages=count)):
                return f"pool_pages={counts[fitting - 1]} fits"
        tokens = _num_fitting(range(1, self.num_tokens), available, plain._smallest)
        given = {"pool_pages": self.pool_pages, "state_memory_mb": self.settings.state_memory_mb}
        without = " and ".join(name for name, value in given.items() if value is not None)
        return f"max_seq_len={tokens} fits" + (f" without {without}" if without else "") if tokens > 1 else None

    def _smallest(self, num_tokens: int) -> Self:
        """Return the budget of the smallest cache for rows of this length."""
        found = replace(self, num_tokens=num_tokens)
        return replace(found._with_states(0), pool_pages=None if self.pool_pages is None else found._full_pages)

    def _weights_that_fit(self, available: int) -> str | None:
        """Return the option that quantises float weights at load, if the model fits then."""
        if self.tensors is None or self.load.dtype != "auto" or self.load.weights != "auto":
            return None
        without = "" if self.pool_pages is None else " without pool_pages"
        for kind in ("q8", "q4"):
            headers = self.architecture, self.tensors, replace(self.load, weights=kind), self.settings
            other = replace(MemoryBudget.of(*headers, num_tokens=self.num_tokens), num_devices=self.num_devices)
            if other.types != self.types:
                if other.model <= available:
                    return f"weights={kind} fits{without}"
                if (tokens := other.largest_context(available, self.num_tokens)) >= _LEAST:
                    return f"weights={kind} with max_seq_len={tokens} fits{without}"
        return None

    def _experts_that_fit(self, available: int) -> str | None:
        fewer = self._with_fewer_experts(available)
        return fewer and f"experts_memory={(fewer.load.experts_memory or 0) // _MEGABYTE}MB fits"

    def _with_fewer_experts(self, available: int) -> "MemoryBudget | None":
        """Return the budget with the memory for experts with which the model fits, if this device can read the others.

        Returns None if nothing is left for them, or less than a token needs.
        """
        if self.types is None or self.tensors is None or self.load.device != "cpu" or self.num_devices > 1:
            return None
        taken, given = expert_bytes(self.architecture, self.types), self.load.experts_memory
        if given is not None:
            taken = self._rules.expert_store_bytes(self.architecture, self.types, given)
        fitting = (available - (self.model - taken)) // _MEGABYTE * _MEGABYTE
        if not taken or fitting <= 0:
            return None
        load = replace(self.load, experts_memory=fitting)
        with suppress(InvalidRequestError, UnsupportedModelError):  # less than a token needs, or rows that need padding
            matrix_bytes = weight_bytes(self.architecture, self.types, load.device, fitting)
            return replace(self, load=load, matrix_bytes=matrix_bytes)
        return None


def _num_fitting(counts: range, available: int, budget_of: Callable[[int], MemoryBudget]) -> int:
    """Return how many of the counts give a budget that fits."""
    return bisect_right(counts, available, key=lambda count: budget_of(count).model)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f}"
