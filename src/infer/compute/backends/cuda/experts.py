"""`add_experts`: the router, the products of each token with its experts, and their weighted sum.

With few pairs for each expert, a program multiplies one pair. With more, programs multiply tiles of pairs that share
an expert. A pair has the same bits either way. A step of many tokens is divided, so that its pairs need little memory.
"""

from typing import Any, NamedTuple

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from infer.compute.backends.cuda.activations import Quantized, normalize, room_for
from infer.compute.backends.cuda.blocks import matrix_of
from infer.compute.backends.cuda.dense import FEW, TILES
from infer.compute.backends.cuda.epilogue import Output
from infer.compute.backends.cuda.expert_choice import TILE, Choice, Tiles, choose, tiles_of
from infer.compute.backends.cuda.expert_products import Stacks, add_pairs, expert_dense, expert_matmul, expert_matvec
from infer.compute.backends.cuda.layouts import BLOCK, Layout, PackedWeight
from infer.compute.backends.cuda.matmul import num_lanes
from infer.compute.backends.cuda.projection import (
    BLOCK_TILE,
    HAS_DP4A,
    MATMUL_TILE,
    MATVEC_TILE,
    add_result,
    dense_constants,
    form_of,
    in_form,
    multiply,
    norm_gate,
)
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.backends.gpu_memory import MOST_PAIRS
from infer.compute.backends.reference_parts import gated, gathered
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.weights import ExpertWeights, Norm, Projection, SharedExpert

FEW_PAIRS = 4  # per expert, up to which a program has one pair
_SUM_BLOCK = 1024  # columns that a program of `add_pairs` sums


class Input(NamedTuple):
    """Activations of pairs: a line of `floats` for each `per_line` neighbouring pairs, also in forms made so far."""

    floats: Tensor
    per_line: int
    forms: dict[int, Quantized]

    def in_form(self, form: int) -> Quantized:
        if form not in self.forms:
            self.forms[form] = in_form(self.floats, None, form, None)
        return self.forms[form]


