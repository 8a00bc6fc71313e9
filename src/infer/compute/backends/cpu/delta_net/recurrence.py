"""The gated delta rule over pages: for each key head of each row, its tokens in their order.

`DeltaNetCache` has the definition. A page's first token makes the page's S from the page before. Within a page

    Sᵀx of token t = e^{G_t} S₀ᵀx + Σ_j (k_j · x) e^{G_t − G_j} u_j        G_t = Σ_{i ≤ t} log α_i

for x = k with j < t, which gives u_t, then for x = q with j ≤ t, which gives o_t. Every sum is one chain of FMAs, over
the elements of x, then over j. So its bits depend neither on how many tokens a step has, nor on which tokens a tile
has. No exponent is positive. G is float64: after a token that forgets all, its rounding in float32 would be an error of
all decays in the rest of the page.

The inner loop is rows × a matrix, added to sums in registers. Each sum starts from the contents of memory and ends
there. So neither the tile's shape nor a cut between two matrices changes its bits.
"""

from typing import NamedTuple

import numpy as np
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activations import inverse_rms, quantize_block, record_address, record_size
from infer.compute.backends.cpu.attention import registers
from infer.compute.backends.cpu.delta_net.inputs import (
    PageTokens,
    column,
    convolve,
    page_of,
    store_gates,
    store_keys_and_queries,
)
from infer.compute.backends.cpu.layouts import BLOCK, LANES
from infer.compute.backends.cpu.math_functions import exp_up_to_0, silu
from infer.compute.backends.cpu.simd import (
    Value,
    address,
    load_f32,
    load_scalar_f32,
    load_scalar_f64,
    multiply,
    offset,
    operation,
    splat_f32,
    store_f32,
    store_scalar_f32,
    store_scalar_f64,
    subtract_f64,
)
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_share

_VECTOR_BYTES = 4 * LANES


@operation(types.void, *(address,) * 9)
def _add_products(
    b: Builder, num_rows: Value, x: Value, x_bytes: Value, m: Value, m_bytes: Value, depth: Value, out: Value,
    out_bytes: Value, num_vectors: Value,
) -> None:  # fmt: skip
    def rows(height: int, vectors: int, first: Value) -> None:
        xs, outs = [b.add(x, b.mul(first, x_bytes))], [b.add(out, b.mul(first, out_bytes))]
        for _ in range(height - 1):
            xs.append(b.add(xs[-1], x_bytes))
            outs.append(b.add(outs[-1], out_bytes))

        def tile(width: int, vector: Value) -> None:
            column = multiply(b, vector, _VECTOR_BYTES)
            places = [offset(b, b.add(each, column), _VECTOR_BYTES * v) for each in outs for v in range(width)]
            sums, start = registers.variables(b, [simd.load_f32(b, place) for place in places]), b.add(m, column)
            with cgutils.for_range(b, depth) as loop:
                row, element = b.add(start, b.mul(loop.index, m_bytes)), multiply(b, loop.index, 4)
                columns = [simd.load_f32(b, offset(b, row, _VECTOR_BYTES * v)) for v in range(width)]
                for index, each in enumerate(xs):
                    registers.add_products(b, sums[index * width :], simd.broadcast(b, b.add(each, element)), columns)
            registers.store_variables(b, sums, places)

        registers.for_each_vector(b, num_vectors, vectors, tile)

    registers.for_each_tile(b, num_rows, rows)


@njit
def add_products(num_rows, x, x_bytes, m, m_bytes, depth, out, out_bytes, num_vectors):
    """Add Σ_i x[row, i] × m[i] to out[row], for i < depth.

    x is f32 [num_rows, depth], m is [depth, 16 × num_vectors], and out is [num_rows, 16 × num_vectors]. Their rows are
    `x_bytes`, `m_bytes` and `out_bytes` apart. out is read and written, and must not overlap x or m.
    """
    _add_products(num_rows, x, x_bytes, m, m_bytes, depth, out, out_bytes, num_vectors)


@njit
def clear(where, num_rows, row_bytes, num_vectors):
    """Set the first `num_vectors` × 16 floats of each of `num_rows` rows to 0. The rows are `row_bytes` apart."""
    for row in range(num_rows):
        for at in range(where + row * row_bytes, where + row * row_bytes + _VECTOR_BYTES * num_vectors, _VECTOR_BYTES):
            store_f32(at, splat_f32(0))


