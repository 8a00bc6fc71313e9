"""Barrier of ranks that share memory, and the messages of rank 0 to the others in a multi-step.

Each rank writes its columns of an activation into memory that all ranks map, and then waits at the barrier: all have
written. No rank writes there again before the next barrier, where all arrive after they have read.

A waiting rank spins, then sleeps briefly. If the group has failed, no rank waits.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.simd import load_upto, store_upto
from infer.compute.backends.cpu.thread_records import LINE_WORDS
from infer.compute.backends.cpu.threads import atomics
from infer.compute.backends.cpu.threads.barrier import SPIN_NANOSECONDS, spin


@njit
def _buffer(exchange, number):
    return exchange.buffers + (number & 1) * exchange.buffer_words


@njit
def _arrive(exchange, number):
    atomics.atomic_store(exchange.arrivals + LINE_WORDS * exchange.rank, number)


@njit
def _has_failed(exchange):
    return atomics.atomic_load(exchange.failed) != 0


@njit
def _await(exchange, rank, number):
    """Wait until a rank has arrived at exchange `number`, or the group has failed."""
    arrived, began = exchange.arrivals + LINE_WORDS * rank, atomics.nanoseconds()
    while not spin(arrived, number) and not _has_failed(exchange):
        if atomics.nanoseconds() - began > SPIN_NANOSECONDS:
            atomics.sleep_briefly()


def wait_for_ranks(exchange, state, thread, num_threads):
    """Wait at a barrier until all ranks have arrived. Then their writes are visible. Thread 0 waits for all."""
    if thread != 0:
        return
    number = exchange.done + 1
    _arrive(exchange, number)
    for rank in range(exchange.size):
        _await(exchange, rank, number)
    exchange.done = number


def copy_columns(args, state, thread, num_threads):
    """Copy `num_columns` f32 columns of each token's row into another matrix. Tokens are divided among the threads.

    Reads f32 [tokens, source_stride] at `source`, and writes f32 [tokens, target_stride] at `target`. Both addresses
    are those of the first column to copy.
    """
    for token in range(thread, state.num_tokens, num_threads):
        source = args.source + 4 * args.source_stride * token
        target = args.target + 4 * args.target_stride * token
        for first in range(0, args.num_columns, LANES):
            room = args.num_columns - first
            store_upto(target + 4 * first, room, load_upto(source + 4 * first, room))


def lead(args, state, thread, num_threads):
    """Send the tokens that rank 0 sampled in a step of a multi-step, and `stop`, to the other ranks. Thread 0 does it.

    Writes an i64 buffer: stop, then a token per row. The ranks' barrier makes it visible.
    """
    if thread != 0:
        return
    if _has_failed(args.exchange):
        args.stop[0] = 1
    number = args.exchange.done + 1
    buffer = _buffer(args.exchange, number)
    buffer[0] = args.stop[0]
    for row in range(state.num_logits):
        buffer[1 + row] = state.tokens[row]
    _arrive(args.exchange, number)
    args.exchange.done = number


def follow(args, state, thread, num_threads):
    """Receive the tokens and `stop` of the same step from rank 0. Thread 0 does it.

    Writes `state.tokens`, and adds 1 to `state.positions`: they are the input of the next step. If the group has
    failed, stop is 1.
    """
    if thread != 0:
        return
    number = args.exchange.done + 1
    _arrive(args.exchange, number)
    _await(args.exchange, 0, number)
    buffer = _buffer(args.exchange, number)
    for row in range(state.num_logits):
        state.tokens[row] = buffer[1 + row]
        state.positions[row] += 1
    args.stop[0] = np.int64(1) if _has_failed(args.exchange) else buffer[0]
    args.exchange.done = number
