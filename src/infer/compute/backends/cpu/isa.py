"""Instruction sets as data: required CPU features, multiplication, the shapes of tiles. $INFER_ISA names another set.

A class of `arithmetic` implements a set's multiplication; no other code asks which set it is. All sets compute the same
integers, and a tile's shape changes no float, so results do not differ. Nothing here loads a compiler.
"""

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple, final

from infer.compute.backends.cpu.host import kernel_cache
from infer.compute.backends.cpu.layouts import LANES, PAIRS, PANEL, WORDS, Layout
from infer.compute.backends.cpu.weight_streams import halves_vectors, most_by_one_stream
from infer.errors import InvalidRequestError

BF16_PAIRS = "bf16 pairs"
_FILE = "target-features"
_FEATURES = re.compile(rb"[A-Za-z0-9_.+-]+( [A-Za-z0-9_.+-]+)*")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


class Shape(NamedTuple):
    """Shape of a tile: groups of 16 rows × tokens. A panel is cut into tiles in the order of `InstructionSet.shapes`.

    Attributes:
        groups: Number of groups of rows, 1 or 2.
        columns: Number of tokens.
        fewest: The tile is used while at least this many tokens are left; the results of missing tokens are ignored.
        on_matrices: True for a tile of the matrix unit.
        widest: The tile is used only in panels of at most this many tokens.
    """

    groups: int
    columns: int
    fewest: int
    on_matrices: bool = False
    widest: int = PANEL  # tokens of a panel, beyond which the tile is not used


def _tiles(groups: int, *columns: int) -> tuple[Shape, ...]:
    """Return tiles, widest first.

    A tile of more than two tokens is faster than two smaller ones even if it lacks one token.
    """
    return tuple(Shape(groups, count, count - (count > 2)) for count in columns)


def _of_two_groups(shapes: Sequence[Shape], most_by_one: int) -> Iterator[Shape]:
    """Yield the tiles for two groups of rows, in order. Tiles of at most `most_by_one` tokens take one group at a time.

    In a panel of many tokens, the widest tile takes two groups all the same.
    """
    both = {shape.columns for shape in shapes if shape.groups == 2}
    for shape in shapes:
        is_few = shape.columns <= most_by_one
        if shape.groups == 2 and is_few:
            yield shape._replace(groups=1, widest=2 * shape.columns if shape is shapes[0] else PANEL)
        if (shape.groups == 2 and (not is_few or shape is shapes[0])) or shape.columns not in both:
            yield shape


@final
@dataclass(frozen=True)
class InstructionSet:
    name: str
    needs: frozenset[str]  # LLVM's names of CPU features
    arithmetic: str  # the class of `arithmetic`
    exact: tuple[Shape, ...]  # tiles of block types × activations of 16 bits, whose sums fit the registers
    fast: tuple[Shape, ...]  # of 8 bits
    floats: tuple[Shape, ...]
    words: tuple[Shape, ...] = ()  # of weights beyond 5 or 6 bits, if their activations lie as words: `arithmetic`
    has_matrices: bool = False  # a matrix unit: `matrix_tiles`
    has_pairs: bool = False  # an instruction that adds the products of two pairs of BF16
    inputs: int = 4  # of a row that lie side by side, for an instruction that multiplies so many: 4 or 8

    def form(self, layout: Layout, planes: int) -> int:
        """Return the form of the activations for weights of this layout, as `layouts.activation_bytes` has it.

        `planes` is 2 for `exact` and 1 for `fast`.
        """
        if layout.is_float:
            return PAIRS if self.has_pairs and layout.type == "BF16" and planes == 1 else 0
        return planes + WORDS if self.words and layout.largest > _LARGEST_AS_BYTES[planes] else planes

    def shapes(self, layout: Layout, form: int, groups: int) -> list[Shape]:
        """Return the shapes of tiles for `groups` groups of rows, in the order in which they are tried.

        A shape of one group is used twice if there are two groups.
        """
        shapes = list(self._tiles_of(form))
        if groups == 1:
            return [shape for shape in shapes if shape.groups == 1]
        shapes = list(_of_two_groups(shapes, most_by_one_stream(is_float=layout.is_float)))
        if not self.may_use_matrices(layout) or layout.parts > 1:  # two scales a record cost twice the stores
            return shapes
        wide = list(_MATRICES[:form])
        return wide + [shape for shape in shapes if shape.columns < wide[-1].columns]

    def unpacks_strips(self, layout: Layout, form: int) -> bool:
        """Return True if a prompt's weights are unpacked once for many tiles (`strips`): if unpacking takes long."""
        if self.may_use_matrices(layout):
            return False
        widest, steps = self._tiles_of(form)[0], layout.unpacking_steps
        if layout.type == "F16" and halves_vectors():
            steps += 1
        return _STEP_WEIGHT * steps >= widest.columns * max(1, form % WORDS)

    def _tiles_of(self, form: int) -> tuple[Shape, ...]:
        return self.words if form > WORDS else (self.floats, self.fast, self.exact, self.floats)[form]

    def may_use_matrices(self, layout: Layout) -> bool:
        return self.has_matrices and not layout.is_float


