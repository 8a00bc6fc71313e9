"""Where ranks that share memory meet, and what rank 0 tells the others in a multi-step.

Each rank writes its columns of an activation into memory that all of them map, and then they meet: all have written.
Nobody writes there again before the next meeting, to which all come when they have read.

A rank that waits spins, then sleeps for moments. Where the group has failed nobody waits.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.backends.cpu import control, simd
from infer.backends.cpu.barrier import SPIN_NANOSECONDS, spin
from infer.backends.cpu.records import EXCHANGE
from infer.backends.cpu.simd import load_i64, store_i64
from infer.backends.cpu.state import LINE_BYTES, field_offset

_DONE, _RANK, _SIZE = (field_offset(EXCHANGE, name) for name in ("done", "rank", "size"))
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


def make_meet() -> Callable[..., None]:
    """What all ranks have written before is seen after it."""

    def meet(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        exchange = simd.address_of(args_at)
        if thread != 0:
            return
        number = load_i64(exchange + _DONE) + 1
        _arrive(exchange, number)
        for rank in range(load_i64(exchange + _SIZE)):
            _await(exchange, rank, number)
        store_i64(exchange + _DONE, number)

    return meet


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
