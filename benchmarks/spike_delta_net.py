"""Compare two definitions of the gated delta net on CPUs: anchored pages with a log, and one token after another.

    python benchmarks/spike_delta_net.py [--report FILE]

Per value head:  S ← α S;  u = β (v − Sᵀk);  S ← S + k uᵀ;  o = Sᵀq.

`anchored`: S0 exists only at multiples of 64 tokens. A page logs (k, u, G) per token, with G the sum of the log gates
since the page began. Then Sᵀx = e^{G_t} S0ᵀx + Σ_j (k_j·x) e^{G_t − G_j} u_j, and no exponent is positive.
`fused`: the float32 state is updated in place by every token.

Every sum is one chain of fused multiply-adds in the order of its rows, so its bits do not depend on the tile's height.
"""

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils

from harness import make_parser, write_report
from infer.backends.cpu import simd
from infer.backends.cpu.simd import F32X16, I64, constant

PAGE, WIDTH, HEADS, KEY_HEADS, LAYERS, TOKENS = 64, 128, 32, 16, 30, 8192
DESIGNS = ("anchored", "fused")
BLOCK_BYTES = 256  # 64 columns


def make_accumulate(height: int) -> Any:
    """Return a kernel: out[t, 64] += Σ_r x[t, r] m[r, 64] for `height` tokens, in the order of r. Strides are bytes."""

    def emit(b: Any, x: Any, x_token: Any, x_row: Any, m: Any, m_row: Any, rows: Any, out: Any, out_token: Any) -> None:
        places = [[b.add(out, b.add(b.mul(out_token, constant(I64, t)), constant(I64, 64 * c))) for c in range(4)]
                  for t in range(height)]  # fmt: skip
        sums = [[cgutils.alloca_once_value(b, simd.load(b, place, F32X16, 4)) for place in row] for row in places]
        with cgutils.for_range(b, rows) as loop:
            at, base = b.add(x, b.mul(loop.index, x_row)), b.add(m, b.mul(loop.index, m_row))
            columns = [simd.load(b, simd.offset(b, base, 64 * c), F32X16, 4) for c in range(4)]
            for t, row in enumerate(sums):
                factor = simd.broadcast(b, b.add(at, b.mul(x_token, constant(I64, t))))
                for column, slot in zip(columns, row, strict=True):
                    b.store(simd.fma(b, factor, column, b.load(slot)), slot)
        for row, slots in zip(places, sums, strict=True):
            for place, slot in zip(row, slots, strict=True):
                simd.store(b, place, b.load(slot), 4)

    return simd.operation(types.void, *[types.int64] * 8)(emit)


accumulate_1, accumulate_4 = make_accumulate(1), make_accumulate(4)


@simd.operation(types.void, *[types.int64] * 5)
def update_block(b: Any, state: Any, k_q: Any, u: Any, alpha: Any, out: Any) -> None:
    """Set S ← α S + k uᵀ for 64 columns of a state, and out = Sᵀq. `k_q` is k followed by q."""
    factor = simd.broadcast(b, alpha)
    us = [simd.load(b, simd.offset(b, u, 64 * c), F32X16, 4) for c in range(4)]
    sums = [cgutils.alloca_once_value(b, constant(F32X16, 0.0)) for _ in range(4)]
    with cgutils.for_range(b, constant(I64, WIDTH)) as loop:
        at, base = b.add(k_q, simd.multiply(b, loop.index, 4)), b.add(state, simd.multiply(b, loop.index, 4 * WIDTH))
        k, q = simd.broadcast(b, at), simd.broadcast(b, simd.offset(b, at, 4 * WIDTH))
        for c in range(4):
            place = simd.offset(b, base, 64 * c)
            new = simd.fma(b, k, us[c], b.fmul(factor, simd.load(b, place, F32X16, 4)))
            simd.store(b, place, new, 4)
            b.store(simd.fma(b, q, new, b.load(sums[c])), sums[c])
    for c in range(4):
        simd.store(b, simd.offset(b, out, 64 * c), b.load(sums[c]), 4)


