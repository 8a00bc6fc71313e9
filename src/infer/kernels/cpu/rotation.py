"""A head of q or k: normalised, by itself or with its neighbours, rotated and scaled."""

import numpy as np
from numba import njit

from infer.kernels.cpu.activations import inverse_rms
from infer.kernels.cpu.layouts import LANES
from infer.kernels.cpu.simd import load_f32, load_scalar_f32, splat_f32, store_f32, store_scalar_f32


@njit(inline="always")
def norm_of_all(args, which, x, heads):  # type: ignore[no-untyped-def]
    """1 / rms of all heads together, where that is how they are normalised."""
    if args.norms[which] == 0 or args.norm_strides[which] == 0:
        return np.float32(1)
    return inverse_rms(x, args.dim * heads, args.eps[which])


@njit(inline="always")
def norm_of_head(args, which, x, head, of_all):  # type: ignore[no-untyped-def]
    """The head's weight, or 0, and what its elements are multiplied with before."""
    weight, stride, factor = args.norms[which], args.norm_strides[which], of_all
    if weight != 0 and stride == 0:
        factor = inverse_rms(x, args.dim, args.eps[which])
    return weight + stride * head, factor


@njit
def rotate_head(x, weight, factor, cos, sin, half, dim, scale, out):  # type: ignore[no-untyped-def]
    """out = scale × rotate(x × factor × weight)"""
    whole = 4 * (dim // LANES * LANES)
    for i in range(0, whole, 64):
        vector = load_f32(x + i)
        if weight != 0:
            vector = vector * splat_f32(factor) * load_f32(weight + i)
        store_f32(out + i, vector)
    for i in range(whole, 4 * dim, 4):
        value = load_scalar_f32(x + i)
        if weight != 0:
            value = value * factor * load_scalar_f32(weight + i)
        store_scalar_f32(out + i, value)
    if cos != 0:
        if half % LANES == 0:
            for i in range(0, 4 * half, 64):
                first, second = load_f32(out + i), load_f32(out + 4 * half + i)
                c, s = load_f32(cos + i), load_f32(sin + i)
                store_f32(out + i, first * c - second * s)
                store_f32(out + 4 * half + i, second * c + first * s)
        else:
            for i in range(0, 4 * half, 4):
                left, right = load_scalar_f32(out + i), load_scalar_f32(out + 4 * half + i)
                cosine, sine = load_scalar_f32(cos + i), load_scalar_f32(sin + i)
                store_scalar_f32(out + i, left * cosine - right * sine)
                store_scalar_f32(out + 4 * half + i, right * cosine + left * sine)
    if scale != np.float32(1):
        for i in range(0, whole, 64):
            store_f32(out + i, load_f32(out + i) * splat_f32(scale))
        for i in range(whole, 4 * dim, 4):
            store_scalar_f32(out + i, load_scalar_f32(out + i) * scale)
