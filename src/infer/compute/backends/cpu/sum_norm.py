"""Norms of rows that are stored as floats: LayerNorm, norms of a sum, and what a text's tokens add to their embeddings.

`activations.normalize` is for RMSNorm before a product. Rows are divided among the threads.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.simd import load_f32, load_scalar_f32, load_upto, splat_f32, store_upto, sum_f32


@njit
def _add(target, source, features):
    for i in range(0, features, LANES):
        room = features - i
        store_upto(target + 4 * i, room, load_upto(target + 4 * i, room) + load_upto(source + 4 * i, room))


@njit
def _mean(x, features):
    sums, whole = splat_f32(np.float32(0)), features // LANES * LANES
    for i in range(0, whole, LANES):
        sums = sums + load_f32(x + 4 * i)
    total = sum_f32(sums)
    for i in range(whole, features):
        total += load_scalar_f32(x + 4 * i)
    return total / np.float32(features)


@njit
def _mean_square(x, features, mean):
    """Return the mean of (x − mean)²."""
    squares, shift, whole = splat_f32(np.float32(0)), splat_f32(mean), features // LANES * LANES
    for i in range(0, whole, LANES):
        apart = load_f32(x + 4 * i) - shift
        squares = simd.fma(apart, apart, squares)
    total = sum_f32(squares)
    for i in range(whole, features):
        total += (load_scalar_f32(x + 4 * i) - mean) * (load_scalar_f32(x + 4 * i) - mean)
    return total / np.float32(features)


def sum_norm(args, state, thread, num_threads):
    """Store norm(x + y + type + position). What is not given is not added, and without a weight there is no norm."""
    features = args.features
    for token in range(thread, state.num_tokens, num_threads):
        x, out = args.x + 4 * features * token, args.out + 4 * features * token
        if x != out:
            for i in range(0, features, LANES):
                store_upto(out + 4 * i, features - i, load_upto(x + 4 * i, features - i))
        if args.y != 0:
            _add(out, args.y + 4 * features * token, features)
        if args.types != 0:
            is_second = state.positions[token] >= args.second_starts[state.rows[token]]
            _add(out, args.types + 4 * features * (min(1, args.last_type) if is_second else 0), features)
        if args.embedded_positions != 0:
            _add(out, args.embedded_positions + 4 * features * state.positions[token], features)
        if args.weight == 0:
            continue
        mean = _mean(out, features) if args.is_centred != 0 else np.float32(0)
        factor = np.float32(1) / np.sqrt(_mean_square(out, features, mean) + args.eps)
        for i in range(0, features, LANES):
            at, room = out + 4 * i, features - i
            value = (load_upto(at, room) - splat_f32(mean)) * splat_f32(factor) * load_upto(args.weight + 4 * i, room)
            if args.bias != 0:
                value = value + load_upto(args.bias + 4 * i, room)
            store_upto(at, room, value)
