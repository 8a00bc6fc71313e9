"""Weights in the form that `ops` accepts: matrices as in their file, and the small values around them.

`StoredWeight` keeps the file's bytes; `ops.prepare` converts it to the form that a kernel module reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.operands.feed_forwards import Activation, Router
from infer.compute.operands.group import Shares
from infer.compute.operands.mixers import GateCurve, GatedDeltaNet
from infer.compute.quantization.ggml_types import BLOCK_TYPES


class Weight(ABC):
    """A matrix `[out_features, in_features]` in some kernel module's form."""

    shape: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...


@final
@dataclass(frozen=True)
class StoredWeight(Weight):
    """A tensor as in its file: GGML's name of the type, the logical shape, the bytes.

    `data` has the logical shape and a float dtype for F32, F16 and BF16. For block types it is uint8 `[rows, bytes per
    row]`, and the last axis of `shape` is a multiple of the block.
    """

    type: str
    shape: tuple[int, ...]
    data: Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def row_bytes(self) -> int:
        """Bytes of memory that are needed to read one row."""
        return self.num_bytes // self.out_features

    def rows(self, first: int, last: int) -> "StoredWeight":
        """Return the rows [first, last), as a view."""
        return StoredWeight(self.type, (last - first, *self.shape[1:]), self.data[first:last])


class FilePlace(NamedTuple):
    """A place in a file with contiguous rows, for kernels that read it themselves."""

    descriptor: int  # open as long as the weight's `read` exists
    offset: int


@final
@dataclass(frozen=True)
class UnreadWeight(Weight):
    """A matrix that is still in its file. Rows are read on request, so that a large matrix is never in memory twice.

    Reading raises ModelError if the file fails.
    """

    type: str
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]  # rows [first, last) → their `StoredWeight.data`
    place: FilePlace | None = None  # None: the file has the rows in another order, or with other bytes between them

    @property
    def num_bytes(self) -> int:
        return self.out_features * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return BLOCK_TYPES[self.type].row_bytes(self.in_features)

    @property
    def data(self) -> Tensor:
        """The whole matrix, read again at each access."""
        return self.read(0, self.out_features)

    def rows(self, first: int, last: int) -> StoredWeight:
        """Read and return the rows [first, last)."""
        return StoredWeight(self.type, (last - first, *self.shape[1:]), self.read(first, last))


FileWeight = StoredWeight | UnreadWeight


@dataclass(frozen=True)
class _OfSource(Weight):
    """A matrix that is made from another one of the same shape."""

    source: FileWeight

    @property
    def out_features(self) -> int:
        return self.source.out_features

    @property
    def in_features(self) -> int:
        return self.source.in_features


@final
@dataclass(frozen=True)
class ConvertedWeight(_OfSource):
    """A stored matrix that is converted to another type.

    Rows are converted on request, so that a large matrix is never completely in memory in floats.
    """

    type: str
    convert: Callable[[StoredWeight], Tensor]  # some rows of the source → their `StoredWeight.data` in `type`

    @property
    def num_bytes(self) -> int:
        return self.out_features * BLOCK_TYPES[self.type].row_bytes(self.in_features)

    @property
    def row_bytes(self) -> int:
        """Bytes of memory that are needed to read one row: six times its floats."""
        return 24 * self.in_features

    def rows(self, first: int, last: int) -> StoredWeight:
        """Return the rows [first, last), converted."""
        source = self.source.rows(first, last)
        return StoredWeight(self.type, source.shape, self.convert(source))


@final
@dataclass(frozen=True)
class ObservedWeight(_OfSource):
    """A stored matrix whose inputs are reported before each product. Only `backends.reference` multiplies with it."""

    source: StoredWeight
    on_input: Callable[[Float[Tensor, "rows in"]], None]

    @property
    def num_bytes(self) -> int:
        return self.source.num_bytes

    def rows(self, first: int, last: int) -> "ObservedWeight":
        """Return the rows [first, last), as a view with the same observer."""
        return ObservedWeight(self.source.rows(first, last), self.on_input)


@final
@dataclass(frozen=True)
class Projection:
    """y = x Wᵀ (+ bias). W consists of its parts, stacked (q, k, v; gate, up), and each part keeps its own type.

    With `shares`, the parts are one rank's rows, and the values computed from y are gathered from all ranks.
    """

    parts: tuple[Weight, ...]
    bias: Float[Tensor, "out"] | None = None
    shares: Shares | None = None
    label: str = ""  # its name in profiles: L3.qkv
    used_share: float = 1.0  # share of the rows by which one token is multiplied; for experts, the chosen ones
    is_stack: bool = False  # the parts are the matrices of experts, of one type and shape; kernels may pad each
    curve: Float[Tensor, "4"] | None = None  # the values of xIELU, if it is the activation of y

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


@final
@dataclass(frozen=True)
class SharedExpert:
    """An expert for all tokens. If it has a gate, its result is multiplied by sigmoid(gate · x)."""

    gate_up: Projection
    down: Projection
    gate: Projection | None  # one row, in float32


