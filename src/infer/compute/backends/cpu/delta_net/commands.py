"""The command of a gated delta net, from its operands."""

import torch

from infer.compute.backends.cpu.layouts import BLOCK, LANES
from infer.compute.backends.cpu.recording import scope
from infer.compute.backends.cpu.records import GATED_DELTA_NET, MAX_TAPS, delta_net_scratch_bytes
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Arguments
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.recurrent_cache import DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import DeltaNetWeights
from infer.errors import InvalidRequestError, UnsupportedModelError


def gated_delta_net(projected: Activations, weights: DeltaNetWeights, layer: DeltaNetCache, step: Step) -> Activations:
    net = weights.net
    with scope("delta_net", step=step) as run:
        arguments = _arguments(weights, layer)
        out = run.tensor("mixed", run.capacity, net.value_features)
        scratch_bytes = delta_net_scratch_bytes(net.key_dim, net.value_dim, layer.pages.page_tokens)
        scratch = run.tensor("delta net scratch", run.max_threads, scratch_bytes, dtype=torch.uint8)
        arguments.set(projected=projected.floats, num_columns=projected.floats.shape[1])
        arguments.set(scratch=scratch, scratch_bytes=scratch_bytes, out=out)
        run.append("mix", arguments, BARRIER, ".delta_net.recurrence:gated_delta_net")
        return Activations(out, run.offer("mixed", arguments, None) if net.value_dim % BLOCK == 0 else None)


def check_net(net: GatedDeltaNet) -> None:
    """Raise UnsupportedModelError if the kernels do not compute a net of this shape."""
    if net.key_dim % LANES or net.value_dim % LANES:
        dims = f"{net.key_dim} and {net.value_dim}"
        raise UnsupportedModelError(f"head dims of a gated delta net must be multiples of {LANES} on a CPU, got {dims}")
    if net.num_taps > MAX_TAPS:
        raise UnsupportedModelError(f"a gated delta net must have at most {MAX_TAPS} taps on a CPU, got {net.num_taps}")


def _arguments(weights: DeltaNetWeights, layer: DeltaNetCache) -> Arguments:
    net, pages = weights.net, layer.pages
    check_net(net)
    arguments = Arguments(GATED_DELTA_NET, num_channels=net.num_channels)
    arguments.set(num_key_heads=net.num_key_heads, num_value_heads=net.num_value_heads)
    arguments.set(key_dim=net.key_dim, value_dim=net.value_dim, are_heads_tiled=net.are_heads_tiled)
    arguments.set(taps=weights.taps, num_taps=net.num_taps, dt_bias=weights.dt_bias, decay=weights.decay)
    arguments.set(norm=weights.norm.weight.float().contiguous(), eps=weights.norm.eps, beta_scale=net.beta_scale)
    arguments.keeps.append(layer)
    cached = {name: getattr(layer, name) for name in ("inputs", "states", "keys", "updates", "decays")}
    for name, tensor in cached.items():
        is_apart = len(tensor) > 1 and tensor.stride(0) != layer.inputs.stride(0)  # a single page has no distance
        if tensor.dtype != torch.float32 or is_apart or not tensor[0].is_contiguous():
            raise InvalidRequestError(f"{name} of a page must be contiguous float32, at the same distance as inputs")
        arguments.set(**{name: tensor.data_ptr()})
    arguments.set(page_bytes=4 * layer.inputs.stride(0), page_tokens=pages.page_tokens)
    arguments.set(table=pages.table, table_stride=pages.table.shape[1])
    return arguments
