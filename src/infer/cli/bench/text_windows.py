"""Texts as windows of equal length, cut like llama.cpp's tools for perplexity and importance."""

from collections.abc import Sequence

from infer.text.tokenizer import Tokenizer


def cut(tokenizer: Tokenizer, ids: Sequence[int], size: int) -> list[list[int]]:
    """Return the whole windows of `size` tokens, each with the token that begins a text if the tokenizer has one.

    That token replaces the window's first token. The tokens after the last whole window are left out.
    """
    windows = [list(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
    if tokenizer.adds_bos and tokenizer.bos_token_id is not None:
        windows = [[tokenizer.bos_token_id, *window[1:]] for window in windows]
    return windows
