"""Short convolutions: C × conv(B × u) of each token, with what the cache keeps of the tokens before the step."""

import numpy as np
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activations import quantize_row
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.simd import load_upto, splat_f32, store_upto
from infer.compute.operands.limits import RECENT_PAGES


def short_conv(args, state, thread, num_threads):
    """Store each token's result, and its B × u in the cache. Neighbouring tokens go to one thread."""
    num_tokens, width, page_tokens = state.num_tokens, 4 * args.features, 1 << args.page_bits
    for token in range(num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads):
        row, position = state.rows[token], state.positions[token]
        projected, out = args.projected + 3 * width * token, args.out + width * token
        num_before = 0  # of the taps' tokens in this step
        while num_before < args.num_taps - 1 and num_before < token and state.rows[token - num_before - 1] == row:
            num_before += 1
        later = token + RECENT_PAGES * page_tokens  # which overwrites what this one would store in a page of the step
        first = token - (position & (page_tokens - 1))
        goes_on = first < 0 or state.rows[first] != row  # the page is older than the step, and shares no memory
        is_kept = goes_on or later >= num_tokens or state.rows[later] != row
        kept = _input_of(args, row, position)
        for i in range(0, args.features, LANES):
            room, at = args.features - i, 4 * i
            total = splat_f32(np.float32(0))
            if args.bias != 0:
                total = load_upto(args.bias + at, room)
            for tap in range(args.num_taps):
                back = args.num_taps - 1 - tap
                if back > position:
                    continue
                if back <= num_before:
                    source = projected - 3 * width * back + at
                    value = load_upto(source, room) * load_upto(source + 2 * width, room)
                    if back == 0 and is_kept:
                        store_upto(kept + at, room, value)
                else:
                    value = load_upto(_input_of(args, row, position - back) + at, room)
                total = simd.fma(load_upto(args.taps + width * tap + at, room), value, total)
            store_upto(out + at, room, load_upto(projected + width + at, room) * total)
        if args.quantized != 0:
            quantize_row(out, 0, np.float32(1), args, token, num_tokens, args.quantized)


@njit(forceinline=True)
def _input_of(args, row, position):
    """Return the address of a token's B × u in the cache."""
    page = args.table[row * args.table_stride + (position >> args.page_bits)]
    return args.inputs + page * args.page_bytes + 4 * args.features * (position & ((1 << args.page_bits) - 1))
