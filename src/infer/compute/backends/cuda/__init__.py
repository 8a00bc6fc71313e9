"""Kernels in Triton for CUDA. Ops without a kernel here are `reference`'s, taken by name.

Importing this package loads Triton. With TRITON_INTERPRET=1 set before that, the same kernels run on CPU tensors,
slowly.
"""

from infer.compute.backends.cuda.activations import normalize as normalize
from infer.compute.backends.cuda.attention import attend as attend
from infer.compute.backends.cuda.delta_net import gated_delta_net as gated_delta_net
from infer.compute.backends.cuda.delta_net_inputs import short_conv as short_conv
from infer.compute.backends.cuda.embed import embed as embed
from infer.compute.backends.cuda.embed import gate_inputs as gate_inputs
from infer.compute.backends.cuda.embed import per_layer_inputs as per_layer_inputs
from infer.compute.backends.cuda.experts import add_experts as add_experts
from infer.compute.backends.cuda.layouts import prepare as prepare
from infer.compute.backends.cuda.projection import head as head
from infer.compute.backends.cuda.projection import norm_activate as norm_activate
from infer.compute.backends.cuda.projection import norm_gate as norm_gate
from infer.compute.backends.cuda.projection import norm_project as norm_project
from infer.compute.backends.cuda.projection import project_add as project_add
from infer.compute.backends.cuda.sampling.sampler import choose_tokens as choose_tokens
from infer.compute.backends.reference import add_text_inputs as add_text_inputs
from infer.compute.backends.reference_attention import attention_weights as attention_weights
