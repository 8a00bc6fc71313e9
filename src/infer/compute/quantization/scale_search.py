"""Levels, which are the numbers that a block type's codes mean before a scale multiplies them, and their scales.

The scales are least-squares scales, and minima, for groups of values that are rounded to a type's levels.

Values and weights are `[size, groups]`, so that each sum over a group adds whole vectors. The error of a group is the
sum of weight × (value − value of its code)². A search tries scales derived from the group's extremes. Then it
alternates between rounding with the scale and fitting the scale to the rounded numbers. Neither step increases the
error.

Super blocks have 256 values, with a small integer scale and for some types a minimum per group of 16 or 32. A value is
d × L × level − e × M: d and e belong to the block, and L and M are small integers of its groups. The search first fits
each group separately, and rounds the groups' scales like values. Then it alternates between d and e, by least squares
over the block, and L and M, by trying the neighbours of each L. It keeps the best result with d and e as f16.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from infer.compute.quantization.ggml_types import BLOCK_FIELDS, Field

_TABLE_REACH = 128  # tables have numbers from −127 to 113, and midpoints are multiples of ½


@final
class Levels:
    """The numbers of a type's codes: consecutive numbers, or those of a table."""

    def __init__(self, numbers: tuple[int, ...], *, are_consecutive: bool) -> None:
        self.numbers, self._are_consecutive = numbers, are_consecutive
        self.low, self.high = min(numbers), max(numbers)

    def nearest(self, values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return the nearest number to each value. May change the values."""
        if self._are_consecutive:
            return values.round_().clamp_(self.low, self.high)
        return self._table[self._index(values)]

    def codes(self, numbers: Float[Tensor, "*any"]) -> UInt8[Tensor, "*any"]:
        """Return the code of each number. The number must be one of the type's."""
        if self._are_consecutive:
            return (numbers - self.low).to(torch.uint8)
        return self._codes[self._index(numbers.clone())]

    def _index(self, values: Tensor) -> Tensor:
        return values.mul_(2).add_(2 * _TABLE_REACH).clamp_(0, 4 * _TABLE_REACH - 1).to(torch.int32)

    @cached_property
    def _table(self) -> Tensor:
        halves = torch.arange(4 * _TABLE_REACH) / 2 - _TABLE_REACH + 0.25
        known = torch.tensor(self.numbers, dtype=torch.float32)
        return known[(halves[:, None] - known).abs().argmin(1)]

    @cached_property
    def _codes(self) -> Tensor:
        known = torch.tensor(self.numbers, dtype=torch.float32)
        return (self._table[:, None] == known).to(torch.uint8).argmax(1).to(torch.uint8)


@cache
def levels_of(type: str) -> Levels:
    """Return the levels of a type that uses all its codes."""
    fields = BLOCK_FIELDS[type]
    if fields.table:
        return Levels(tuple(map(int, fields.table)), are_consecutive=False)
    num_bits = sum(part.bits for part in fields.codes if isinstance(part, Field))
    return consecutive(-fields.offset, (1 << num_bits) - 1 - fields.offset)


def consecutive(low: int, high: int) -> Levels:
    """Return the integers from `low` to `high` as levels. The code of `low` is 0."""
    return Levels(tuple(range(low, high + 1)), are_consecutive=True)


Grouped = Float[Tensor, "size groups"]
PerGroup = Float[Tensor, "groups"]


class Fit(NamedTuple):
    """The best scale of each group, with Σ weight × level² of its levels, the cost of an error of the scale."""

    scales: PerGroup
    costs: PerGroup


def fit_scales(x: Grouped, weights: Grouped | None, levels: Levels, reaches: Sequence[float], rounds: int = 2) -> Fit:
    """Return scales for values that equal scale × level.

    Args:
        x: The values.
        weights: Weight of each value's squared error, or None for equal weights.
        levels: The levels that a scale multiplies.
        reaches: Levels to which the group's largest value is scaled, one per trial. Above the last level it is clamped.
        rounds: Number of alternations after the trials.
    """
    weighted = x if weights is None else x * weights
    low, high = x.amin(0), x.amax(0)
    extremes = torch.where(high > -low, high, low)
    best = torch.zeros_like(extremes)
    best_gain, costs = torch.zeros_like(extremes), torch.zeros_like(extremes)
    for trial in range(len(reaches) + rounds):
        scales = extremes / reaches[trial] if trial < len(reaches) else best
        near = levels.nearest(x * inverse(scales))
        product = (weighted * near).sum(0)
        near.square_()
        square = (near if weights is None else near.mul_(weights)).sum(0)
        fitted = product * inverse(square)
        is_better = fitted * product > best_gain
        best_gain = torch.where(is_better, fitted * product, best_gain)
        best, costs = torch.where(is_better, fitted, best), torch.where(is_better, square, costs)
    return Fit(best, costs)


def _with_low_minima(
    scales: PerGroup, minima: PerGroup, scales_alone: PerGroup, means: PerGroup, has_steps: Tensor
) -> tuple[PerGroup, PerGroup]:
    """Return the best fits whose minima are at most 0.

    If scale and minimum together give no such fit, one number of the two does. Groups whose codes are all equal have no
    steps.
    """
    is_constant, is_alone = ~has_steps & (means < 0), ~has_steps | (minima > 0) | (scales < 0)
    scales = torch.where(is_alone, scales_alone.clamp(min=0), scales)
    return torch.where(is_constant, 0.0, scales), torch.where(is_constant, means, torch.where(is_alone, 0.0, minima))


def best_scales(x: Grouped, weights: Grouped | None, levels: Levels, tried: Float[Tensor, "trials groups"]) -> PerGroup:
    """Return the scale of each group with the least error."""
    errors = []
    for scales in tried:
        left = levels.nearest(x * inverse(scales)).mul_(scales).sub_(x).square_()
        errors.append((left if weights is None else left.mul_(weights)).sum(0))
    return tried.gather(0, torch.stack(errors).argmin(0, keepdim=True))[0]


def inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale, or 0 for a scale that is 0 or too small to have an inverse."""
    found = scales.reciprocal()
    return found.nan_to_num_(0.0, 0.0, 0.0)


class AffineFit(NamedTuple):
    """The best scale and minimum of each group, with Σ weight × code² of its codes."""

    scales: PerGroup
    minima: PerGroup
    costs: PerGroup


def fit_scales_and_minima(
    x: Grouped,
    weights: Grouped | None,
    highest: int,
    reaches: Sequence[tuple[float, float]],
    *,
    are_minima_free: bool,
    rounds: int = 2,
) -> AffineFit:
    """Return scales and minima for values that equal minimum + scale × code, with codes from 0 to `highest`.

    Args:
        x: The values.
        weights: Weight of each value's squared error, or None for equal weights.
        highest: The highest code.
        reaches: Number of steps to which the range of the group's values is scaled, one per trial, and the share of the
            steps outside the codes that is cut off at the lower end.
        are_minima_free: Minima may have both signs. Otherwise they are at most 0, and scales at least 0.
        rounds: Number of alternations after the trials.
    """
    weight_sums = x.new_full((), len(x)) if weights is None else weights.sum(0)
    low, high = x.amin(0), x.amax(0)
    if are_minima_free:
        centre = (low + high) / 2
        x, low, high = x - centre, low - centre, high - centre
    else:
        centre, low = torch.zeros_like(low), low.clamp(max=0)
    sums = (x if weights is None else x * weights).sum(0)
    best = AffineFit(torch.zeros_like(low), low, torch.zeros_like(low))
    best_gain = torch.full_like(low, -torch.inf)
    for trial in range(len(reaches) + rounds):
        scales, minima = best.scales, best.minima
        if trial < len(reaches):
            reach, share = reaches[trial]
            scales = (high - low) / reach
            minima = low + scales * ((reach - highest) * share)
        codes = (x - minima).mul_(inverse(scales)).round_().clamp_(0, highest)
        products = codes if weights is None else codes * weights
        code_sums, squares, crossed = products.sum(0), (products * codes).sum(0), (products * x).sum(0)
        spread = inverse(weight_sums * squares - code_sums * code_sums)
        scales = (weight_sums * crossed - code_sums * sums) * spread
        minima = (squares * sums - code_sums * crossed) * spread
        if not are_minima_free:
            scales, minima = _with_low_minima(
                scales, minima, crossed * inverse(squares), sums / weight_sums, spread > 0
            )
        gain = scales * crossed + minima * sums
        is_better = gain > best_gain
        best_gain = torch.where(is_better, gain, best_gain)
        pairs = zip((scales, minima, squares), best, strict=True)
        best = AffineFit(*(torch.where(is_better, found, before) for found, before in pairs))
    return best._replace(minima=best.minima + centre)


Values = Float[Tensor, "size groups blocks"]
PerBlockGroup = Float[Tensor, "groups blocks"]
PerBlock = Float[Tensor, "blocks"]


class SuperForm(NamedTuple):
    """How the blocks of a type are searched."""

    levels: Levels
    reaches: tuple[float, ...]  # for `fit_scales`, or for `fit_scales_and_minima` with the whole range from the minimum
    small: Levels  # levels of L, and of M
    small_reaches: tuple[float, ...]
    has_minima: bool = False


class Found(NamedTuple):
    """Integers of groups, the scales that multiply them, and the error of each block."""

    scales: PerBlockGroup
    minima: PerBlockGroup
    scale: PerBlock
    minimum: PerBlock
    error: PerBlock


def search(x: Values, weights: Values | None, form: SuperForm, rounds: int = 1) -> Found:
    """Return the best scales found for blocks."""
    found = _nearby(x, weights, form, _start(x, weights, form))
    for _ in range(rounds):
        found = _better(found, _nearby(x, weights, form, _fitted(x, weights, form, found)))
    return found


def _start(x: Values, weights: Values | None, form: SuperForm) -> Found:
    """Fit each group separately, and round the groups' scales."""
    size, groups, blocks = x.shape
    each, own = x.reshape(size, -1), None if weights is None else weights.reshape(size, -1)
    if not form.has_minima:
        scales, costs = fit_scales(each, own, form.levels, form.reaches, rounds=1)
        minima = torch.zeros_like(scales)
    else:
        reaches = [(reach, 0.0) for reach in form.reaches]
        scales, minima, costs = fit_scales_and_minima(
            each, own, form.levels.high, reaches, are_minima_free=False, rounds=1
        )
    scales, minima, costs = (part.reshape(groups, blocks) for part in (scales, -minima, costs))
    sums = torch.full_like(minima, size) if weights is None else weights.sum(0)
    scale = fit_scales(scales, costs, form.small, form.small_reaches).scales.half().float()
    minimum = fit_scales(minima, sums, form.small, form.small_reaches).scales.half().float()
    small = form.small.nearest(scales * inverse(scale)), form.small.nearest(minima * inverse(minimum))
    return Found(*small, scale, minimum, torch.full_like(scale, torch.inf))


def levels_for(x: Values, form: SuperForm, found: Found) -> Values:
    """Return the level of each value."""
    return form.levels.nearest((x + found.minimum * found.minima).mul_(inverse(found.scale * found.scales)))


def _nearby(x: Values, weights: Values | None, form: SuperForm, start: Found) -> Found:
    """Try each L and its neighbours, each with its best M, and return the best of each group."""
    sums = torch.full_like(start.minima, len(x)) if weights is None else weights.sum(0)
    totals = (x if weights is None else x * weights).sum(0)
    per_minimum = inverse(sums * start.minimum)
    best, best_error = start, torch.full_like(start.scales, torch.inf)
    for step in (0, -1, 1):
        tried = start._replace(scales=(start.scales + step).clamp(form.small.low, form.small.high))
        scale = tried.scale * tried.scales
        levels = levels_for(x, form, tried)
        if form.has_minima:
            level_sums = (levels if weights is None else levels * weights).sum(0)
            minima = form.small.nearest((scale * level_sums - totals) * per_minimum)
            tried = tried._replace(minima=minima)
            levels = levels_for(x, form, tried)
        left = levels.mul_(scale).sub_(x).sub_(tried.minimum * tried.minima).square_()
        error = (left if weights is None else left.mul_(weights)).sum(0)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best = best._replace(
            scales=torch.where(is_better, tried.scales, best.scales),
            minima=torch.where(is_better, tried.minima, best.minima),
        )
    return best._replace(error=best_error.sum(0))


def _fitted(x: Values, weights: Values | None, form: SuperForm, found: Found) -> Found:
    """Return the d and e that fit the integers and the levels best."""
    levels = levels_for(x, form, found)
    weighted = levels if weights is None else levels * weights
    squares = (found.scales.square() * (weighted * levels).sum(0)).sum(0)
    products = (found.scales * (weighted * x).sum(0)).sum(0)
    if not form.has_minima:
        return found._replace(scale=(products * inverse(squares)).half().float())
    sums = torch.full_like(found.minima, len(x)) if weights is None else weights.sum(0)
    totals = (x if weights is None else x * weights).sum(0)
    crossed = (found.scales * found.minima * weighted.sum(0)).sum(0)
    minimum_squares = (found.minima.square() * sums).sum(0)
    minimum_products = -(found.minima * totals).sum(0)
    # d × squares − e × crossed = products, and −d × crossed + e × minimum_squares = minimum_products
    spread = inverse(squares * minimum_squares - crossed.square())
    scale = (products * minimum_squares + minimum_products * crossed) * spread
    minimum = (minimum_products * squares + products * crossed) * spread
    is_used = (scale > 0) & (minimum > 0)
    scale, minimum = torch.where(is_used, scale, found.scale), torch.where(is_used, minimum, found.minimum)
    return found._replace(scale=scale.half().float(), minimum=minimum.half().float())


def _better(first: Found, second: Found) -> Found:
    is_better = second.error < first.error
    return Found(*(torch.where(is_better, new, old) for old, new in zip(first, second, strict=True)))