@final
@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467): x / sqrt(mean(x²) + eps) × weight (+ bias).

    With `is_centred` it is LayerNorm (arXiv:1607.06450): the mean of x is subtracted from x first.
    """

    weight: Float[Tensor, "hidden"]
    eps: float
    bias: Float[Tensor, "hidden"] | None = None
    is_centred: bool = False


@final
@dataclass(frozen=True)
class ExpertNorms:
    """Norms of a layer of experts, in addition to those that any feed-forward has."""

    router: Norm  # before the router
    experts: Norm  # before the chosen experts
    post_experts: Norm  # after the chosen experts' sum
    post_shared: Norm  # after the shared expert's result


class ExpertFrames(ABC):
    """Memory for some of a layer's experts, which are read from a file when a step needs them."""

    @property
    @abstractmethod
    def frames(self) -> Int[Tensor, "experts"]:
        """The frame of each expert of the layer, or -1."""


@final
@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a layer. gate, up and down have the rows of all experts, one expert below the other.

    With `frames` they have the rows of the experts that are in memory, where `frames` says.
    """

    router: Router
    router_logits: Projection  # in float32
    correction: Float[Tensor, "experts"] | None
    gate: Projection
    up: Projection
    down: Projection
    activation: Activation
    shared: SharedExpert | None
    expert_scales: Float[Tensor, "experts"] | None = None
    norms: ExpertNorms | None = None
    frames: ExpertFrames | None = None


@final
@dataclass(frozen=True)
class PerLayerWeights:
    """The weights from which the inputs of all layers for a token are made: `PerLayerInput`."""

    table: Weight  # [vocab, layers × dim], in its file or on the device
    table_scale: float
    projection: Projection  # multiplies the embedding of the token
    norm: Norm  # norm of each layer's columns

    @property
    def dim(self) -> int:
        return len(self.norm.weight)


@final
@dataclass(frozen=True)
class ConvWeights:
    """A causal convolution of each channel separately. The last tap is for the token itself."""

    taps: Float[Tensor, "taps channels"]
    bias: Float[Tensor, "channels"] | None


@final
@dataclass(frozen=True)
class DeltaNetWeights:
    """The values of a gated delta net between its projections, in float32: `GatedDeltaNet` has the equations."""

    net: GatedDeltaNet
    taps: Float[Tensor, "taps channels"]  # taps of the convolution; the last one is for the token itself
    dt_bias: Float[Tensor, "value_heads"]
    decay: Float[Tensor, "value_heads"]  # negative
    norm: Norm  # norm of each head's result


@final
@dataclass(frozen=True)
class TextInputWeights:
    """The rows that are added to the embeddings of a text's tokens, and any norm of the sum: `TextInputs`."""

    positions: Float[Tensor, "positions hidden"] | None
    types: Float[Tensor, "types hidden"] | None
    norm: Norm | None


@final
@dataclass(frozen=True)
class RopeTable:
    """cos and sin of every position's angles, one pair for each two elements that rotate together (i, i + dim / 2).

    A second set, if there is one, is for the rows in `Pages.rope_sets`; otherwise all rows use the first set.
    """

    cos: Float[Tensor, "sets positions half"]
    sin: Float[Tensor, "sets positions half"]


@final
@dataclass(frozen=True)
class Heads:
    """A layer's values that attention needs in addition to q, k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeTable | None
    # Before the rotation: over each head, or over all heads together if its weight is as long. With `is_centred` it is
    # over each head, with a part of the weight for each.
    q_norm: Norm | None
    k_norm: Norm | None
    softcap: float | None = None  # a score s becomes softcap × tanh(s / softcap), before invisible tokens are left out
    sinks: Float[Tensor, "heads"] | None = None  # one more logit per head, not scaled
    shares: Shares | None = None  # if given, these are one rank's heads, and their results are gathered
    qkv_starts: tuple[int, int, int] | None = (
        None  # where these heads begin in qkv of all ranks; None: qkv has only these heads
    )
    gate_start: int | None = None  # the first column of these heads' gates, after q, k and v; None: no gates
    v_eps: float | None = None  # eps of the norm of each head of v, which has no weight; None: no norm
    gate_curve: GateCurve = "sigmoid"
    are_gates_of_heads: bool = False  # one gate per head; otherwise one per element of each head
    query_scales: Float[Tensor, "positions"] | None = None  # multiply the queries of each position
    has_keys: bool = True  # otherwise qkv has only q, and keys and values are already in the cache
    are_norms_after: bool = False  # the norms of q and k, over each head, are after the rotation
    num_ahead: int = 0  # number of slots after its own that a token sees, up to the end of its text
    precision: str = "exact"  # of products with keys and values: exact or fast

    @property
    def starts(self) -> tuple[int, int, int]:
        """First columns of q, k and v in qkv."""
        end = self.num_heads * self.head_dim
        return self.qkv_starts or (0, end, end + self.num_kv_heads * self.head_dim)
