"""`gated_delta_net` on the host: the launches of its four kernels, and the buffers between them."""

import torch
import triton

from infer.compute.backends.cuda.activations import Quantized, Twin, room_for, twin_of
from infer.compute.backends.cuda.delta_net_inputs import DeltaNetBuffers, Gates, multiply_keys, prepare_tokens
from infer.compute.backends.cuda.delta_net_recurrence import gate_heads, mix_runs
from infer.compute.backends.cuda.recurrent_pages import delta_net_pages
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.recurrent_cache import DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import DeltaNetWeights

# Bits depend on no tile's size. The interpreter takes about as long for many columns as for one.
COLUMNS = 256 if triton.knobs.runtime.interpret else 8  # of S, that a warp has
TILE = 8  # tokens that are multiplied with the keys of their page together
HEADS = 4  # of a token, whose results a program normalises


def gated_delta_net(projected: Activations, weights: DeltaNetWeights, layer: DeltaNetCache, step: Step) -> Activations:
    net, x, planes = weights.net, projected.floats, twin_of(projected).planes
    num_tokens, heads, norm = len(x), net.num_value_heads, weights.norm
    buffers, pages = _buffers(net, num_tokens, layer, x.device), delta_net_pages(layer)
    out = torch.empty(num_tokens, heads, net.value_dim, device=x.device)
    left = room_for(out, planes)
    to, leaves = (Quantized(out, out, out), 0) if left is None else (left.in_bytes(), planes)
    if not num_tokens:
        return Activations(out.flatten(1), Twin(planes, left))
    keys = {"KEY_HEADS": net.num_key_heads, "KEY_DIM": net.key_dim, "KEY_SIZE": triton.next_power_of_2(net.key_dim)}
    values = {"VALUE_HEADS": heads, "VALUE_DIM": net.value_dim}
    value_size, tokens = triton.next_power_of_2(net.value_dim), (step.rows, step.positions)
    prepare_tokens[num_tokens + 1, net.num_key_heads + heads](
        x, x.stride(0), weights.taps, _gates(weights), pages, buffers, *tokens, len(buffers.runs),
        **keys, **values, VALUE_SIZE=value_size, NUM_TAPS=net.num_taps, num_warps=4, **EXACT,
    )  # fmt: skip
    multiply_keys[num_tokens, net.num_key_heads](
        pages, buffers, *tokens, num_tokens, **keys, TILE=TILE, num_warps=max(4, keys["KEY_SIZE"] // 32), **EXACT
    )
    columns = min(COLUMNS, value_size)
    mix_runs[heads * triton.cdiv(net.value_dim, columns), len(buffers.runs)](
        pages, buffers, *tokens, num_tokens, **keys, **values,
        ARE_TILED=net.are_heads_tiled, COLUMNS=columns, num_warps=1, **EXACT,
    )  # fmt: skip
    gate_heads[num_tokens, triton.cdiv(heads, HEADS)](
        buffers.mixed, x[:, net.num_channels :], x.stride(0), norm.weight, norm.eps, out, to, step.rows,
        **values, VALUE_SIZE=value_size, HEADS=HEADS, LEAVES=leaves, num_warps=4, **EXACT,
    )  # fmt: skip
    return Activations(out.flatten(1), Twin(planes, left))


def _buffers(net: GatedDeltaNet, num_tokens: int, layer: DeltaNetCache, device: torch.device) -> DeltaNetBuffers:
    pages, heads = layer.pages, net.num_value_heads
    values = torch.empty(num_tokens, heads, net.value_dim, device=device)
    log_alphas = torch.empty(heads, num_tokens, device=device)
    num_runs = min(num_tokens, len(pages.table))
    return DeltaNetBuffers(
        keys_queries=torch.empty(num_tokens, net.num_key_heads, 2, net.key_dim, device=device),
        dots=torch.empty(num_tokens, net.num_key_heads, 2, pages.page_tokens, device=device),
        new_values=values,
        log_alphas=log_alphas,
        betas=torch.empty_like(log_alphas),
        mixed=torch.empty_like(values),
        runs=torch.empty(num_runs, 2, dtype=torch.int32, device=device),
    )


def _gates(weights: DeltaNetWeights) -> Gates:
    net = weights.net
    return Gates(weights.dt_bias, weights.decay, float(net.beta_scale), net.key_dim**-0.5)