# The largest weight, by planes. Two products of 63 fit 16 bits, but words are faster than two planes.
_LARGEST_AS_BYTES = {1: 63, 2: 31}
_MATRICES = Shape(2, 16, 13, on_matrices=True), Shape(2, 8, 5, on_matrices=True)  # from so many tokens on faster
_STEP_WEIGHT = 4  # of an instruction that unpacks, in instructions that multiply: measured, docs/dev/log.md
_FEW = _tiles(2, 4, 2, 1) + _tiles(1, 4, 1)
_MANY, _SIX = _tiles(2, 8) + _FEW, _tiles(2, 6) + _FEW
_TWO, _THREE, _FOUR = _tiles(1, 2, 1), _tiles(1, 3, 2, 1), _tiles(1, 4, 2, 1)
_FLOATS = _tiles(1, 3, 2) + _tiles(2, 1) + _tiles(1, 1)  # two groups of a token, for more chains of sums at a time
_AVX512 = frozenset({"avx512f", "avx512bw"})
_VNNI512 = _AVX512 | {"avx512vnni"}

# Best first: name, needs, arithmetic; tiles of exact, fast, floats and words.
INSTRUCTION_SETS = (
    InstructionSet("amx", _VNNI512 | {"amx-int8"}, "Vnni512", _MANY, _FEW, _SIX, has_matrices=True),
    InstructionSet("avx512bf16", _VNNI512 | {"avx512bf16"}, "Vnni512", _MANY, _FEW, _SIX, has_pairs=True),
    InstructionSet("avx512vnni", _VNNI512, "Vnni512", _MANY, _FEW, _SIX),
    InstructionSet("avx512", _AVX512, "Avx512", _FEW, _FEW, _SIX, _FEW),
    InstructionSet("avxvnni", frozenset({"avxvnni"}), "Vnni256", _TWO, _THREE, _FLOATS),
    InstructionSet("avx2", frozenset({"avx2"}), "Avx2", _TWO, _FOUR, _FLOATS, _FOUR),
    InstructionSet("i8mm", frozenset({"dotprod", "i8mm"}), "I8mm", _TWO, _FOUR, _THREE, inputs=8),
    InstructionSet("neon", frozenset({"dotprod"}), "Neon", _TWO, _FOUR, _THREE),
    InstructionSet("portable", frozenset(), "Portable", _TWO, _TWO, _TWO),
)
BY_NAME = {isa.name: isa for isa in INSTRUCTION_SETS}


@cache
def target_features() -> frozenset[str]:
    """Return the features that Numba compiles for. Only the compiler knows them: they are stored beside the kernels."""
    kept = kernel_cache.read(_FILE)
    if kept is not None and _FEATURES.fullmatch(kept):
        return frozenset(kept.decode().split())
    features: frozenset[str] = import_module("infer.compute.backends.cpu.host.host_features").target_features()
    kernel_cache.write(_FILE, " ".join(sorted(features)).encode())
    return features


def instruction_set() -> InstructionSet:
    """Return the best instruction set of this machine, or the one that $INFER_ISA names.

    Raises InvalidRequestError if $INFER_ISA names a set that does not exist or that this machine lacks.
    """
    name = os.environ.get("INFER_ISA")
    usable = usable_instruction_sets()
    for isa in usable:
        if name in (None, isa.name):
            return isa
    names = ", ".join(isa.name for isa in usable)
    raise InvalidRequestError(f"INFER_ISA={name} is not an instruction set of this machine; it has: {names}")


def usable_instruction_sets() -> list[InstructionSet]:
    """Return the instruction sets of this machine, best first."""
    usable = [isa for isa in INSTRUCTION_SETS if target_features() >= isa.needs]
    return [isa for isa in usable if not isa.has_matrices or _has_permission()]


def stored_form(kv_type: str, precision: str, head_dim: int) -> str:
    """Return the form in which attention reads keys and values: their kv type, or `BF16_PAIRS`.

    Dot products of pairs round queries and weights to bf16, so only `fast` has them, for heads of whole vectors.
    """
    is_paired = kv_type == "bf16" and precision == "fast" and head_dim % LANES == 0 and instruction_set().has_pairs
    return BF16_PAIRS if is_paired else kv_type


@cache
def _has_permission() -> bool:
    """Return True if the system lets this process and its forks use AMX's registers: Linux requires a request."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
