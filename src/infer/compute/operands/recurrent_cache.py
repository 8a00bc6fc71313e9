"""Cached values of layers with a state, by page: the inputs of convolutions, and the states of gated delta nets.

`kv_layout` has the same for keys and values.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Self, final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.quantization.kv_layout import Pages


@final
@dataclass(frozen=True)
class ConvCache:
    """The inputs of a causal convolution. A row's token at position p has place p % page_tokens in its page.

    Within a step, pages of a row that are three apart may share memory. So kernels read the inputs of the step's own
    tokens from the step itself.
    """

    inputs: Float[Tensor, "pages page_tokens channels"]
    pages: Pages


@final
@dataclass(frozen=True)
class DeltaNetCache:
    """A layer's part of each page. The token at position p has place t = p % page_tokens in its row's page.

    S exists only before the first token of a page. After the token at place t it is

        e^{G_t} S + Σ_{j ≤ t} e^{G_t − G_j} k_j u_jᵀ        G_t = Σ_{i ≤ t} log α_i

    The token at place 0 computes its page's S from the previous page. At position 0, S is 0. A step writes the page of
    each of its tokens, in the order of their positions. It reads the pages of earlier tokens.
    """

    inputs: Float[Tensor, "pages page_tokens channels"]  # inputs of the convolution
    states: Float[Tensor, "pages value_heads key_dim value_dim"]  # S
    keys: Float[Tensor, "pages key_heads key_dim page_tokens"]  # k
    updates: Float[Tensor, "pages value_heads page_tokens value_dim"]  # u
    decays: Float[Tensor, "pages value_heads page_tokens"]  # log α
    pages: Pages

    @classmethod
    def of_memory(cls, memory: UInt8[Tensor, "pages bytes"], net: GatedDeltaNet, pages: Pages) -> Self:
        """Return the views of a page memory that contains the layer's part of each page."""
        floats, shapes = memory.view(torch.float32), net.page_shapes(pages.page_tokens)
        borders = pairwise(accumulate(map(prod, shapes), initial=0))
        inputs, states, keys, updates, decays = (
            floats[:, first:end].view(len(floats), *shape) for (first, end), shape in zip(borders, shapes, strict=True)
        )
        return cls(inputs, states, keys, updates, decays, pages)
