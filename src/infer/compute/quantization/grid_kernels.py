"""Search of patterns, small scales and scales for the blocks of IQ types, compiled by Numba.

Weights x with one scale s cost Σ w (x − s m)² = Σ w x² − 2 s a + s² b with a = Σ w x m and b = Σ w m², for the numbers
m of a pattern. Neither a nor b depends on the scale. So the candidates for a vector are the patterns that cost least at
some scales near the scale of its group, and then the scales of the block are searched with these candidates.

A vector is the weights of one pattern, and a group the weights of one small scale. A variant of a pattern has its
numbers shifted up or down, or one sign that differs from the weight's own. Arrays are float32: a constant of another
type would convert them to float64, which takes twice the time.
"""

import numpy as np
from numba import njit

from infer.compute.quantization.ggml_grids import EVEN_SIGNS, FREE_SIGNS, SHIFT_OF_8, SHIFT_OF_GROUP

_FAST = {"contract", "reassoc", "nnan", "ninf", "nsz"}
_ROUNDS = 2  # rounds in which the scale of a block is fitted to the patterns


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _products(x, w, grid, kind, a, b, others):
    """Set a and b of each pattern. `others` is the smallest w x m, or Σ w m of shifted patterns."""
    a[:], b[:] = 0, 0
    others[:] = np.float32(np.inf) if kind == EVEN_SIGNS else np.float32(0)
    for i in range(grid.shape[0]):
        product = w[i] * x[i]
        for g in range(grid.shape[1]):
            a[g] += product * grid[i, g]
            b[g] += w[i] * grid[i, g] * grid[i, g]
        if kind == EVEN_SIGNS:
            for g in range(grid.shape[1]):
                others[g] = min(others[g], product * grid[i, g])
        elif kind != FREE_SIGNS:
            for g in range(grid.shape[1]):
                others[g] += w[i] * grid[i, g]


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _vary(variant, kind, is_odd, product, weight, a, b, others):
    """Change a and b of the previous variant to those of this one. `product` is Σ w x, and `weight` is Σ w."""
    if kind <= SHIFT_OF_8:  # shift up by 1, then down by 1
        up = np.float32(1 if variant == 0 else -2)
        for g in range(len(a)):
            a[g] += up * product
            b[g] += (up + up) * others[g] + (weight if variant == 0 else np.float32(0))
    elif kind == EVEN_SIGNS and is_odd:
        for g in range(len(a)):
            a[g] -= others[g] + others[g]


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _cheapest(a, b, total, scale, errors):
    """Return the pattern with the least error. The lowest bits of errors are replaced by the pattern's number."""
    keys, mask = errors.view(np.int32), np.int32(len(errors) - 1)
    for g in range(len(a)):
        errors[g] = max(total - (scale + scale) * a[g] + scale * scale * b[g], np.float32(0))
    least = np.int32(0x7FFFFFFF)
    for g in range(len(a)):
        least = min(least, (keys[g] & ~mask) | np.int32(g))
    return least & mask


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _best_candidate(a, b, scale):
    """Return the smallest s² b − 2 s a, and its index."""
    best, place = scale * (scale * b[0] - a[0] - a[0]), 0
    for k in range(1, len(a)):
        value = scale * (scale * b[k] - a[k] - a[k])
        if value < best:
            best, place = value, k
    return best, place


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _choose_one_variant(a, b, scale, chosen):
    """Choose one variant for all vectors of the group."""
    totals = np.zeros(2, np.float32)
    for i in range(len(a)):
        for variant in range(2):
            totals[variant] += _best_candidate(a[i, variant], b[i, variant], scale)[0]
    best = 0 if totals[0] <= totals[1] else 1
    for i in range(len(a)):
        chosen[i, 0], chosen[i, 1] = best, _best_candidate(a[i, best], b[i, best], scale)[1]
    return totals[best]


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _choose_in_pairs(a, b, scale, are_odd, chosen):
    """Choose which vector of two has a sign that differs, if the weights of both have odd signs."""
    total = np.float32(0)
    for i in range(0, len(a), 2):
        first, place = _best_candidate(a[i, 0], b[i, 0], scale)
        second, other_place = _best_candidate(a[i + 1, 0], b[i + 1, 0], scale)
        chosen[i, 0] = chosen[i + 1, 0] = 0
        if are_odd[i // 2]:
            first_flipped, flipped_place = _best_candidate(a[i, 1], b[i, 1], scale)
            second_flipped, other_flipped_place = _best_candidate(a[i + 1, 1], b[i + 1, 1], scale)
            if first_flipped + second <= first + second_flipped:
                first, place, chosen[i, 0] = first_flipped, flipped_place, 1
            else:
                second, other_place, chosen[i + 1, 0] = second_flipped, other_flipped_place, 1
        chosen[i, 1], chosen[i + 1, 1] = place, other_place
        total += first + second
    return total


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _choose(a, b, scale, kind, are_odd, chosen):
    """Choose the variant and the candidate of each vector of a group at a scale.

    Return Σ s² b − 2 s a, Σ a and Σ b. a and b are `[vectors, variants, candidates]`, and `chosen` `[vectors, 2]`.
    """
    total = np.float32(0)
    if kind == SHIFT_OF_GROUP:
        total = _choose_one_variant(a, b, scale, chosen)
    elif kind == EVEN_SIGNS and a.shape[1] == 2:
        total = _choose_in_pairs(a, b, scale, are_odd, chosen)
    else:
        for i in range(len(a)):
            best, chosen[i, 0] = np.float32(np.inf), 0
            for variant in range(a.shape[1]):
                value, place = _best_candidate(a[i, variant], b[i, variant], scale)
                if value < best:
                    best, chosen[i, 0], chosen[i, 1] = value, variant, place
            total += best
    sum_a, sum_b = np.float32(0), np.float32(0)
    for i in range(len(a)):
        sum_a += a[i, chosen[i, 0], chosen[i, 1]]
        sum_b += b[i, chosen[i, 0], chosen[i, 1]]
    return total, sum_a, sum_b


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _find_candidates(x, w, grid, kind, are_odd, scales, a, b, patterns):
    """Find the candidates of a group's vectors, one per scale."""
    width, size = grid.shape
    own_a, own_b = np.empty(size, np.float32), np.empty(size, np.float32)
    others, errors = np.empty(size, np.float32), np.empty(size, np.float32)
    for i in range(len(a)):
        own_x, own_w = x[i * width : (i + 1) * width], w[i * width : (i + 1) * width]
        _products(own_x, own_w, grid, kind, own_a, own_b, others)
        product, weight, total = np.float32(0), np.float32(0), np.float32(0)
        for j in range(width):
            product += own_w[j] * own_x[j]
            weight += own_w[j]
            total += own_w[j] * own_x[j] * own_x[j]
        for variant in range(a.shape[1]):
            is_odd = variant == 1 or (a.shape[1] == 1 and are_odd[i * width // 8])
            _vary(variant, kind, is_odd, product, weight, own_a, own_b, others)
            for k in range(len(scales)):
                g = _cheapest(own_a, own_b, total, scales[k], errors)
                a[i, variant, k], b[i, variant, k], patterns[i, variant, k] = own_a[g], own_b[g], g


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _best_small(a, b, unit, kind, are_odd, first, last, chosen):
    """Choose the small scale of a group with the least cost, an odd number from 2 `first` + 1 to 2 `last` + 1.

    Return it, its cost, Σ a and Σ b. A small scale multiplies `unit`.
    """
    best, small, best_a, best_b = np.float32(np.inf), 1, np.float32(0), np.float32(0)
    for half in range(first, last + 1):
        total, sum_a, sum_b = _choose(a, b, unit * np.float32(2 * half + 1), kind, are_odd, chosen)
        if total < best:
            best, small, best_a, best_b = total, 2 * half + 1, sum_a, sum_b
    return small, best, best_a, best_b


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _best_unit(a, b, kind, are_odd, most, ideal, tried, chosen):
    """Return the factor of the small scales of a block. `ideal` has the best scale of each group separately."""
    per_group = len(a) // len(ideal)
    best, least, fitted = np.float32(0), np.float32(np.inf), np.float32(0)
    for trial in range(len(tried) + _ROUNDS):
        unit = ideal.max() / np.float32(most) * tried[trial] if trial < len(tried) else fitted
        if not unit > 0:
            continue
        total, sum_a, sum_b = np.float32(0), np.float32(0), np.float32(0)
        for group in range(len(ideal)):
            own = slice(group * per_group, (group + 1) * per_group)
            near = min(max(int(ideal[group] / unit - np.float32(1)) // 2, 0), most // 2)
            odd = are_odd[group * len(are_odd) // len(ideal) :]
            small, cost, own_a, own_b = _best_small(
                a[own], b[own], unit, kind, odd, near, min(near + 1, most // 2), chosen[own]
            )
            total += cost
            sum_a += np.float32(small) * own_a
            sum_b += np.float32(small * small) * own_b
        if total < least:
            best, least, fitted = unit, total, sum_a / sum_b
    return best


@njit(nogil=True, error_model="numpy")
def _without_signs(x, kind, signless, are_odd):
    """Set the weights without their signs if patterns have none. For 8 weights each, set if they have odd signs."""
    for i in range(len(are_odd)):
        are_odd[i] = False
        for j in range(8 * i, 8 * i + 8):
            signless[j] = x[j]
            if kind >= EVEN_SIGNS and x[j] < 0:
                signless[j] = -x[j]
                are_odd[i] = not are_odd[i]


@njit(nogil=True, error_model="numpy")
def _write_codes(x, w, numbers, kind, is_flipped, sign_shift, pattern, codes):
    """Write the codes of a vector with their signs. If it is flipped, the cheapest sign differs from the weight's."""
    flipped = -1
    if is_flipped:
        least = np.float32(np.inf)
        for j in range(len(codes)):
            cost = w[j] * abs(x[j]) * numbers[j]
            if cost < least:
                least, flipped = cost, j
    for j in range(len(codes)):
        is_set = (x[j] < 0) != (j == flipped) if kind >= EVEN_SIGNS else False
        codes[j] = pattern[j] | (is_set << sign_shift)


@njit(nogil=True, error_model="numpy")
def _write_group(x, w, grid, patterns, kind, is_odd, sign_shift, found, chosen, codes):
    """Write the codes of a group. Return −1 if its small scale is negative, which mirrors the codes, otherwise 1."""
    width = grid.shape[0]
    for i in range(len(found)):
        own, variant = slice(i * width, (i + 1) * width), chosen[i, 0]
        g = found[i, variant, chosen[i, 1]]
        is_flipped = kind == EVEN_SIGNS and (variant == 1 or (found.shape[1] == 1 and is_odd[i * width // 8]))
        _write_codes(x[own], w[own], grid[:, g], kind, is_flipped, sign_shift, patterns[g], codes[own])
        for j in range(i * width, (i + 1) * width):
            if kind == SHIFT_OF_GROUP and variant == 1:
                codes[j] = 2 - codes[j]
            elif kind == SHIFT_OF_8:
                codes[j] |= variant << sign_shift
    return -1 if kind == SHIFT_OF_GROUP and chosen[0, 0] == 1 else 1


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def search_blocks(x, w, grid, patterns, kind, most, sign_shift, nearby, tried, codes, smalls, units):
    """Quantise blocks of 256 weights to patterns.

    Args:
        x: The weights, `[blocks, 256]`.
        w: Weights of the squared errors, above 0.
        grid: Numbers of the patterns, `[width, patterns]`. Their count is a power of two.
        patterns: Codes of the patterns, `[patterns, width]`, uint8.
        kind: How signs or shifts are stored.
        most: Largest small scale, an odd number.
        sign_shift: Place of the sign bit in a code.
        nearby: Scales at which to find candidates: multiples of the group's root mean square divided by the grid's.
        tried: Scales of the block: multiples of the scale at which the largest group has the largest small scale.
        codes: Filled with codes, `[blocks, 256]`, uint8.
        smalls: Filled with small scales, `[blocks, groups]`, int8.
        units: Filled with the factors of the small scales, `[blocks]`.
    """
    width, num_groups = grid.shape[0], smalls.shape[1]
    num_vectors, size = 256 // width, 256 // num_groups
    per_group, has_one = num_vectors // num_groups, kind == FREE_SIGNS or (kind == EVEN_SIGNS and width == 8)
    a = np.empty((num_vectors, 1 if has_one else 2, len(nearby)), np.float32)
    b, found = np.empty_like(a), np.empty(a.shape, np.int32)
    chosen, ideal = np.zeros((num_vectors, 2), np.int32), np.zeros(num_groups, np.float32)
    signless, are_odd = np.empty(256, np.float32), np.zeros(32, np.bool_)
    grid_rms = np.float32(np.sqrt((grid * grid).mean()))
    for block in range(len(x)):
        _without_signs(x[block], kind, signless, are_odd)
        for group in range(num_groups):
            own, vectors = slice(group * size, (group + 1) * size), slice(group * per_group, (group + 1) * per_group)
            own_x, own_w, odd = signless[own], w[block, own], are_odd[group * size // 8 :]
            scales = np.sqrt((own_w * own_x * own_x).sum() / own_w.sum()) / grid_rms * nearby
            _find_candidates(own_x, own_w, grid, kind, odd, scales, a[vectors], b[vectors], found[vectors])
            best, ideal[group] = np.float32(0), 0
            for k in range(len(scales)):
                _, sum_a, sum_b = _choose(a[vectors], b[vectors], scales[k], kind, odd, chosen[vectors])
                if sum_a > 0 and sum_a * sum_a / sum_b > best:
                    best, ideal[group] = sum_a * sum_a / sum_b, sum_a / sum_b
        units[block] = _best_unit(a, b, kind, are_odd, most, ideal, tried, chosen)
        for group in range(num_groups):
            own, vectors = slice(group * size, (group + 1) * size), slice(group * per_group, (group + 1) * per_group)
            odd, own_a, own_b = are_odd[group * size // 8 :], a[vectors], b[vectors]
            small = _best_small(own_a, own_b, units[block], kind, odd, 0, most // 2, chosen[vectors])[0]
            _choose(own_a, own_b, units[block] * np.float32(small), kind, odd, chosen[vectors])
            smalls[block, group] = small * _write_group(
                x[block, own], w[block, own], grid, patterns, kind, odd, sign_shift, found[vectors], chosen[vectors],
                codes[block, own],
            )  # fmt: skip