@njit(nogil=True)
def accumulate(x, x_token, x_row, m, m_row, rows, out, out_token, num_tokens, width):  # type: ignore[no-untyped-def]
    """Accumulate any number of tokens and 64-column blocks. The tile's height does not change the bits."""
    for block in range(width // 64):
        columns, t = block * BLOCK_BYTES, 0
        while t + 4 <= num_tokens:
            accumulate_4(
                x + t * x_token, x_token, x_row, m + columns, m_row, rows, out + columns + t * out_token, out_token
            )
            t += 4
        while t < num_tokens:
            accumulate_1(
                x + t * x_token, x_token, x_row, m + columns, m_row, rows, out + columns + t * out_token, out_token
            )
            t += 1


@njit(nogil=True)
def anchored(states, keys, us, decays, start, k_q, v, gates, betas, out, first, last):  # type: ignore[no-untyped-def]
    """Append tokens of `k_q` [key head, k or q, token, width] at position `start`, for key heads `first` to `last`.

    `states` [head, width, width] is folded when the next page begins. The page's log is `keys` [key head, width, 64],
    `us` [head, 64, width] and `decays` [head, 64].
    """
    per_key, num_tokens, row = states.shape[0] // keys.shape[0], v.shape[0], 4 * WIDTH
    dots = np.empty((2, PAGE, PAGE), np.float32)
    sums = np.empty((2, PAGE, WIDTH), np.float32)
    weights = np.empty((2, PAGE), np.float32)
    tile = np.empty((2, 4, PAGE), np.float32)
    scaled = np.empty((WIDTH, PAGE), np.float32)
    for g in range(first, last):
        done = 0
        while done < num_tokens:
            p = (start + done) % PAGE
            n = min(PAGE - p, num_tokens - done)
            if p == 0 and start + done > 0:  # fold the page before
                for h in range(g * per_key, (g + 1) * per_key):
                    for j in range(PAGE):
                        weights[0, j] = np.exp(decays[h, PAGE - 1] - decays[h, j])
                    for i in range(WIDTH):
                        for j in range(PAGE):
                            scaled[i, j] = keys[g, i, j] * weights[0, j]
                    total = np.exp(decays[h, PAGE - 1])
                    for i in range(WIDTH):
                        for c in range(WIDTH):
                            states[h, i, c] *= total
                    accumulate(
                        scaled.ctypes.data,
                        4 * PAGE,
                        4,
                        us[h].ctypes.data,
                        row,
                        PAGE,
                        states[h].ctypes.data,
                        row,
                        WIDTH,
                        WIDTH,
                    )
            for t in range(n):
                for i in range(WIDTH):
                    keys[g, i, p + t] = k_q[g, 0, done + t, i]
            dots[:, :n] = 0
            for s in range(2):
                x = k_q[g, s, done:].ctypes.data
                accumulate(x, row, 4, keys[g].ctypes.data, 4 * PAGE, WIDTH, dots[s].ctypes.data, 4 * PAGE, n, PAGE)
            for h in range(g * per_key, (g + 1) * per_key):
                for t in range(n):
                    before = decays[h, p + t - 1] if p + t > 0 else np.float32(0)
                    decays[h, p + t] = before + gates[done + t, h]
                sums[:, :n] = 0
                for s in range(2):
                    x = k_q[g, s, done:].ctypes.data
                    accumulate(x, row, 4, states[h].ctypes.data, row, WIDTH, sums[s].ctypes.data, row, n, WIDTH)
                for begin in range(0, n, 4):
                    m = min(4, n - begin)
                    for t in range(m):
                        at = p + begin + t
                        total = np.exp(decays[h, at])
                        for c in range(WIDTH):
                            sums[0, begin + t, c] *= total
                            sums[1, begin + t, c] *= total
                        for j in range(at + 1):
                            decay = np.exp(decays[h, at] - decays[h, j])
                            tile[0, t, j] = dots[0, begin + t, j] * decay
                            tile[1, t, j] = dots[1, begin + t, j] * decay
                    u, past = us[h].ctypes.data, p + begin
                    for s in range(2):
                        accumulate(
                            tile[s].ctypes.data, 4 * PAGE, 4, u, row, past, sums[s, begin:].ctypes.data, row, m, WIDTH
                        )
                    for t in range(m):  # the solve: one token after another inside a tile of four
                        w, at = tile[0, t, past:].ctypes.data, past + t
                        u_tile = us[h, past:].ctypes.data
                        accumulate(w, 4, 4, u_tile, row, t, sums[0, begin + t :].ctypes.data, row, 1, WIDTH)
                        for c in range(WIDTH):
                            us[h, at, c] = betas[done + begin + t, h] * (
                                v[done + begin + t, h, c] - sums[0, begin + t, c]
                            )
                        w = tile[1, t, past:].ctypes.data
                        accumulate(w, 4, 4, u_tile, row, t + 1, sums[1, begin + t :].ctypes.data, row, 1, WIDTH)
                        out[done + begin + t, h] = sums[1, begin + t]
            done += n


@njit(nogil=True)
def fused(states, k_q, v, gates, betas, out, first, last):  # type: ignore[no-untyped-def]
    """Apply tokens to the states of key heads `first` to `last`, in place, one token after another."""
    per_key = states.shape[0] // k_q.shape[0]
    pair, r, u = np.empty((2, WIDTH), np.float32), np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32)
    alpha = np.empty(1, np.float32)
    for g in range(first, last):
        for h in range(g * per_key, (g + 1) * per_key):
            for t in range(v.shape[0]):
                pair[:] = k_q[g, :, t]
                alpha[0] = np.exp(gates[t, h])
                r[:] = 0
                accumulate(pair.ctypes.data, 0, 4, states[h].ctypes.data, 4 * WIDTH, WIDTH, r.ctypes.data, 0, 1, WIDTH)
                for c in range(WIDTH):
                    u[c] = betas[t, h] * (v[t, h, c] - alpha[0] * r[c])
                for c in range(0, WIDTH, 64):
                    base = states[h].ctypes.data + 4 * c
                    update_block(
                        base, pair.ctypes.data, u.ctypes.data + 4 * c, alpha.ctypes.data, out[t, h, c:].ctypes.data
                    )