class Scratch(NamedTuple):
    """Addresses of a thread's f32 arrays (`totals` is f64), for one row's tokens in one page, at most `page_tokens`."""

    keys_queries: int  # [tokens, 2, key_dim]: k, then q
    dots: int  # [tokens, 2, page_tokens]: k and q times the page's keys
    values: int  # [tokens, value_dim]
    sums: int  # [tokens, 2, value_dim]: Sᵀk and Sᵀq
    decayed: int  # [8, page_tokens]: the dots of four tokens, decayed: e^(G − G_j) × k·k_j, then of q
    log_alphas: int  # [tokens]
    betas: int  # [tokens]
    totals: int  # f64 [page_tokens]: Σ log α from the page's start to each token, of a value head
    scaled: int  # [key_dim, page_tokens], of the page before: in the place of the first two


@njit
def scratch_at(args, at):
    """Return the arrays of the scratch that begins at an address. `delta_net_scratch_bytes` has its size."""
    row = 4 * args.page_tokens
    dots = at + 2 * row * max(args.key_dim, args.page_tokens)
    values = dots + 2 * row * args.page_tokens
    sums = values + row * args.value_dim
    decayed = sums + 2 * row * args.value_dim
    log_alphas = decayed + 8 * row
    return Scratch(at, dots, values, sums, decayed, log_alphas, log_alphas + row, log_alphas + 2 * row, at)


_TILE = 4  # tokens whose sums over the tokens before them are computed together
_LEAST = 32  # weight of what a thread takes at once
_PAGE_WEIGHT = 4  # tokens that take as long as reading a page's state


def gated_delta_net(args, state, thread, num_threads):
    """Mix the step's tokens. Threads divide the key heads of all rows.

    Reads `projected`, f32 [tokens, num_columns]: q, k and v of all heads (`num_channels`), then z, b and a.
    Reads the pages of earlier tokens. Writes `out`, f32 [tokens, value heads × value_dim], the activation records at
    `quantized` if there are any, and the page of each token as `DeltaNetCache` describes it. Each thread has
    `scratch_bytes` of scratch. `key_dim`, `value_dim` and `page_tokens` are multiples of 16, so every row is whole
    vectors. Addresses need only the alignment of a float.
    """
    total, token = 0, 0
    while token < state.num_tokens:
        count = _run_at(state, token)
        if state.rows[token] >= 0:
            total += (count + _PAGE_WEIGHT) * args.num_key_heads
        token += count
    begin_units(state, thread)
    share = take_share(state, thread, num_threads, total, _LEAST)
    while share[0] < share[1]:
        _mix_share(args, state, share, args.scratch + thread * args.scratch_bytes)
        share = take_share(state, thread, num_threads, total, _LEAST)


@njit
def _run_at(state, token):
    """Return the number of tokens in a step that belong to the same row, from number `token` on."""
    count = 1
    while token + count < state.num_tokens and state.rows[token + count] == state.rows[token]:
        count += 1
    return count


@njit
def _mix_share(args, state, share, scratch):
    """Mix the (run, key head) pairs whose weights begin in the share [begin, stop)."""
    item, token = 0, 0
    while token < state.num_tokens and item < share[1]:
        count = _run_at(state, token)
        if state.rows[token] >= 0:  # otherwise a recorded step has no token here
            for key_head in range(args.num_key_heads):
                if share[0] <= item < share[1]:
                    _mix_run(args, state, token, count, key_head, scratch)
                item += count + _PAGE_WEIGHT
        token += count


