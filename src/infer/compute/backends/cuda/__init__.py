"""Kernels in Triton for CUDA. Ops without a kernel here are `reference`'s, taken by name.

Importing this package loads Triton. With TRITON_INTERPRET=1 set before that, the same kernels run on CPU tensors,
slowly.
"""

from infer.compute.backends.cuda.attention import attend
from infer.compute.backends.cuda.delta_net import gated_delta_net
from infer.compute.backends.cuda.delta_net_inputs import short_conv
from infer.compute.backends.cuda.embed import embed, gate_inputs, per_layer_inputs
from infer.compute.backends.cuda.experts import add_experts
from infer.compute.backends.cuda.layouts import prepare
from infer.compute.backends.cuda.projection import (
    head,
    norm_activate,
    norm_gate,
    norm_project,
    normalize,
    project_add,
)
from infer.compute.backends.cuda.sampling.sampler import choose_tokens
from infer.compute.backends.reference import add_text_inputs
from infer.compute.backends.reference_attention import attention_weights

__all__ = [
    "add_experts",
    "add_text_inputs",
    "attend",
    "attention_weights",
    "choose_tokens",
    "embed",
    "gate_inputs",
    "gated_delta_net",
    "head",
    "norm_activate",
    "norm_gate",
    "norm_project",
    "normalize",
    "per_layer_inputs",
    "prepare",
    "project_add",
    "short_conv",
]