def make_inputs(num_tokens: int, seed: int = 0) -> dict[str, Any]:
    """Return normalised k and q, v, log gates and betas with the ranges of a trained layer's parameters."""
    random = np.random.default_rng(seed)
    k_q = random.standard_normal((KEY_HEADS, 2, num_tokens, WIDTH)) + 0.3
    k_q /= np.sqrt((k_q**2).sum(-1, keepdims=True) + 1e-6)
    k_q[:, 1] /= np.sqrt(WIDTH)
    dt_bias = np.log(np.expm1(np.exp(random.uniform(np.log(1e-3), np.log(0.1), HEADS))))
    gates = -random.uniform(1, 16, HEADS) * np.log1p(np.exp(random.standard_normal((num_tokens, HEADS)) + dt_bias))
    betas = 1 / (1 + np.exp(-random.standard_normal((num_tokens, HEADS))))
    v = random.standard_normal((num_tokens, HEADS, WIDTH))
    return {name: np.ascontiguousarray(x, np.float32) for name, x in
            {"k_q": k_q, "v": v, "gates": gates, "betas": betas}.items()}  # fmt: skip


def part(inputs: dict[str, Any], begin: int, end: int) -> tuple[Any, ...]:
    k_q = np.ascontiguousarray(inputs["k_q"][:, :, begin:end])
    return (k_q, *(np.ascontiguousarray(inputs[name][begin:end]) for name in ("v", "gates", "betas")))


