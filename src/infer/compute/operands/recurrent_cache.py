"""Cached values of layers with a state, by page. `kv_layout` has the same for keys and values."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

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