def add_experts(
    residual: Float[Tensor, "tokens hidden"],
    norm: Norm | None,
    experts: ExpertWeights,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    """Add the experts to `residual` in place, and return it."""
    at_once = max(1, MOST_PAIRS // experts.router.num_chosen)
    for start in range(0, len(residual), at_once):
        _add_some(residual[start : start + at_once], norm, experts, post_norm, scale)
    return residual


def _add_some(
    residual: Float[Tensor, "tokens hidden"],
    norm: Norm | None,
    experts: ExpertWeights,
    post_norm: Norm | None,
    scale: float,
) -> None:
    norms, router = experts.norms, experts.router
    shared_x = normalize(residual, norm)
    router_x, x = (
        (shared_x, shared_x)
        if norms is None
        else (normalize(residual, norms.router), normalize(residual, norms.experts))
    )
    logits = torch.empty(len(x), router.num_experts, device=x.device)
    multiply(Activations(router_x), None, experts.router_logits, logits, has_few_rows=True)
    form = 0 if router.weighs_inputs else form_of(experts.gate.parts[0])
    choice, made = choose(logits, router, experts.correction, experts.expert_scales, x, form)
    given = Input(x, router.num_chosen, {} if made is None else {form: made})
    if router.weighs_inputs:
        given = Input((x[:, None] * choice.weights[:, :, None]).flatten(0, 1), 1, {})
    results = _results(given, experts, choice)
    shared, gates = _shared_results(shared_x, experts.shared, experts.activation)
    if norms is None and post_norm is None:
        _sum(results, choice, experts, shared, gates, residual, residual, scale)
        return
    y = torch.empty_like(x)
    if norms is None:
        _sum(results, choice, experts, shared, gates, None, y)
    else:
        _sum(results, choice, experts, None, None, None, y)
        y = normalize(y, norms.post_experts)
        if shared is not None:
            y += normalize(shared, norms.post_shared)
    add_result(residual, y, post_norm, scale)


def _results(given: Input, experts: ExpertWeights, choice: Choice) -> Float[Tensor, "pairs hidden"]:
    """Return down(activation(gate(x)) × up(x)) of each pair."""
    gate, up, down, count = experts.gate, experts.up, experts.down, experts.router.num_experts
    num_pairs, hidden = choice.experts.numel(), gate.out_features // count
    layouts = _layouts(gate) + _layouts(up) + _layouts(down)
    if num_pairs > FEW_PAIRS * count or any(layout.is_float for layout in layouts):
        choice = choice._replace(tiles=tiles_of(choice, count))
    inner = torch.empty(num_pairs, hidden, device=given.floats.device)
    forms = dict[int, Quantized]()
    if len(gate.parts) == 1 and _layouts(gate) == _layouts(up):
        left = room_for(inner, form_of(gate.parts[0])) if gate.shares is None else None
        _multiply(given, choice, gate, inner, count, up, experts.activation, left)
        forms = {} if left is None else {form_of(gate.parts[0]): left}
    else:
        other = torch.empty_like(inner)
        _multiply(given, choice, gate, inner, count)
        _multiply(given, choice, up, other, count)
        inner = gated(inner, other, experts.activation)
    inner = gathered(inner, gate.shares)
    results = torch.empty(num_pairs, down.out_features // count, device=inner.device)
    _multiply(Input(inner, 1, forms), choice, down, results, count)
    return gathered(results, down.shares)


def _multiply(
    x: Input,
    choice: Choice,
    stack: Projection,
    y: Float[Tensor, "pairs out"],
    num_experts: int,
    up: Projection | None = None,
    activation: Activation | None = None,
    left: Quantized | None = None,
) -> None:
    """Write each pair's product with its expert's rows of a stack, which may have parts of several types."""
    num_rows, row = y.shape[1], 0
    second = stack if up is None else up
    for weight, other in zip(stack.parts, second.parts, strict=True):
        assert isinstance(weight, PackedWeight)
        assert isinstance(other, PackedWeight)
        stacks = Stacks(
            gate=weight, up=other, up_bias=y if second.bias is None else second.bias[row:],
            first=row // num_rows, end=(row + weight.out_features) // num_rows,
        )  # fmt: skip
        output = Output.of(y, num_rows, None if stack.bias is None else stack.bias[row:])
        _launch(x, choice, stacks, output, left, activation or "")
        row += weight.out_features


def _launch(x: Input, choice: Choice, stacks: Stacks, y: Output, left: Quantized | None, gate: str) -> None:
    weight: PackedWeight = stacks.gate
    own = x.in_form(form_of(weight))
    to = (own if left is None else left).in_bytes()
    if weight.layout.is_float:
        assert choice.tiles is not None
        _launch_dense(own, x.per_line, choice.tiles, stacks, y, to, gate, leaves=left is not None)
        return
    constants: dict[str, Any] = {
        "PLANES": weight.planes, "LANES": num_lanes(weight.codes.shape[1]), "GATE": gate, "LEAVES": left is not None,
        "DP4A": HAS_DP4A,
    }  # fmt: skip
    if choice.tiles is None:
        tile, num_pairs = MATVEC_TILE if left is None else BLOCK_TILE, choice.experts.numel()
        expert_matvec[(num_pairs * triton.cdiv(y.num_rows, tile["ROWS"]),)](
            own, choice.experts, _matrices(stacks, torch.int32), y, to, num_pairs, x.per_line,
            **constants, **tile, **EXACT,
        )  # fmt: skip
    else:
        tile = MATMUL_TILE | {"TOKENS": TILE}
        expert_matmul[len(choice.tiles.experts), triton.cdiv(y.num_rows, tile["ROWS"])](
            own.in_bytes(), choice.tiles, _matrices(stacks, torch.uint8), y, to, x.per_line,
            **constants, **tile, **EXACT,
        )  # fmt: skip


def _launch_dense(
    x: Quantized, per_line: int, tiles: Tiles, stacks: Stacks, y: Output, to: Quantized, gate: str, *, leaves: bool
) -> None:
    weight: PackedWeight = stacks.gate
    tile, num_inputs = FEW if form_of(weight) else TILES[0][0], weight.in_features
    assert tile.TOKENS == TILE
    expert_dense[len(tiles.experts), triton.cdiv(y.num_rows, tile.ROWS)](
        x, tiles, stacks._replace(gate=weight.codes, up=stacks.up.codes), y, to, per_line, num_inputs,
        triton.cdiv(num_inputs, BLOCK), **dense_constants(weight, tile, gate, leaves=leaves),
    )  # fmt: skip


def _matrices(stacks: Stacks, unit: torch.dtype) -> Stacks:
    return stacks._replace(gate=matrix_of(stacks.gate, unit), up=matrix_of(stacks.up, unit))


def _layouts(stack: Projection) -> list[Layout]:
    return [part.layout for part in stack.parts if isinstance(part, PackedWeight)]


def _shared_results(
    x: Float[Tensor, "tokens hidden"], shared: SharedExpert | None, activation: Activation
) -> tuple[Float[Tensor, "tokens hidden"] | None, Float[Tensor, "tokens 1"] | None]:
    """Return the results of the expert for all tokens, and their gates before the sigmoid."""
    if shared is None:
        return None, None
    y = torch.empty(len(x), shared.down.out_features, device=x.device)
    multiply(norm_gate(x, None, shared.gate_up, activation), None, shared.down, y)
    gates = None
    if shared.gate is not None:
        gates = torch.empty(len(x), 1, device=x.device)
        multiply(Activations(x), None, shared.gate, gates, has_few_rows=True)
    return gathered(y, shared.down.shares), gates


def _sum(
    results: Float[Tensor, "pairs hidden"],
    choice: Choice,
    experts: ExpertWeights,
    shared: Float[Tensor, "tokens hidden"] | None,
    gates: Float[Tensor, "tokens 1"] | None,
    residual: Float[Tensor, "tokens hidden"] | None,
    out: Float[Tensor, "tokens hidden"],
    scale: float = 1.0,
) -> None:
    """Write the sums of the tokens' pairs to `out`. With `residual`, write (residual + sum) × scale."""
    num_tokens, features = out.shape
    add_pairs[num_tokens, triton.cdiv(features, _SUM_BLOCK)](
        results, choice.experts, choice.weights, results if shared is None else shared,
        results if gates is None else gates, out if residual is None else residual, out, features, scale,
        CHOSEN=experts.router.num_chosen, HAS_WEIGHTS=not experts.router.weighs_inputs, HAS_SHARED=shared is not None,
        HAS_GATE=gates is not None, ADD=residual is not None, BLOCK=_SUM_BLOCK, num_warps=4, **EXACT,
    )  # fmt: skip
