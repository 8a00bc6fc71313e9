"""Memory of matrices and of a recorded step's buffers, by the rules of `pack_kernels` and `operations`: no torch.

A buffer is identified by its role and its size, and layers share it, as in `recording`. Scratch is counted for the
threads that run, and logits for the lines that are used: the rest is never written, and so takes no memory.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import final

from infer.compute.backends.before_load import StepSizes
from infer.compute.backends.cpu.experts.pool_plan import plan_pools
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, PLANES, SPARE_TOKENS
from infer.compute.backends.cpu.records import (
    CHUNK,
    GROUPS_PER_THREAD,
    SPLIT_TOKENS,
    attend_scratch_bytes,
    delta_net_scratch_bytes,
)
from infer.compute.backends.cpu.thread_records import MAX_THREADS
from infer.compute.operands.architecture import Architecture, Layer
from infer.compute.operands.feed_forwards import Dense, Experts, PerLayerInput
from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.mixers import Attention, GatedDeltaNet, ShortConv

IS_TAKEN_AT_ONCE = False
Buffers = dict[tuple[str, int], int]  # role and size → bytes


def groups_per_unit(num_groups: int, num_threads: int, *, is_pair: bool) -> int:
    """Return the number of groups of rows that a thread takes at a time: 2 if there are enough, else 1.

    A tile computes two groups together. `is_pair` is for gate and up, whose groups are computed with each other.
    """
    return 2 if (num_groups % 2 == 0 if is_pair else num_groups >= GROUPS_PER_THREAD * num_threads) else 1


def are_paired(dense: Dense, types: Mapping[str, str], at: str) -> bool:
    """Return True if gate and up, in the feed-forward whose names begin with `at`, are multiplied together."""
    is_odd = has_odd_bias(dense.intermediate_size, dense.has_bias)
    return types[f"{at}.gate_proj.weight"] == types[f"{at}.up_proj.weight"] and not is_odd


def has_odd_bias(num_rows: int, has_bias: bool) -> bool:
    """Return True if a bias ends within a group of rows, so the kernel for gate and up would read beyond it."""
    return has_bias and num_rows % LANES != 0


def add_apart(layer: Layer) -> bool:
    """Return True if a layer has experts that add to a buffer of their own, because more is done with their sum."""
    experts, has_scale = layer.feed_forward, layer.has_scale and layer.per_layer_input is None  # the last part scales
    return isinstance(experts, Experts) and (experts.has_norms or layer.norms.after or has_scale)


def merged(types: Sequence[str], rows: Sequence[int]) -> list[list[int]]:
    """Return the indices of a projection's parts that are packed as one matrix: neighbours of one type.

    A part whose number of rows is not a multiple of 16 is packed by itself.
    """

    def key(index: int) -> tuple[str, int]:
        return types[index], -1 if rows[index] % LANES == 0 else index

    return [list(indices) for _, indices in groupby(range(len(types)), key)]


def stored_type(type: str) -> str:
    """Return the type itself: the kernels read all types."""
    return type


def matrix_bytes(type: str, rows: int, columns: int) -> int:
    """Return the bytes of a packed matrix: groups of rows, of which the last is padded."""
    return -(-rows // LANES) * LAYOUTS[type].group_bytes(columns)


def table_bytes(type: str, rows: int, columns: int) -> int:
    """Return 0: kernels read the rows of a table from its file."""
    return 0


def expert_store_bytes(architecture: Architecture, types: Mapping[str, str], most_bytes: int) -> int:
    pools = plan_pools(architecture, types, most_bytes)
    return sum(pool.num_bytes for pool in pools)


def workspace_bytes(
    architecture: Architecture, types: Mapping[str, str], sizes: StepSizes, num_logits: int
) -> tuple[int, int]:
    return sum(step_buffers(architecture, types, sizes, num_logits).values()), 0


def step_buffers(architecture: Architecture, types: Mapping[str, str], sizes: StepSizes, num_logits: int) -> Buffers:
    step = _Step(sizes)
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    step.floats("x", sizes.tokens, hidden)
    if architecture.has_state_input:
        step.floats("joined", sizes.tokens, 2 * hidden)
        step.project([types["model.layers.0.eh_proj.weight"]], [hidden], 2 * hidden)
    if architecture.per_layer_input is not None:
        _add_per_layer_inputs(step, architecture.per_layer_input, architecture, types)
    for index, layer in enumerate(architecture.layers):
        _add_layer(step, layer, architecture, types, f"model.layers.{index}.")
    if architecture.reads_whole_texts:
        return step.buffers
    head = types["model.embed_tokens.weight" if architecture.tied_embeddings else "lm_head.weight"]
    step.project([head], [vocab], hidden, tokens=sizes.logits)
    step.floats("logits", min(num_logits, sizes.logits), vocab)
    return step.buffers


def _add_layer(step: "_Step", layer: Layer, architecture: Architecture, types: Mapping[str, str], at: str) -> None:
    hidden = architecture.hidden_size
    if isinstance(layer.mixer, Attention):
        _add_attention(step, layer.mixer, architecture, types, at)
    elif isinstance(layer.mixer, ShortConv):
        _add_short_conv(step, layer.mixer, hidden, types, at)
    elif isinstance(layer.mixer, GatedDeltaNet):
        _add_delta_net(step, layer.mixer, hidden, types, at)
    if isinstance(layer.feed_forward, Dense):
        _add_dense(step, layer.feed_forward, hidden, types, at)
    elif isinstance(layer.feed_forward, Experts):
        _add_experts(step, layer.feed_forward, hidden, types, at)
        if add_apart(layer):
            step.floats("expert total", step.sizes.tokens, hidden)
    if layer.per_layer_input is not None:
        dim = layer.per_layer_input.dim
        step.project([types[at + "per_layer_input_gate.weight"]], [dim], hidden)
        step.floats("gated inputs", step.sizes.tokens, dim)
        step.project([types[at + "per_layer_projection.weight"]], [hidden], dim)
    if layer.norms.after or layer.norms.of_sum or layer.has_scale or layer.per_layer_input is not None:
        step.floats("before post norm", step.sizes.tokens, hidden)
    if layer.norms.before and layer.norms.are_centred:
        step.floats("normed", step.sizes.tokens, hidden)


def _add_per_layer_inputs(
    step: "_Step", own: PerLayerInput, architecture: Architecture, types: Mapping[str, str]
) -> None:
    wide, hidden = len(architecture.layers) * own.dim, architecture.hidden_size
    for role in ("per-layer inputs", "per-layer contexts"):
        step.floats(role, step.sizes.tokens, wide)
    step.project([types["model.per_layer_model_projection.weight"]], [wide], hidden)


def _add_attention(
    step: "_Step", attention: Attention, architecture: Architecture, types: Mapping[str, str], at: str
) -> None:
    tokens, context, hidden = step.sizes.tokens, step.sizes.context, architecture.hidden_size
    wide, projected = attention.query_features, attention.projected
    for parts in (projected,) if attention.is_causal else (projected[:1], projected[1:]):  # or queries by themselves
        names, rows = zip(*parts, strict=True)
        step.floats("projected", tokens, sum(rows))
        step.project([types[f"{at}self_attn.{which}_proj.weight"] for which in names], list(rows), hidden)
    step.floats("attended", tokens, wide)
    is_beyond = context > architecture.most_positions and attention.most_seen is None and attention.rope is not None
    step.floats("queries", (2 if is_beyond else 1) * tokens, wide)
    chunks = -(-context // CHUNK)
    step.floats("partials", min(tokens, SPLIT_TOKENS) * attention.num_heads * chunks, attention.head_dim + LANES)
    step.add("attention scratch", step.sizes.num_threads * attend_scratch_bytes(attention.head_dim))
    step.project([types[at + "self_attn.o_proj.weight"]], [hidden], wide, made_by="attended")


def _add_short_conv(step: "_Step", conv: ShortConv, hidden: int, types: Mapping[str, str], at: str) -> None:
    tokens, channels = step.sizes.tokens, conv.num_channels
    step.floats("projected", tokens, 3 * channels)
    step.project([types[at + "conv.in_proj.weight"]], [3 * channels], hidden)
    step.floats("mixed", tokens, channels)
    step.project([types[at + "conv.out_proj.weight"]], [hidden], channels, made_by="mixed")


def _add_delta_net(step: "_Step", net: GatedDeltaNet, hidden: int, types: Mapping[str, str], at: str) -> None:
    tokens, rows = step.sizes.tokens, net.projected
    step.floats("projected", tokens, sum(rows.values()))
    step.project([types[f"{at}linear_attn.{which}_proj.weight"] for which in rows], list(rows.values()), hidden)
    step.floats("mixed", tokens, net.value_features)
    scratch_bytes = delta_net_scratch_bytes(net.key_dim, net.value_dim, STATE_TOKENS)
    step.add("delta net scratch", step.sizes.num_threads * scratch_bytes)
    is_quantized = net.value_dim % BLOCK == 0
    output = types[at + "linear_attn.out_proj.weight"]
    step.project([output], [hidden], net.value_features, made_by="mixed" if is_quantized else None)


def _add_dense(
    step: "_Step", dense: Dense, hidden: int, types: Mapping[str, str], at: str, module: str = "mlp"
) -> None:
    tokens, inner = step.sizes.tokens, dense.intermediate_size
    if not dense.is_gated:
        step.floats("hidden", tokens, inner)
        step.project([types[f"{at}{module}.up_proj.weight"]], [inner], hidden)
        step.project([types[f"{at}{module}.down_proj.weight"]], [hidden], inner)
        return
    gate, up = (types[f"{at}{module}.{which}_proj.weight"] for which in ("gate", "up"))
    step.floats("hidden", tokens, inner)
    is_paired = are_paired(dense, types, at + module)
    if is_paired:
        step.activations([gate], hidden, tokens)
        step.unpacked(gate, inner, hidden, is_pair=True)
    else:
        step.project([gate, up], [inner, inner], hidden)
    step.project([types[f"{at}{module}.down_proj.weight"]], [hidden], inner, made_by="hidden" if is_paired else None)


def _add_experts(step: "_Step", experts: Experts, hidden: int, types: Mapping[str, str], at: str) -> None:
    tokens, router, inner = step.sizes.tokens, experts.router, experts.intermediate_size
    slots = tokens * router.num_chosen
    gate, up, down = (types[f"{at}mlp.experts.0.{which}_proj.weight"] for which in ("gate", "up", "down"))
    step.project(["F32"], [router.num_experts], hidden)
    for role in ("scores", "keys"):
        step.floats(f"expert {role}", tokens, router.num_experts)
    for role, count, size in (
        *((role, slots, 8) for role in ("chosen", "tokens")),
        *((role, slots, 4) for role in ("chosen_weights", "weights")),
        *((role, router.num_experts, 8) for role in ("counts", "starts", "active")),
        ("num_active", 1, 8),
    ):
        step.add(f"expert {role}", count * size)
    step.floats("expert hidden", slots, inner)
    for type_ in {gate, up}:
        step.slots("inputs", type_, hidden, slots)
    step.slots("hidden", down, inner, slots)
    is_paired = gate == up and not has_odd_bias(inner, experts.has_bias)
    for type_ in {gate, up}:
        step.unpacked(type_, inner, hidden, is_pair=is_paired)
    step.unpacked(down, hidden, inner)
    if experts.shared_size:
        if experts.has_shared_gate:
            step.project(["F32"], [1], hidden)
            step.floats("shared weights", tokens, 1)
        _add_dense(step, experts.shared, hidden, types, at, experts.shared_module)


@final
class _Step:
    def __init__(self, sizes: StepSizes) -> None:
        self.sizes = sizes
        self.buffers: Buffers = {}

    def add(self, role: str, size: int) -> None:
        self.buffers[role, size] = size

    def floats(self, role: str, count: int, features: int) -> None:
        self.add(role, 4 * count * features)

    def project(
        self, types: Sequence[str], rows: Sequence[int], inputs: int, *, tokens: int | None = None,
        made_by: str | None = None,
    ) -> None:  # fmt: skip
        """Add the buffers of a projection. `made_by` is the buffer that is x, if its producer can also write it
        quantised.
        """
        tokens = tokens or self.sizes.tokens
        if made_by is not None and inputs % BLOCK == 0:
            self.add(f"quantized {made_by}", (tokens + SPARE_TOKENS) * self._token_bytes(types[0], inputs))
        else:
            self.activations(types, inputs, tokens)
        for indices in merged(types, rows):
            self.unpacked(types[indices[0]], sum(rows[index] for index in indices), inputs)

    def activations(self, types: Sequence[str], inputs: int, tokens: int) -> None:
        for size in {self._token_bytes(type_, inputs) for type_ in types}:
            self.add("activations", (max(tokens, MAX_THREADS) + SPARE_TOKENS) * size)

    def slots(self, role: str, type_: str, inputs: int, count: int) -> None:
        """Add the activations of tokens of experts."""
        self.add(f"expert {role} quantized", (count + SPARE_TOKENS) * self._token_bytes(type_, inputs))

    def unpacked(self, type_: str, rows: int, inputs: int, *, is_pair: bool = False) -> None:
        """Add the unpacked weights of a core's matrix unit. They are small, and counted even without such a unit."""
        layout, num_threads = LAYOUTS[type_], self.sizes.num_threads
        if layout.is_float:
            return
        per_unit = groups_per_unit(-(-rows // LANES), num_threads, is_pair=is_pair)
        size = per_unit * (1 + is_pair) * layout.num_records(inputs) * layout.unpacked_bytes
        self.buffers["unpacked weights", size] = num_threads * size

    def _token_bytes(self, type_: str, inputs: int) -> int:
        layout = LAYOUTS[type_]
        return layout.token_bytes(instruction_set().form(layout, PLANES[self.sizes.precision]), inputs)