@njit
def _mix_run(args, state, token, count, key_head, scratch):
    """Mix `count` tokens of a row from number `token` on, for one key head and its value heads, page by page.

    Writes the tokens' k, u and log α into the pages, and the heads' columns of `out`.
    """
    done, row, page_tokens = 0, state.rows[token], args.page_tokens
    arrays = scratch_at(args, scratch)
    while done < count:
        position = state.positions[token] + done
        index, place = position // page_tokens, position % page_tokens
        some = min(page_tokens - place, count - done)
        page = page_of(args, row, index)
        tokens = PageTokens(token + done, some, row, position, done, page, place)
        if place == 0:
            _begin_page(args, tokens, index, key_head, arrays)
        store_keys_and_queries(args, tokens, key_head, arrays.keys_queries)
        _multiply_keys(args, tokens, key_head, arrays)
        for which in range(args.num_value_heads // args.num_key_heads):
            value_head = _value_head(args, key_head, which)
            _append(args, tokens, value_head, arrays)
            _store_result(args, state, tokens, value_head, arrays.sums)
        done += some


@njit(forceinline=True)
def _value_head(args, key_head, which):
    if args.are_heads_tiled != 0:
        return which * args.num_key_heads + key_head
    return key_head * (args.num_value_heads // args.num_key_heads) + which


@njit(forceinline=True)
def _in_page(args, first, page, value_head, num_floats):
    """Return the address of a value head's part of a page. Each head has `num_floats`."""
    return first + page * args.page_bytes + 4 * value_head * num_floats


@njit
def _begin_page(args, tokens, index, key_head, arrays):
    """Make the states at a page's start: e^G S + Σ_j e^{G − G_j} k_j u_jᵀ of the page before, or 0 at position 0.

    Reads S, k, u and log α of the page `index` − 1. Writes S, f32 [key_dim, value_dim], of the key head's value heads
    in the page of `tokens`, and overwrites `scaled` and `totals`.
    """
    key_dim, value_dim, page_tokens = args.key_dim, args.value_dim, args.page_tokens
    size, row, state_row = key_dim * value_dim, 4 * page_tokens, 4 * value_dim
    for which in range(args.num_value_heads // args.num_key_heads):
        head = _value_head(args, key_head, which)
        new = _in_page(args, args.states, tokens.page, head, size)
        if index == 0:
            clear(new, key_dim, state_row, value_dim // LANES)
            continue
        before = page_of(args, tokens.row, index - 1)
        decays = _in_page(args, args.decays, before, head, page_tokens)
        last = _sum_log_alphas(decays, page_tokens, arrays.totals)
        scaled = arrays.scaled
        keys = _in_page(args, args.keys, before, key_head, key_dim * page_tokens)
        for j in range(0, row, 4 * LANES):
            decay = exp_up_to_0(subtract_f64(last, arrays.totals + 2 * j))
            for at in range(j, j + row * key_dim, row):
                store_f32(scaled + at, load_f32(keys + at) * decay)
        old, factor = _in_page(args, args.states, before, head, size), exp_up_to_0(splat_f32(np.float32(last)))
        for at in range(0, 4 * size, 4 * LANES):
            store_f32(new + at, load_f32(old + at) * factor)
        updates = _in_page(args, args.updates, before, head, page_tokens * value_dim)
        add_products(key_dim, scaled, row, updates, state_row, page_tokens, new, state_row, value_dim // LANES)


@njit
def _sum_log_alphas(log_alphas, count, totals):
    """Store the running sums of `count` numbers, f32 at `log_alphas`, as f64 at `totals`, and return the last sum."""
    total = 0.0
    for j in range(count):
        total += np.float64(load_scalar_f32(log_alphas + 4 * j))
        store_scalar_f64(totals + 8 * j, total)
    return total


@njit
def _multiply_keys(args, tokens, key_head, arrays):
    """Multiply each k and q with the page's keys, those of `tokens` included.

    Reads `keys_queries`, and the page's keys, f32 [key_dim, page_tokens]. Writes whole vectors of `dots`, so that the
    last one may contain products with places that have no token yet; nobody reads these.
    """
    dim, row = args.key_dim, 4 * args.page_tokens
    num_vectors = (tokens.place + tokens.num + LANES - 1) // LANES
    keys = _in_page(args, args.keys, tokens.page, key_head, dim * args.page_tokens)
    clear(arrays.dots, 2 * tokens.num, row, num_vectors)
    add_products(2 * tokens.num, arrays.keys_queries, 4 * dim, keys, row, dim, arrays.dots, row, num_vectors)


@njit
def _append(args, tokens, value_head, arrays):
    """Append the tokens' log α and u of a value head to the page. Leave o = Sᵀq in each second row of `sums`.

    Reads `keys_queries`, `dots`, the page's S and the u of its earlier tokens. Overwrites `values`, `log_alphas`,
    `betas`, `totals` and `decayed`.
    """
    key_dim, value_dim, page, place = args.key_dim, args.value_dim, tokens.page, tokens.place
    row, num_vectors, sums = 4 * value_dim, value_dim // LANES, arrays.sums
    num_before = 2 * args.num_key_heads * key_dim
    convolve(args, tokens, num_before + value_head * value_dim, value_dim, arrays.values, row)
    store_gates(args, tokens, value_head, arrays.log_alphas, arrays.betas)
    decays = _in_page(args, args.decays, page, value_head, args.page_tokens)
    for t in range(tokens.num):
        store_scalar_f32(decays + 4 * (place + t), load_scalar_f32(arrays.log_alphas + 4 * t))
    _sum_log_alphas(decays, place + tokens.num, arrays.totals)
    state = _in_page(args, args.states, page, value_head, key_dim * value_dim)
    updates = _in_page(args, args.updates, page, value_head, args.page_tokens * value_dim)
    clear(sums, 2 * tokens.num, row, num_vectors)
    add_products(2 * tokens.num, arrays.keys_queries, 4 * key_dim, state, row, key_dim, sums, row, num_vectors)
    for begin in range(0, tokens.num, _TILE):
        count, past = min(_TILE, tokens.num - begin), place + begin
        for t in range(begin, begin + count):
            _decay(args, place + t, t, t - begin, arrays)
        own, decayed_row = sums + 2 * row * begin, 4 * args.page_tokens
        add_products(2 * count, arrays.decayed, decayed_row, updates, row, past, own, row, num_vectors)
        for t in range(count):
            decayed, at = arrays.decayed + 2 * decayed_row * t + 4 * past, own + 2 * row * t
            u, in_tile = updates + row * (past + t), updates + row * past
            add_products(1, decayed, 0, in_tile, row, t, at, row, num_vectors)
            beta = splat_f32(load_scalar_f32(arrays.betas + 4 * (begin + t)))
            value = arrays.values + row * (begin + t)
            for i in range(0, row, 4 * LANES):
                store_f32(u + i, beta * (load_f32(value + i) - load_f32(at + i)))
            add_products(1, decayed + decayed_row, 0, in_tile, row, t + 1, at + row, row, num_vectors)


@njit(forceinline=True)
def _decay(args, place, t, in_tile, arrays):
    """Multiply the sums over S₀ of token `t` with e^G, and its dots with e^{G − G_j}.

    `place` is the token's place in the page. The dots go to row `in_tile` of `decayed`, f32 [tile, 2, page_tokens], and
    the sums stay in place.
    """
    now, row, width = load_scalar_f64(arrays.totals + 8 * place), 4 * args.page_tokens, 4 * args.value_dim
    factor = exp_up_to_0(splat_f32(np.float32(now)))
    for at in range(arrays.sums + 2 * width * t, arrays.sums + 2 * width * (t + 1), 4 * LANES):
        store_f32(at, load_f32(at) * factor)
    dots, decayed = arrays.dots + 2 * row * t, arrays.decayed + 2 * row * in_tile
    for j in range(0, 4 * (place + 1), 4 * LANES):
        decay = exp_up_to_0(subtract_f64(now, arrays.totals + 2 * j))
        store_f32(decayed + j, load_f32(dots + j) * decay)
        store_f32(decayed + row + j, load_f32(dots + row + j) * decay)


@njit
def _store_result(args, state, tokens, value_head, sums):
    """Store norm(o) × silu(z) of a value head for each token, and quantise it if there is `quantized`.

    Reads o from each second row of `sums`, and z from `projected`. Writes `value_dim` columns of `out`, and the head's
    records, which are whole because `value_dim` is then a multiple of a block.
    """
    dim, features = args.value_dim, args.num_value_heads * args.value_dim
    for t in range(tokens.num):
        token, o = tokens.first + t, sums + 4 * dim * (2 * t + 1)
        z = column(args, token, args.num_channels + value_head * dim)
        out = args.out + 4 * (token * features + value_head * dim)
        factor = splat_f32(inverse_rms(o, dim, args.eps))
        for i in range(0, 4 * dim, 4 * LANES):
            store_f32(out + i, load_f32(o + i) * factor * load_f32(args.norm + i) * silu(load_f32(z + i)))
        if args.quantized != 0:  # only if a head is whole blocks
            num_records, record_bytes = features // BLOCK, record_size(args.form)
            for i in range(dim // BLOCK):
                record = value_head * dim // BLOCK + i
                to = record_address(args.quantized, token, state.num_tokens, num_records, record, record_bytes)
                at = out + 4 * BLOCK * i
                quantize_block(load_f32(at), load_f32(at + 4 * LANES), args.form, to)