def reference(inputs: dict[str, Any]) -> Any:
    """Return the definition's outputs in float64."""
    k_q, v, gates, betas = (inputs[name].astype(np.float64) for name in ("k_q", "v", "gates", "betas"))
    states, out = np.zeros((HEADS, WIDTH, WIDTH)), np.zeros(v.shape)
    for t in range(len(v)):
        k, q = (np.repeat(k_q[:, s, t], HEADS // KEY_HEADS, 0) for s in range(2))
        states *= np.exp(gates[t])[:, None, None]
        u = (v[t] - np.matmul(k[:, None], states)[:, 0]) * betas[t][:, None]
        states += k[:, :, None] * u[:, None]
        out[t] = np.matmul(q[:, None], states)[:, 0]
    return out


class State:
    """One layer's state and log of one sequence."""

    def __init__(self) -> None:
        self.states = np.zeros((HEADS, WIDTH, WIDTH), np.float32)
        self.log = (np.zeros((KEY_HEADS, WIDTH, PAGE), np.float32), np.zeros((HEADS, PAGE, WIDTH), np.float32),
                    np.zeros((HEADS, PAGE), np.float32))  # fmt: skip

    def run(self, design: str, start: int, tokens: tuple[Any, ...], first: int = 0, last: int = KEY_HEADS) -> Any:
        out = np.zeros(tokens[1].shape, np.float32)
        if design == "anchored":
            anchored(self.states, *self.log, start, *tokens, out, first, last)
        else:
            fused(self.states, *tokens, out, first, last)
        return out


def check(design: str, num_tokens: int, inputs: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Return the largest error, and raise if any way of cutting the prompt changes a bit."""
    whole = State().run(design, 0, part(inputs, 0, num_tokens))
    for sizes in ([1], [3], [64], [5, 1, 67, 130, 2]):
        state, at, turn = State(), 0, 0
        end = min(num_tokens, 512)
        while at < end:
            n = min(sizes[turn % len(sizes)], end - at)
            if not np.array_equal(state.run(design, at, part(inputs, at, at + n)), whole[at : at + n]):
                raise SystemExit(f"{design}: chunks of {sizes} change bits at position {at}")
            at, turn = at + n, turn + 1
    error = np.abs(whole - expected[:num_tokens]).max()
    return {"max_error": float(error), "max_output": float(np.abs(expected[:num_tokens]).max())}


def median_ms(work: Callable[[int, int], None], threads: int, rounds: int) -> float:
    """Return the median milliseconds of `work` on the key heads, cut among threads."""
    cut = [KEY_HEADS * i // threads for i in range(threads + 1)]
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            list(pool.map(work, cut[:-1], cut[1:]))
            times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[1:])


def measure(inputs: dict[str, Any], threads: int) -> dict[str, float]:
    """Return milliseconds per layer. Decode visits 30 layers in turn, so its states come from memory."""
    layers, start_states, figures = (
        [State() for _ in range(LAYERS)],
        [np.zeros_like(State().states) for _ in range(LAYERS)],
        {},
    )
    prompt = part(inputs, 0, len(inputs["v"]))

    def steps(design: str, start: int, count: int, copy: bool = False) -> Callable[[int, int], None]:
        tokens = part(inputs, start, start + count)

        def work(first: int, last: int) -> None:
            for layer, saved in zip(layers, start_states, strict=True):
                heads = slice(2 * first, 2 * last)
                if copy:
                    np.copyto(saved[heads], layer.states[heads])
                layer.run(design, start, tokens, first, last)

        return work

    state = State()

    def prefill(design: str, first: int, last: int) -> None:
        state.run(design, 0, prompt, first, last)

    for design in DESIGNS:
        figures[f"{design} prefill {len(inputs['v'])}"] = median_ms(partial(prefill, design), threads, 3)
    for name, design, start, count, copy in (
        ("anchored decode at 1", "anchored", 65, 1, False), ("anchored decode at 31", "anchored", 95, 1, False),
        ("anchored decode at 63", "anchored", 127, 1, False),
        ("anchored decode at 0 with fold", "anchored", 128, 1, False),
        ("fused decode", "fused", 65, 1, False), ("fused decode into a second state", "fused", 65, 1, True),
        ("anchored verify 4 at 30", "anchored", 94, 4, False), ("fused verify 4, start kept", "fused", 94, 4, True),
        ("fused replay of 2 accepted", "fused", 94, 2, True),
    ):  # fmt: skip
        figures[name] = median_ms(steps(design, start, count, copy), threads, 9) / LAYERS
    return figures


def sizes() -> dict[str, int]:
    """Return bytes per sequence for 30 layers."""
    state = State()
    of_state, of_log = state.states.nbytes * LAYERS, sum(x.nbytes for x in state.log) * LAYERS
    per_token = (2 * KEY_HEADS * WIDTH + HEADS * WIDTH + 2 * HEADS) * 4 * LAYERS
    return {
        "state": of_state, "anchored log": of_log, "anchored live": of_state + of_log,
        "fused live with drafts or multi-steps": 2 * of_state + 8 * per_token, "fused inputs per token": per_token,
        "checkpoint": of_state,
    }  # fmt: skip


def main() -> None:
    options = make_parser(__doc__).parse_args()
    inputs = make_inputs(TOKENS)
    expected = reference(inputs)
    checks = {f"{design} {n}": check(design, n, inputs, expected) for design in DESIGNS for n in (37, TOKENS)}
    print(json.dumps(checks, indent=1), flush=True)
    figures = {f"{threads} threads": measure(inputs, threads) for threads in (1, 2)}
    print(json.dumps(figures, indent=1))
    write_report(options, checks=checks, bytes_per_sequence=sizes(), milliseconds_per_layer=figures)


if __name__ == "__main__":
    main()
