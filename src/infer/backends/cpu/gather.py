"""What ranks that share memory tell each other: the columns of an activation, and in a multi-step its tokens.

An exchange has two halves. All of a rank's threads put its columns into a buffer that all ranks see; then each rank
says so and, when all have, takes the others' columns. There are two buffers, used in turn: who writes to one again has
seen all ranks come to the exchange after it, so they have read it.

A rank that waits spins, then sleeps for moments. Where the group has failed nobody waits.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.backends.cpu import control
from infer.backends.cpu.barrier import SPIN_NANOSECONDS, spin
from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.records import EXCHANGE
from infer.backends.cpu.simd import load_i64, store_i64
from infer.backends.cpu.state import LINE_BYTES, field_offset
from infer.backends.cpu.tails import load_upto, store_upto

_BEGUN, _DONE, _RANK, _SIZE = (field_offset(EXCHANGE, name) for name in ("begun", "done", "rank", "size"))
_FAILED, _ARRIVALS = (field_offset(EXCHANGE, name) for name in ("failed", "arrivals"))
_BUFFERS, _BUFFER_BYTES = (field_offset(EXCHANGE, name) for name in ("buffers", "buffer_bytes"))


@njit
def _buffer(exchange, number):  # type: ignore[no-untyped-def]
    return load_i64(exchange + _BUFFERS) + (number & 1) * load_i64(exchange + _BUFFER_BYTES)


@njit
def _arrive(exchange, number):  # type: ignore[no-untyped-def]
    arrivals, rank = load_i64(exchange + _ARRIVALS), load_i64(exchange + _RANK)
    control.atomic_store(arrivals + LINE_BYTES * rank, number)


@njit
def _has_failed(exchange):  # type: ignore[no-untyped-def]
    return control.atomic_load(load_i64(exchange + _FAILED)) != 0


@njit
def _await(exchange, rank, number):  # type: ignore[no-untyped-def]
    """Until a rank has arrived at an exchange."""
    arrived = load_i64(exchange + _ARRIVALS) + LINE_BYTES * rank
    began = control.nanoseconds()
    while not spin(arrived, number) and not _has_failed(exchange):
        if control.nanoseconds() - began > SPIN_NANOSECONDS:
            control.sleep_briefly()


@njit
def _num_tokens(args, state):  # type: ignore[no-untyped-def]
    return state.num_logits if args.of_logits else state.num_tokens


def make_share() -> Callable[..., None]:
    """This rank's columns, for all to see."""

    def share(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        number, num_tokens = load_i64(args.exchange + _DONE) + 1, _num_tokens(args, state)
        if thread == 0:
            store_i64(args.exchange + _BEGUN, number)
        buffer = _buffer(args.exchange, number) + 4 * args.first_column
        for token in range(num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads):
            own, to = args.own + 4 * args.own_width * token, buffer + 4 * args.width * token
            for column in range(0, args.own_width, LANES):
                room = args.own_width - column
                store_upto(to + 4 * column, room, load_upto(own + 4 * column, room))

    return share


def make_collect() -> Callable[..., None]:
    """All ranks' columns, stored or added to what is there: tokens shared out."""

    def collect(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        number, num_tokens = load_i64(args.exchange + _BEGUN), _num_tokens(args, state)
        _arrive(args.exchange, number)
        for rank in range(load_i64(args.exchange + _SIZE)):
            _await(args.exchange, rank, number)
        buffer = _buffer(args.exchange, number)
        for token in range(num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads):
            whole, out = buffer + 4 * args.width * token, args.out + 4 * args.width * token
            for column in range(0, args.width, LANES):
                room = args.width - column
                value = load_upto(whole + 4 * column, room)
                if args.adding:
                    value = load_upto(out + 4 * column, room) + value
                store_upto(out + 4 * column, room, value)
        if thread == 0:
            store_i64(args.exchange + _DONE, number)

    return collect


def make_lead() -> Callable[..., None]:
    """After a step of several without a return: rank 0 tells what was sampled, and whether it was the last one."""

    def lead(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        if thread != 0:
            return
        if _has_failed(args.exchange):
            store_i64(args.stop, 1)
        number = load_i64(args.exchange + _DONE) + 1
        buffer = _buffer(args.exchange, number)
        store_i64(buffer, load_i64(args.stop))
        for row in range(state.num_logits):
            store_i64(buffer + 8 * (1 + row), load_i64(state.tokens + 8 * row))
        _arrive(args.exchange, number)
        store_i64(args.exchange + _DONE, number)

    return lead


def make_follow() -> Callable[..., None]:
    """The same step of another rank: what rank 0 has sampled is the input of the next one."""

    def follow(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        if thread != 0:
            return
        number = load_i64(args.exchange + _DONE) + 1
        _arrive(args.exchange, number)
        _await(args.exchange, 0, number)
        buffer = _buffer(args.exchange, number)
        for row in range(state.num_logits):
            store_i64(state.tokens + 8 * row, load_i64(buffer + 8 * (1 + row)))
            store_i64(state.positions + 8 * row, load_i64(state.positions + 8 * row) + 1)
        store_i64(args.stop, np.int64(1) if _has_failed(args.exchange) else load_i64(buffer))
        store_i64(args.exchange + _DONE, number)

    return follow
