"""Blocks of 256 values with a small integer scale, and for some types a minimum, per group of 16 or 32.

A value is d × L × level − e × M: d and e belong to the block, and L and M are small integers of its groups. The search
first fits each group separately, and rounds the groups' scales like values. Then it alternates between d and e, by
least squares over the block, and L and M, by trying the neighbours of each L. It keeps the best result with d and e as
f16.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.quantization.scale_search import Levels, fit_scales, fit_scales_and_minima, inverse

Values = Float[Tensor, "size groups blocks"]
PerGroup = Float[Tensor, "groups blocks"]
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

    scales: PerGroup
    minima: PerGroup
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
