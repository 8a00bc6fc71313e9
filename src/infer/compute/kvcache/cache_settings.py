"""Settings of the cache of keys and values: how it stores them, and which tokens it evicts. Loads no torch.

An instance is always valid and never changes. `groups.check_layers` checks that a network supports the settings.
"""

from dataclasses import dataclass
from typing import final, no_type_check

from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.quantization import kv_formats
from infer.errors import InvalidRequestError
from infer.parameters import OneOf
from infer.system.available_memory import available_memory_bytes, total_memory_bytes

KV_TYPES: tuple[str, ...] = ("auto", *kv_formats.KV_TYPES)
EVICTION_POLICIES = ("none", "sliding", "snapkv")
SLOTS_PER_BLOCK = 16  # slots that kernels read together
SLOTS_PER_CHUNK = 256  # slots that attention sums together
TILE_SLOTS = 32  # a margin, so that kernels never read sinks and window in one tile
OBSERVED_TOKENS = 32  # snapkv: the last tokens of a prompt, whose attention chooses the tokens to keep


# The checks of this class name the broken rule; the type checks of the tests' import hook would raise before them.
@no_type_check
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """Storage format and eviction policy of a cache.

    If a policy evicts, `eviction_window` tokens are kept, including the first `protected_prefix` of the text. If
    `memory_threshold_mb` is None, it evicts from the start. With a number, rows keep all tokens until the system has
    less memory available than that. Without a policy, the number becomes None.

    A page is the unit that is allocated, shared and freed: `page_tokens` tokens. With `reuse_prefixes`, a prefix that
    several rows of a cache have is stored once, and later rows find it again. This does not apply if a policy evicts.

    `state_memory_mb` is the memory for states of recurrent layers: those of the running rows, and those from which
    later rows may continue. None: two pages per row, and eight that all rows share; `LLM` takes less in little memory.
    """

    kv_type: str = "auto"  # one of KV_TYPES
    eviction_policy: str = "none"  # one of EVICTION_POLICIES
    eviction_window: int = 1024
    protected_prefix: int = 4
    memory_threshold_mb: int | None = None
    page_tokens: int = STATE_TOKENS
    reuse_prefixes: bool = False
    state_memory_mb: int | None = None

    def __post_init__(self) -> None:
        OneOf(KV_TYPES, is_list=True).check("kv_type", self.kv_type)
        OneOf(EVICTION_POLICIES, is_list=True).check("eviction_policy", self.eviction_policy)
        _check_count("eviction_window", self.eviction_window, 1)
        _check_count("protected_prefix", self.protected_prefix, 0)
        _check_count("page_tokens", self.page_tokens, SLOTS_PER_BLOCK)
        if self.page_tokens % SLOTS_PER_BLOCK or SLOTS_PER_CHUNK % self.page_tokens:
            raise InvalidRequestError(f"page_tokens must be 16, 32, 64, 128 or 256, got {self.page_tokens}")
        others, why = self.protected_prefix, f"protected_prefix={self.protected_prefix}"
        if self.keeps_whole_prompts:
            others, why = others + OBSERVED_TOKENS, f"{why} and the {OBSERVED_TOKENS} last tokens that snapkv observes"
        if self.evicts and self.eviction_window <= others:
            raise InvalidRequestError(
                f"eviction_window must be larger than {why}, which it includes, got {self.eviction_window}"
            )
        if self.state_memory_mb is not None:
            _check_count("state_memory_mb", self.state_memory_mb, 1)
        self._check_threshold()

    def _check_threshold(self) -> None:
        threshold, total = self.memory_threshold_mb, total_memory_bytes()
        if threshold is None:
            return
        _check_count("memory_threshold_mb", threshold, 1)
        if not self.evicts:
            object.__setattr__(self, "memory_threshold_mb", None)
            return
        if total is None or available_memory_bytes() is None:
            raise InvalidRequestError(
                f"memory_threshold_mb={threshold}: this system does not report its available memory; leave it out "
                "to evict from the start"
            )
        if threshold * 2**20 > total:
            raise InvalidRequestError(
                f"memory_threshold_mb must be below this machine's {total >> 20} MB, got {threshold}"
            )

    @property
    def evicts(self) -> bool:
        return self.eviction_policy != "none"

    @property
    def goes_on(self) -> bool:
        """True if a text may be longer than the context that the model was made for.

        No token then attends further back than that context.
        """
        return self.eviction_policy == "sliding" and self.memory_threshold_mb is None

    @property
    def keeps_whole_prompts(self) -> bool:
        """True if the cache must have a whole prompt before it can choose the tokens to keep."""
        return self.eviction_policy == "snapkv"

    @property
    def is_late(self) -> bool:
        """True if a row attends to all of its text at first, and later only to sinks and window."""
        return self.keeps_whole_prompts or self.memory_threshold_mb is not None

    def check_length(self, num_tokens: int, most: int) -> None:
        """Raise InvalidRequestError if a model made for `most` tokens cannot have a context of `num_tokens`."""
        if num_tokens > most and not self.goes_on:
            raise InvalidRequestError(
                f"max_seq_len must be from 2 to the model's own {most}, got {num_tokens}: "
                "only eviction_policy sliding allows more"
            )
        if num_tokens > most and self.eviction_window > most - TILE_SLOTS:
            raise InvalidRequestError(
                f"eviction_window must be at most {most - TILE_SLOTS} if max_seq_len={num_tokens} is above the "
                f"model's own {most}, got {self.eviction_window}"
            )


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} must be a whole number of at least {least}, got {value!r:.80}")
