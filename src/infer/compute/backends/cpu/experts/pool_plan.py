"""How many of a model's experts are in memory, by arithmetic on its headers: no torch, and no allocation.

An expert's record has its three matrices, packed one after another, in the file and in memory. A pool has the frames of
all layers whose records have one form.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, final

from infer.compute.backends.cpu.layouts import LANES, LAYOUTS
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Experts
from infer.errors import InvalidRequestError, UnsupportedModelError

BLOCK_BYTES = 4096  # what direct reads begin and end at
PART_BYTES = 1 << 20  # of a record: read at once, so that a disk has enough to do, and checked by one thread
PARTS = ("gate", "up", "down")
_ENTRY_BYTES = 6 * 8  # of the tables, per expert or frame
_HALF_LIFE_TOKENS = 64
MOST_HALVINGS = 40  # of an expert's uses


@final
@dataclass(frozen=True)
class RecordForm:
    """The form of an expert's record: the types and the shapes of its matrices."""

    types: tuple[str, str, str]
    hidden: int
    inner: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first bytes of gate, up and down, and the end."""
        sizes = (
            rows // LANES * LAYOUTS[type_].group_bytes(columns)
            for type_, (rows, columns) in zip(self.types, self.shapes, strict=True)
        )
        return tuple(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        return -(-self.starts[-1] // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def num_parts(self) -> int:
        return -(-self.num_bytes // PART_BYTES)


class PoolPlan(NamedTuple):
    """The plan of one pool: memory for `num_frames` experts of some layers, whose records have the same form.

    Each of the layers, which are given by number, has `num_experts` experts and chooses `num_chosen` per token.
    """

    form: RecordForm
    num_experts: int
    num_chosen: int
    layers: tuple[int, ...]
    num_frames: int = 0

    @property
    def num_records(self) -> int:
        return len(self.layers) * self.num_experts

    @property
    def frame_bytes(self) -> int:
        """Memory of a frame and its entries in tables."""
        return self.form.num_bytes + _ENTRY_BYTES

    @property
    def table_bytes(self) -> int:
        """Memory of the entries of all experts."""
        return _ENTRY_BYTES * self.num_records * (1 + self.form.num_parts)

    @property
    def num_bytes(self) -> int:
        return self.num_frames * self.frame_bytes + self.table_bytes

    @property
    def half_life(self) -> int:
        """log2 of the time after which a use counts half: the time of about `_HALF_LIFE_TOKENS` tokens."""
        return (_HALF_LIFE_TOKENS * len(self.layers)).bit_length()


def plan_pools(architecture: Architecture, types: Mapping[str, str], most_bytes: int) -> list[PoolPlan]:
    """Return the pools that take at most `most_bytes`, none for a model without experts.

    Each pool has the experts of one token and layer at least, and the rest is divided by the sizes of what is in the
    file. Raises InvalidRequestError if that is too little, and UnsupportedModelError for rows that need padding.
    """
    pools = _pools(architecture, types)
    tables = sum(pool.table_bytes for pool in pools)
    least = tables + sum(pool.num_chosen * pool.frame_bytes for pool in pools)
    if most_bytes < least:
        raise InvalidRequestError(
            f"experts_memory must be at least {-(-least // 1_000_000):,} MB for this model, which is what one token "
            f"needs in a layer, got {most_bytes / 1e6:,.1f} MB"
        )
    whole = tables + sum(pool.num_records * pool.frame_bytes for pool in pools)
    share = min(1.0, (most_bytes - least) / max(whole - least, 1))
    return [
        pool._replace(num_frames=pool.num_chosen + int(share * (pool.num_records - pool.num_chosen))) for pool in pools
    ]


def _pools(architecture: Architecture, types: Mapping[str, str]) -> list[PoolPlan]:
    layers_by_pool: dict[PoolPlan, list[int]] = {}
    for index, layer in enumerate(architecture.layers):
        own = layer.feed_forward
        if isinstance(own, Experts):
            gate, up, down = (types[f"model.layers.{index}.mlp.experts.0.{part}_proj.weight"] for part in PARTS)
            form = RecordForm((gate, up, down), architecture.hidden_size, own.intermediate_size)
            if form.inner % LANES or form.hidden % LANES:
                raise UnsupportedModelError(
                    f"experts of {form.hidden} × {form.inner} need padding to groups of {LANES} rows"
                )
            key = PoolPlan(form, own.router.num_experts, own.router.num_chosen, ())
            layers_by_pool.setdefault(key, []).append(index)
    return [pool._replace(layers=tuple(layers)) for pool, layers in layers_by_pool.items()]
