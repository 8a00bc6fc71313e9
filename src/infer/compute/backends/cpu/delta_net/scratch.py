"""Memory of a thread while it mixes the tokens of one page for one key head and its value heads."""

from typing import NamedTuple

from numba import njit


class Scratch(NamedTuple):
    """Addresses of f32 arrays, for up to `page_tokens` tokens from the page's `place` on."""

    keys_queries: int  # [tokens, 2, key_dim]: k, then q
    dots: int  # [tokens, 2, page_tokens]: k and q times the page's keys
    values: int  # [tokens, value_dim]
    sums: int  # [tokens, 2, value_dim]: Sᵀk and Sᵀq
    shares: int  # [8, page_tokens]: decayed dots of four tokens
    log_alphas: int  # [tokens]
    betas: int  # [tokens]
    totals: int  # f64 [page_tokens]: Σ log α from the page's start to each token, of a value head
    scaled: int  # [key_dim, page_tokens], of the page before: in the place of the first two


@njit
def scratch_at(args, at):
    """Return the arrays that begin at an address."""
    row = 4 * args.page_tokens
    dots = at + 2 * row * max(args.key_dim, args.page_tokens)
    values = dots + 2 * row * args.page_tokens
    sums = values + row * args.value_dim
    shares = sums + 2 * row * args.value_dim
    log_alphas = shares + 8 * row
    return Scratch(at, dots, values, sums, shares, log_alphas, log_alphas + row, log_alphas + 2 * row, at)
