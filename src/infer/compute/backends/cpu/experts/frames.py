"""Frames: memory for some of a model's experts, which are read from a file when a step needs them.

    choose   which of a layer's experts a step needs, and which of these are to be read into which frames
    fetch    the reads, in parts, each with a checksum
    check    the checksums of an expert that is about to be written

An expert keeps its frame until another needs it: then the expert goes whose uses, halved again and again as time
passes, are the fewest, and of several the one that was used the longest ago. This never changes a result: products
read the same bytes, in the same order of experts, wherever they are.

A part that cannot be read, or whose bytes have changed, is a failure of the run: its results must not be used. The
expert's frame counts as unread, so the next run that needs it reads it again.
"""

from numba import njit

from infer.compute.backends.cpu.experts.pool_plan import MOST_HALVINGS
from infer.compute.backends.cpu.simd import load_i64
from infer.compute.backends.cpu.threads import atomics
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_units
from infer.compute.backends.cpu.weights.embed import read_all

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
    """Return an expert's uses as of now."""
    return pool.uses[expert] >> min((pool.time - pool.last_used[expert]) >> pool.half_life, MOST_HALVINGS)


@njit
def _frame_to_take(pool):
    """Return a frame that this moment's commands do not need. There is one: they need at most all."""
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
    """Give a frame to each expert that the next commands need, and list those whose frames must be read.

    The next commands are for `most` of the active experts at most, from `first` on. One thread is enough.
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
    """Read the missing experts into their frames. Parts are divided among threads."""
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
    """Store the checksums of the expert in frame 0, whose number is the first of `missing`."""
    pool = args.pool
    for part in range(thread, pool.num_parts, num_threads):
        first, number = part * pool.part_bytes, args.missing[0] * pool.num_parts + part
        count = min(pool.part_bytes, pool.record_bytes - first)
        pool.checksums[number] = checksum(pool.memory + first, count, number)
