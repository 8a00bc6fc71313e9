"""Weights → blocks of any type, with the least squared error that a search finds.

The trials of each type's search were chosen so that its error is below that of ggml's own quantiser, for values of
normal and of heavier-tailed distributions, with and without an importance matrix. Q8_0 has ggml's bits instead.

IQ types have codes that are patterns of a grid, which `grid_kernels` searches. Every pattern is tried at 16 scales, so
the error is below that of ggml's quantisers, which only search patterns near the rounded weights.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.quantization.ggml_blocks import Numbers, blocks_of, numbers_of
from infer.compute.quantization.ggml_grids import EVEN_SIGNS, FREE_SIGNS, SHIFT_OF_8, SHIFT_OF_GROUP, UE4M3_HALVES, grid
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES, Bits, Field, Grid
from infer.compute.quantization.scale_search import (
    Levels,
    SuperForm,
    best_scales,
    consecutive,
    fit_scales,
    fit_scales_and_minima,
    inverse,
    levels_for,
    levels_of,
    search,
)
from infer.errors import InvalidRequestError, ModelError, UnsupportedModelError

GRID_TYPES = tuple(name for name, fields in BLOCK_FIELDS.items() if isinstance(fields.codes, Grid))
NEEDS_IMPORTANCE = tuple(name for name in GRID_TYPES if name.startswith(("IQ1", "IQ2")))
_NEARBY = np.geomspace(0.5, 1.7, 16).astype(np.float32)
_TRIED = np.geomspace(0.8, 1.25, 14).astype(np.float32)


class _GridForm(NamedTuple):
    """Constants of a type that the search needs."""

    numbers: NDArray[np.float32]  # [width, patterns]
    patterns: NDArray[np.uint8]  # codes [patterns, width]
    kind: int
    most: int
    sign_shift: int
    num_groups: int


def search_grid(blocks: Float[Tensor, "blocks 256"], weights: Float[Tensor, "blocks 256"] | None, type: str) -> Numbers:
    """Return the numbers of blocks of a grid type. Threads may call it at the same time.

    Args:
        blocks: The weights of the model.
        weights: Weights of their squared errors, above 0, or None for equal ones.
        type: A name of `GRID_TYPES`.

    Raises:
        InvalidRequestError: The type is of `NEEDS_IMPORTANCE`, and there are no weights.
    """
    if weights is None and type in NEEDS_IMPORTANCE:
        raise InvalidRequestError(f"{type} needs an importance matrix for every tensor: make one with infer imatrix")
    form, x = _form_of(type), np.ascontiguousarray(blocks.numpy(), np.float32)
    own = np.ones_like(x) if weights is None else np.ascontiguousarray(weights.numpy(), np.float32)
    codes = np.empty(x.shape, np.uint8)
    small = np.empty((len(x), form.num_groups), np.int8)
    units = np.empty(len(x), np.float32)
    kernels = import_module("infer.compute.quantization.grid_kernels")  # loads Numba, which only these types need
    kernels.search_blocks(
        x, own, form.numbers, form.patterns, form.kind, form.most, form.sign_shift, _NEARBY, _TRIED, codes, small, units
    )
    scales = torch.from_numpy(units / np.float32(BLOCK_FIELDS[type].factor)).half()
    return Numbers(torch.from_numpy(codes), torch.from_numpy(small), None, scales[:, None])


@cache
def _form_of(type: str) -> _GridForm:
    fields = BLOCK_FIELDS[type]
    form, scales = fields.codes, fields.scales
    assert isinstance(form, Grid)
    places = np.arange(0, 16, form.code_bits)
    patterns = (grid(form.name)[:, None].astype(np.int32) >> places & ((1 << form.code_bits) - 1)).astype(np.uint8)
    numbers = np.array(fields.table, np.float32)[patterns]
    if form.signs.bits == 1:
        kind, numbers = SHIFT_OF_GROUP if form.is_mirrored else SHIFT_OF_8, numbers - 1  # the shift adds it again
    else:
        kind = EVEN_SIGNS if form.signs.bits == 7 else FREE_SIGNS
    first = scales if isinstance(scales, Bits) else scales[0]
    assert isinstance(first, Bits | Field)
    empty = torch.zeros(1, BLOCK_TYPES[type].block_bytes, dtype=torch.uint8)
    num_groups = numbers_of(empty, type).scales.shape[1]
    most = (2 << first.bits) - 1
    return _GridForm(np.ascontiguousarray(numbers.T), patterns, kind, most, form.sign_shift, num_groups)


BlockValues = Float[Tensor, "blocks size"]
_VALUES_AT_ONCE = 1 << 16  # so few that temporaries fit a core's cache
_LEAST_WEIGHT = 1e-6  # smallest weight, relative to the mean, so that a group without importance keeps a scale
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def quantise(
    values: Float[Tensor, "rows columns"],
    type: str,
    importance: Float[Tensor, "columns"] | None = None,
) -> UInt8[Tensor, "rows bytes"]:
    """Return rows of values in a block type or a float type.

    Args:
        values: Rows whose length is a multiple of the type's block size.
        type: A name of `QUANTISED_TYPES`.
        importance: Weight of the squared error of each column, at least 0; None for equal weights.

    Raises:
        ModelError: A value is not finite, or a scale is too large for its 16 bits.
        UnsupportedModelError: The type is not in `QUANTISED_TYPES`.
    """
    if type not in QUANTISED_TYPES:
        raise UnsupportedModelError(f"{type} is not a type for quantisation: use one of {', '.join(QUANTISED_TYPES)}")
    if type in _DTYPES:
        stored = values.to(_DTYPES[type]).contiguous()
        _check_finite(stored)
        return stored.view(torch.uint8)
    kind, pack = BLOCK_TYPES[type], _PACK[type]
    blocks = values.reshape(-1, kind.block_size)
    weights = None if importance is None else _weights_of(importance.to(values.device), kind.block_size)
    packed = torch.empty(len(blocks), kind.block_bytes, dtype=torch.uint8, device=values.device)
    at_once = _VALUES_AT_ONCE // kind.block_size

    for start in range(0, len(blocks), at_once):
        few, own = blocks[start : start + at_once].float(), None
        _check_finite(few)
        if weights is not None:
            own = weights[torch.arange(start, start + len(few), device=few.device) % len(weights)]
        numbers = pack(few, own)
        _check_finite(numbers.scales if numbers.supers is None else numbers.supers)
        packed[start : start + len(few)] = blocks_of(numbers, type)
    return packed.reshape(len(values), kind.row_bytes(values.shape[1]))


def _check_finite(numbers: Tensor) -> None:
    if not numbers.isfinite().all():
        raise ModelError("a value is not finite, or too large for the type: use another type, or repair the weights")


def _weights_of(importance: Float[Tensor, "columns"], size: int) -> Float[Tensor, "blocks size"] | None:
    """Return weights whose mean is 1, or None if no column has importance."""
    mean = importance.double().mean()
    if mean == 0:
        return None
    return (importance / mean).clamp(min=_LEAST_WEIGHT).float().reshape(-1, size)


Pack = Callable[[BlockValues, BlockValues | None], Numbers]


def _pack_q8_0(blocks: BlockValues, weights: BlockValues | None) -> Numbers:
    """Scale the largest value to 127, and round ties away from zero, as ggml does."""
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * inverse(scale)
    whole = scaled.abs().floor()
    rounded = whole + (2 * (scaled.abs() - whole)).floor()
    return Numbers(rounded.copysign(scaled).to(torch.int8), scale.half())


def _scaled(levels: Levels, reaches: tuple[float, ...]) -> Pack:
    """Return the packing of a type with one f16 per block, which multiplies levels."""

    def pack(blocks: BlockValues, weights: BlockValues | None) -> Numbers:
        x, own = _columns(blocks), None if weights is None else _columns(weights)
        scales = fit_scales(x, own, levels, reaches).scales.half()
        return Numbers(levels.codes(levels.nearest(x * inverse(scales.float()))).T, scales[:, None])

    return pack


def _with_minimum(highest: int, reaches: tuple[tuple[float, float], ...]) -> Pack:
    """Return the packing of a type with an f16 scale and an f16 minimum per block."""

    def pack(blocks: BlockValues, weights: BlockValues | None) -> Numbers:
        x, own = _columns(blocks), None if weights is None else _columns(weights)
        fit = fit_scales_and_minima(x, own, highest, reaches, are_minima_free=True)
        scales, minima = fit.scales.half(), fit.minima.half()
        codes = (x - minima.float()).mul_(inverse(scales.float())).round_().clamp_(0, highest)
        return Numbers(codes.T.to(torch.uint8), scales[:, None], minima[:, None])

    return pack


def _with_powers_of_two(levels: Levels, reaches: tuple[float, ...]) -> Pack:
    """Return the packing of MXFP4, whose scale is a power of two."""

    def pack(blocks: BlockValues, weights: BlockValues | None) -> Numbers:
        x, own = _columns(blocks), None if weights is None else _columns(weights)
        near = fit_scales(x, own, levels, reaches).scales.abs().clamp(min=2.0**-126).log2().floor()
        tried = torch.stack([(near + step).clamp(-128, 126).exp2() for step in (-1, 0, 1)])
        scales = best_scales(x, own, levels, tried)
        return Numbers(levels.codes(levels.nearest(x * inverse(scales))).T, scales.to(torch.bfloat16)[:, None])

    return pack


def _with_small_floats(levels: Levels, reaches: tuple[float, ...], size: int) -> Pack:
    """Return the packing of NVFP4, in which each `size` values have a scale in unsigned E4M3."""
    known = torch.from_numpy(UE4M3_HALVES[:127].view("f2")).float()

    def pack(blocks: BlockValues, weights: BlockValues | None) -> Numbers:
        x = _columns(blocks.reshape(-1, size))
        own = None if weights is None else _columns(weights.reshape(-1, size))
        above = torch.searchsorted(known, fit_scales(x, own, levels, reaches).scales.abs()).clamp(1, len(known) - 1)
        scales = best_scales(x, own, levels, torch.stack((known[above - 1], known[above])))
        codes = levels.codes(levels.nearest(x * inverse(scales))).T.reshape(blocks.shape)
        return Numbers(codes, scales.half().reshape(len(blocks), -1))

    return pack


def _with_small_scales(form: SuperForm, size: int, rounds: int) -> Pack:
    """Return the packing of a type of 256 values with a small scale for each `size` values."""

    def grouped(blocks: BlockValues) -> Tensor:
        return blocks.reshape(len(blocks), -1, size).permute(2, 1, 0).contiguous()

    def pack(blocks: BlockValues, weights: BlockValues | None) -> Numbers:
        x, own = grouped(blocks), None if weights is None else grouped(weights)
        found = search(x, own, form, rounds)
        codes = form.levels.codes(levels_for(x, form, found)).permute(2, 1, 0).flatten(1)
        scales, minima = found.scales.T.to(torch.int8), found.minima.T.to(torch.int8)
        if not form.has_minima:
            return Numbers(codes, scales, None, found.scale.half()[:, None])
        return Numbers(codes, scales, minima, torch.stack((found.scale, found.minimum), dim=1).half())

    return pack


def _columns(blocks: BlockValues) -> Tensor:
    return blocks.T.contiguous()


# The reaches of each search, in the order in which each lowers the error most.
_FP4 = (12.25, 8.0, 13.75, 11.0, 9.0)
_IQ4 = (-130.0, 117.5, -115.0, -145.0, -122.5, 110.0, 132.5, -105.0)
_TERNARY = (3.5, 2.75, 4.75, 2.5)
_Q4_1 = ((15.3, 0.5), (15.8, 1.0), (15.55, 0.0), (14.05, 0.0), (13.55, 0.5), (15.3, 1.0), (15.8, 0.0), (14.55, 1.0))
_Q5_1 = (
    *((31.1, 0.5), (30.1, 0.0), (29.1, 0.5), (31.6, 0.0), (31.6, 1.0)),
    *((28.1, 1.0), (27.1, 0.5), (30.3, 1.0), (30.6, 0.0), (26.1, 0.0)),
)
_SIX_BITS, _SIGNED_SIX_BITS = consecutive(0, 63), consecutive(-32, 31)

_PACK: dict[str, Pack] = {
    "Q4_0": _scaled(levels_of("Q4_0"), (-8.2, -9.2, -7.2, -7.8, -8.6, -9.6)),
    "Q4_1": _with_minimum(15, _Q4_1),
    "Q5_0": _scaled(levels_of("Q5_0"), (-16.25, -15.0, -14.0, -17.25, -15.75, -18.5, 13.5)),
    "Q5_1": _with_minimum(31, _Q5_1),
    "Q8_0": _pack_q8_0,
    "IQ4_NL": _scaled(levels_of("IQ4_NL"), _IQ4),
    "MXFP4": _with_powers_of_two(levels_of("MXFP4"), _FP4),
    "NVFP4": _with_small_floats(levels_of("NVFP4"), _FP4, 16),
    "Q1_0": _scaled(levels_of("Q1_0"), (1.0,)),
    "Q2_0": _scaled(levels_of("Q2_0"), (2.75, -3.0, 3.9, 2.1, -2.25, 1.0)),
    "TQ1_0": _scaled(consecutive(-1, 1), _TERNARY),
    "TQ2_0": _scaled(consecutive(-1, 1), _TERNARY),  # its fourth code is not used by the format
    "Q2_K": _with_small_scales(
        SuperForm(consecutive(0, 3), (3.2, 2.55, 3.9, 2.2, 2.9), consecutive(0, 15), (15.0, 14.5, 15.5, 16.0), True),
        size=16,
        rounds=2,
    ),
    "Q3_K": _with_small_scales(
        SuperForm(levels_of("Q3_K"), (-4.2, -3.3, -5.0, 4.4, -3.8), _SIGNED_SIX_BITS, (-32.0, 31.0)), size=16, rounds=1
    ),
    "Q4_K": _with_small_scales(
        SuperForm(consecutive(0, 15), (15.05, 14.3, 15.55, 14.55, 13.55, 12.8, 15.8), _SIX_BITS, (63.0,), True),
        size=32,
        rounds=2,
    ),
    "Q5_K": _with_small_scales(
        SuperForm(consecutive(0, 31), (31.1, 30.1, 29.1, 31.8, 30.6, 28.1, 27.1), _SIX_BITS, (63.0,), True),
        size=32,
        rounds=2,
    ),
    "Q6_K": _with_small_scales(
        SuperForm(levels_of("Q6_K"), (-32.0, -31.0, -30.0, 29.0, -32.75), consecutive(-128, 127), (-128.0,)),
        size=16,
        rounds=1,
    ),
    **{name: partial(search_grid, type=name) for name in GRID_TYPES},
    "IQ4_XS": _with_small_scales(SuperForm(levels_of("IQ4_XS"), _IQ4, _SIGNED_SIX_BITS, (-32.0,)), size=32, rounds=1),
}
QUANTISED_TYPES = (*_DTYPES, *_PACK)
