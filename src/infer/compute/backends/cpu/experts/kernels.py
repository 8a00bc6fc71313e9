"""Experts: each token chooses some, the tokens of each expert come together, and each expert multiplies its own.

    route      a token's scores, its experts in ascending order, and their weights
    group      counts and first slots of all experts, and the token and the weight of each slot
    inputs     the activations of each slot, expert after expert, in the form of a projection's
    wide       gate and up: a unit is some rows of one expert, with all tokens of that expert
    narrow     down: a unit is some rows of the result. It goes over the experts in ascending order and adds in place

A slot is a token of an expert. So each result depends on nothing but its token: a row of products does not depend on
the rows beside it, and a token's experts are added in the same order in every batch. An expert without tokens is read
by nobody.

Frames are memory for some of a model's experts, which are read from a file when a step needs them.

    choose   which of a layer's experts a step needs, and which of these are to be read into which frames
    fetch    the reads, in parts, each with a checksum
    check    the checksums of an expert that is about to be written

An expert keeps its frame until another needs it: then the expert goes whose uses, halved again and again as time
passes, are the fewest, and of several the one that was used the longest ago. This never changes a result: products
read the same bytes, in the same order of experts, wherever they are. A part that cannot be read, or whose bytes have
changed, is a failure of the run: its results must not be used. The expert's frame counts as unread, so the next run
that needs it reads it again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activations import inverse_rms, quantize_row
from infer.compute.backends.cpu.experts.pool_plan import MOST_HALVINGS
from infer.compute.backends.cpu.isa import BY_NAME
from infer.compute.backends.cpu.layouts import LANES, LAYOUTS, activation_bytes
from infer.compute.backends.cpu.math_functions import exp, exp_scalar, sigmoid
from infer.compute.backends.cpu.matmul.matmul import fewest_on_matrices, make_unit, stack_sizes
from infer.compute.backends.cpu.matmul.matrix_tiles import make_configure, release
from infer.compute.backends.cpu.simd import (
    load_i64,
    load_scalar_f32,
    load_upto,
    splat_f32,
    store_scalar_f32,
    store_upto,
)
from infer.compute.backends.cpu.threads import atomics
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_units
from infer.compute.backends.cpu.weights.embed import read_all


@njit(forceinline=True)
def _largest(row, count):
    """Return the largest of `count` f32 at `row`; NaN if one is NaN."""
    largest = load_scalar_f32(row)
    for index in range(1, count):
        value = load_scalar_f32(row + 4 * index)
        if not value <= largest:
            largest = value
    return largest


@njit(forceinline=True)
def _softmax(row, count):
    """Replace `count` f32 logits by their softmax, in place. The sum is made in the order of the experts."""
    lowered, total = splat_f32(_largest(row, count)), np.float32(0)
    for first in range(0, count, LANES):
        at, room = row + 4 * first, count - first
        store_upto(at, room, exp(load_upto(at, room) - lowered))
    for index in range(count):
        total += load_scalar_f32(row + 4 * index)
    for index in range(count):
        store_scalar_f32(row + 4 * index, load_scalar_f32(row + 4 * index) / total)


@njit(forceinline=True)
def _choose(args, keys):
    """Mark the experts with the highest keys by a key of NaN; among equal ones, those with the lower numbers.

    `keys` is f32 [num_experts], which is changed in place. An expert whose key is NaN already counts as marked.
    """
    for _ in range(args.num_chosen):
        best, highest = -1, np.float32(0)
        for expert in range(args.num_experts):
            key = load_scalar_f32(keys + 4 * expert)
            if key > highest or (best < 0 and key == key):
                best, highest = expert, key
        if best >= 0:
            store_scalar_f32(keys + 4 * best, np.float32(np.nan))


@njit(forceinline=True)
def _weigh(args, first, softmax):
    """Turn the chosen experts' scores into weights, in place.

    They are the `num_chosen` floats of `chosen_weights` from `first` on. With `softmax` they become their softmax.
    Otherwise they are divided by their sum plus `floor` if `is_normalized`. Then `scale` and `expert_scales` multiply.
    """
    total, largest = np.float32(0), args.chosen_weights[first]
    for place in range(1, args.num_chosen):
        largest = max(largest, args.chosen_weights[first + place])
    for place in range(args.num_chosen):
        weight = args.chosen_weights[first + place]
        if softmax:
            weight = exp_scalar(weight - largest)
            args.chosen_weights[first + place] = weight
        total += weight
    divisor = total if softmax else total + args.floor
    for place in range(args.num_chosen):
        weight = args.chosen_weights[first + place]
        if softmax or args.is_normalized != 0:
            weight = weight / divisor
        weight = weight * args.scale
        if args.expert_scales != 0:
            weight = weight * load_scalar_f32(args.expert_scales + 4 * args.chosen[first + place])
        args.chosen_weights[first + place] = weight


def make_route(scores: str) -> Callable[..., None]:
    """Return the command that chooses experts by the scores that `Router` names. Tokens are divided among threads.

    It reads `scores`, f32 [tokens, num_experts] of logits, and may replace them by probabilities. It writes `keys` of
    the same shape, `chosen`, i64 [tokens, num_chosen] in ascending order, and `chosen_weights`, f32 of that shape.
    """
    is_softmax, is_sigmoid, is_of_chosen = (scores == name for name in ("softmax", "sigmoid", "softmax_of_chosen"))
    is_sigmoid_of_chosen = scores == "sigmoid_of_chosen"

    def route(args, state, thread, num_threads):
        count = args.num_experts
        for token in range(thread, state.num_tokens, num_threads):
            row, keys = args.scores + 4 * count * token, args.keys + 4 * count * token
            if is_softmax:
                _softmax(row, count)
            for first in range(0, count, LANES):
                at, room = row + 4 * first, count - first
                score = load_upto(at, room)
                if is_sigmoid:
                    score = sigmoid(score)
                    store_upto(at, room, score)
                if is_sigmoid_of_chosen:
                    store_upto(at, room, sigmoid(score))
                if args.correction != 0:
                    score = score + load_upto(args.correction + 4 * first, room)
                store_upto(keys + 4 * first, room, score)
            _choose(args, keys)
            place, first = 0, token * args.num_chosen
            for expert in range(count):
                key = load_scalar_f32(keys + 4 * expert)
                if key != key and place < args.num_chosen:
                    args.chosen[first + place] = expert
                    args.chosen_weights[first + place] = load_scalar_f32(row + 4 * expert)
                    place += 1
            _weigh(args, first, is_of_chosen)

    return route


def group(args, state, thread, num_threads):
    """Bring the tokens of each expert together. One thread is enough: it takes microseconds.

    Reads `chosen` and `chosen_weights`. Writes `counts` and `starts`, i64 [num_experts], the experts with tokens in
    `active` and their number in `num_active`, and `tokens` and `weights` of each slot, [tokens × num_chosen].
    """
    if thread != 0:
        return
    for expert in range(args.num_experts):
        args.counts[expert] = 0
    num_slots = state.num_tokens * args.num_chosen
    for place in range(num_slots):
        args.counts[args.chosen[place]] += 1
    first, num_active = 0, 0
    for expert in range(args.num_experts):
        args.starts[expert] = first
        if args.counts[expert] != 0:
            args.active[num_active] = expert
            num_active += 1
        first += args.counts[expert]
        args.counts[expert] = 0
    args.num_active[0] = num_active
    for place in range(num_slots):
        expert = args.chosen[place]
        slot = args.starts[expert] + args.counts[expert]
        args.counts[expert] += 1
        args.tokens[slot] = place // args.num_chosen
        args.weights[slot] = args.chosen_weights[place]


def inputs(args, state, thread, num_threads):
    """Store the activations of the slots: x × weight / rms(x), quantised. Slots are divided among threads.

    Reads `x`, f32 [rows, features], and the tables of `group`. Row `tokens[slot]` of x belongs to a slot, or row `slot`
    if there is no `tokens`. Writes `token_bytes` per slot at `out`: the records of each expert are those of a step that
    has its tokens only. If the experts' inputs are weighted, a slot's are multiplied by its weight.
    """
    if args.num_active[0] == 0:
        return
    last = args.active[args.num_active[0] - 1]
    num_slots = args.starts[last] + args.counts[last]
    begin, stop = num_slots * thread // num_threads, num_slots * (thread + 1) // num_threads
    for index in range(args.num_active[0]):
        expert = args.active[index]
        start, count = args.starts[expert], args.counts[expert]
        out = args.out + start * args.token_bytes
        for slot in range(max(begin, start), min(stop, start + count)):
            source = slot
            if simd.address_of(args.tokens) != 0:
                source = args.tokens[slot]
            x, factor = args.x + 4 * args.features * source, np.float32(1)
            if args.weight != 0:
                factor = inverse_rms(x, args.features, args.eps)
                if simd.address_of(args.weights) != 0:
                    factor *= args.weights[slot]
            quantize_row(x, args.weight, factor, args, slot - start, count, out)


def _make_expert(type_: str, planes: int, isa: str) -> Any:
    """Return the function that multiplies a unit of an expert with all tokens of that expert.

    Its arguments are (args, state, thread, unit, expert, buffers, scratch). It reads the expert's rows of the weights,
    `expert_bytes` apart, and the activations of its slots. The epilogue writes the products, in the rows of the slots.
    `buffers` and `scratch` are on the stack, aligned to 64 bytes.
    """
    layout, instructions = LAYOUTS[type_], BY_NAME[isa]
    form, has_matrices = instructions.form(layout, planes), instructions.may_use_matrices(layout)
    multiply_unit, configure = make_unit(layout, form, instructions), make_configure(layout)
    record_bytes, fewest = activation_bytes(form), fewest_on_matrices(layout, form, instructions)

    @njit(inline="always")
    def multiply(args, state, thread, unit, expert, buffers, scratch):
        start, count = args.starts[expert], args.counts[expert]
        activations = args.activations + start * args.num_records * record_bytes
        unpacked = args.unpacked + thread * args.unpacked_bytes
        frame = expert
        if simd.address_of(args.frames) != 0:
            frame = args.frames[expert]
        if has_matrices:
            configure(count >= fewest, scratch)
        multiply_unit(
            args, state, unit, 0, count, count, activations, unpacked, buffers, scratch,
            frame * args.expert_bytes, start, expert * args.expert_rows,
        )  # fmt: skip
        if has_matrices:
            release(count >= fewest)

    return multiply


def make_multiply(type_: str, planes: int, isa: str, order: str) -> Callable[..., None]:
    """Return the command of one of the experts' projections.

    wide (gate and up): a unit is some rows of one expert. narrow (down): a unit is some rows of the result, and goes
    over the experts. Threads take units. Two threads never write the same row of the result, so the order of additions
    to a token is that of the experts.
    """
    multiply, is_narrow = _make_expert(type_, planes, isa), order == "narrow"
    layout, instructions = LAYOUTS[type_], BY_NAME[isa]
    buffer_size, scratch_size = stack_sizes(layout, instructions.form(layout, planes), instructions)

    def multiply_experts(args, state, thread, num_threads):
        per_expert = (args.num_groups + args.groups_per_unit - 1) // args.groups_per_unit
        num_units = per_expert if is_narrow else per_expert * args.num_active[0]
        buffers, scratch = simd.stack(buffer_size), simd.stack(scratch_size)
        begin_units(state, thread)
        unit, end = take_units(state, thread, num_threads, num_units)
        while unit < end:
            first = 0 if is_narrow else unit // per_expert
            last = args.num_active[0] if is_narrow else first + 1
            for index in range(first, last):
                multiply(args, state, thread, unit % per_expert, args.active[index], buffers, scratch)
            unit += 1
            if unit == end:
                unit, end = take_units(state, thread, num_threads, num_units)

    return multiply_experts


_PRIME = 0x2545F4914F6CDD1D  # odd, so that no product of two different words is equal
_USE = 1 << 20  # of `uses`


@njit(forceinline=True)
def _mixed(sum_, word):
    x = sum_ ^ word
    return ((x << 29) | ((x >> 35) & 0x1FFFFFFF)) * _PRIME


@njit
def checksum(at, count, number):
    """Return a sum of `count` bytes, a multiple of 32, which depends on their order and on a number."""
    first, second, third, fourth = number, number + 1, number + 2, count
    for offset in range(0, count, 32):
        first = _mixed(first, load_i64(at + offset))
        second = _mixed(second, load_i64(at + offset + 8))
        third = _mixed(third, load_i64(at + offset + 16))
        fourth = _mixed(fourth, load_i64(at + offset + 24))
    return _mixed(_mixed(_mixed(_mixed(first, second), third), fourth), count)


@njit
def _uses(pool, expert):
    """Return how often an expert was used, halved for the time since its last use."""
    return pool.uses[expert] >> min((pool.time - pool.last_used[expert]) >> pool.half_life, MOST_HALVINGS)


@njit
def _frame_to_take(pool):
    """Return a frame that the next commands do not need, and take it from its expert. They need at most all frames."""
    if pool.num_used < pool.num_frames:
        pool.num_used += 1
        return pool.num_used - 1
    chosen, fewest, longest = -1, 0, 0
    for frame in range(pool.num_frames):
        if pool.needed[frame] == pool.time:
            continue
        expert = pool.owners[frame]
        uses, last = _uses(pool, expert), pool.last_used[expert]
        if chosen < 0 or uses < fewest or (uses == fewest and last < longest):
            chosen, fewest, longest = frame, uses, last
    pool.frames[pool.owners[chosen]] = -1
    return chosen


def choose(args, state, thread, num_threads):
    """Assign a frame to each expert that the next commands need, and list those that must be read. Thread 0 does it.

    Reads `active` and `num_active` of `group`. The next commands need at most `most` of the active experts, from
    `first` on. Writes `num_needed`, `missing`, i64 [most], `num_missing`, and the tables of the pool.
    """
    if thread != 0:
        return
    pool = args.pool
    pool.time += 1
    count = max(0, min(args.num_active[0] - args.first, args.most))
    args.num_needed[0] = count
    for index in range(args.first, args.first + count):
        expert = args.first_expert + args.active[index]
        pool.uses[expert] = _uses(pool, expert) + _USE
        pool.last_used[expert] = pool.time
        if pool.frames[expert] >= 0:
            pool.needed[pool.frames[expert]] = pool.time
    num_missing = 0
    for index in range(args.first, args.first + count):
        expert = args.first_expert + args.active[index]
        frame = pool.frames[expert]
        if frame >= 0 and pool.is_unread[frame] == 0:
            continue
        if frame < 0:
            frame = _frame_to_take(pool)
            pool.frames[expert], pool.owners[frame], pool.needed[frame] = frame, expert, pool.time
        pool.is_unread[frame] = 0
        args.missing[num_missing] = expert
        num_missing += 1
    args.num_missing[0] = num_missing
    pool.num_hits += count - num_missing
    pool.num_misses += num_missing


def fetch(args, state, thread, num_threads):
    """Read the missing experts from the file into their frames. Parts of records are divided among threads.

    Reads `missing` and `num_missing`. Writes the frames' bytes. A part that cannot be read, or whose checksum is wrong,
    marks its frame as unread and sets the pool's `failure`.
    """
    pool = args.pool
    num_units = args.num_missing[0] * pool.num_parts
    begin_units(state, thread)
    unit, end = take_units(state, thread, num_threads, num_units)
    while unit < end:
        expert, part = args.missing[unit // pool.num_parts], unit % pool.num_parts
        first, frame = part * pool.part_bytes, pool.frames[expert]
        at, count = pool.memory + frame * pool.record_bytes + first, min(pool.part_bytes, pool.record_bytes - first)
        number, failure = expert * pool.num_parts + part, 0
        if not read_all(pool.descriptor, at, count, pool.offset + expert * pool.record_bytes + first):
            failure = 2 * number + 1
        elif checksum(at, count, number) != pool.checksums[number]:
            failure = 2 * number + 2
        if failure != 0:
            pool.is_unread[frame] = 1
            atomics.compare_exchange(pool.failure, 0, failure)
        unit += 1
        if unit == end:
            unit, end = take_units(state, thread, num_threads, num_units)


def check(args, state, thread, num_threads):
    """Store the checksums of the expert in frame 0. Its number is the first of `missing`.

    Parts are divided among threads.
    """
    pool = args.pool
    for part in range(thread, pool.num_parts, num_threads):
        first, number = part * pool.part_bytes, args.missing[0] * pool.num_parts + part
        count = min(pool.part_bytes, pool.record_bytes - first)
        pool.checksums[number] = checksum(pool.memory + first, count, number)
