"""What a recorded step's buffers take on a CPU, by the rules of `backends.cpu.commands`: no torch.

A buffer is known by its role and its size, and layers share it, as in `backends.cpu.recording`. Scratch is counted for
the threads that run, logits for the lines that are asked for: what is there for others is never touched, and so is no
memory yet.
"""

from collections.abc import Mapping, Sequence

from infer.architecture import Architecture, Layer
from infer.quantization.ggml_types import BLOCK_TYPES

STEP_TOKENS, STEP_LINES = 512, 64  # tokens of a step, and lines of logits
_BLOCK, _UNIT, _LANES = 32, 8, 16  # inputs of a record of quantised and of float activations; rows of a group
_SPLIT_TOKENS, _CHUNK, _LEAST_COPIES, _SPARE_TOKENS = 16, 256, 256, 3
_PLANES = {"exact": 2, "fast": 1}
_QUADS_BYTES, _VECTOR_BYTES = 512, 64
_VECTORS = {"Q2_K": 4, "Q3_K": 2, "Q6_K": 2, "Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}  # scales and minima; else one
_GROUPS_PER_THREAD = 8

Buffers = dict[tuple[str, int], int]  # role and size → bytes


def workspace_bytes(
    architecture: Architecture,
    types: Mapping[str, str],
    num_tokens: int,
    precision: str,
    num_threads: int,
    num_lines: int,
) -> int:
    """For rows of up to `num_tokens`, a line of logits each; `types` are those of the loaded matrices. Beyond the
    context they slide.
    """
    lines = min(num_lines, STEP_LINES)
    return sum(step_buffers(architecture, types, num_tokens, precision, num_threads, lines).values())


def step_buffers(
    architecture: Architecture,
    types: Mapping[str, str],
    num_tokens: int,
    precision: str,
    num_threads: int,
    num_lines: int = STEP_LINES,
) -> Buffers:
    step = _Step(_PLANES[precision], num_threads)
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    step.floats("x", STEP_TOKENS, hidden)
    for index, layer in enumerate(architecture.layers):
        is_beyond = num_tokens > architecture.most_positions and layer.window is None and layer.rope is not None
        _add_layer(step, layer, hidden, num_tokens, types, f"model.layers.{index}.", 2 if is_beyond else 1)
    head = types["model.embed_tokens.weight" if architecture.tied_embeddings else "lm_head.weight"]
    step.project([head], [vocab], hidden, tokens=STEP_LINES)
    step.floats("logits", num_lines, vocab)
    return step.buffers


def _add_layer(
    step: "_Step", layer: Layer, hidden: int, num_tokens: int, types: Mapping[str, str], at: str, query_sets: int
) -> None:
    wide, narrow, inner = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.intermediate_size
    qkv = [types[f"{at}self_attn.{which}_proj.weight"] for which in "qkv"]
    step.floats("projected", STEP_TOKENS, wide + 2 * narrow)
    step.project(qkv, [wide, narrow, narrow], hidden)
    step.floats("attended", STEP_TOKENS, wide)
    step.floats("queries", query_sets * STEP_TOKENS, wide)
    chunks = -(-num_tokens // _CHUNK)
    step.floats("partials", _SPLIT_TOKENS * layer.num_heads * chunks, layer.head_dim + _LANES)
    step.project([types[at + "self_attn.o_proj.weight"]], [hidden], wide, made_by="attended")
    if layer.has_post_norms:
        step.floats("before post norm", STEP_TOKENS, hidden)
    gate, up = (types[f"{at}mlp.{which}_proj.weight"] for which in ("gate", "up"))
    step.floats("hidden", STEP_TOKENS, inner)
    is_paired = gate == up and not (layer.has_mlp_bias and inner % _LANES)
    if is_paired:
        step.activations([gate], hidden)
        step.unpacked(gate, inner, hidden, is_pair=True)
    else:
        step.floats("gate and up", STEP_TOKENS, 2 * inner)
        step.project([gate, up], [inner, inner], hidden)
    step.project([types[at + "mlp.down_proj.weight"]], [hidden], inner, made_by="hidden" if is_paired else None)


class _Step:
    def __init__(self, planes: int, num_threads: int) -> None:
        self.planes, self.num_threads = planes, num_threads
        self.buffers: Buffers = {}

    def add(self, role: str, size: int) -> None:
        self.buffers[role, size] = size

    def floats(self, role: str, count: int, features: int) -> None:
        self.add(role, 4 * count * features)

    def project(
        self, types: Sequence[str], rows: Sequence[int], inputs: int, *, tokens: int = STEP_TOKENS,
        made_by: str | None = None,
    ) -> None:  # fmt: skip
        """`made_by` is the buffer that x is, if what writes it can quantise it on the way."""
        if made_by is not None and inputs % _BLOCK == 0 and not BLOCK_TYPES[types[0]].is_float:
            self.add(f"quantized {made_by}", (tokens + _SPARE_TOKENS) * self._token_bytes(types[0], inputs))
        else:
            self.activations(types, inputs, tokens)
        for type_, count in _merged(types, rows):
            self.unpacked(type_, count, inputs)

    def activations(self, types: Sequence[str], inputs: int, tokens: int = STEP_TOKENS) -> None:
        for size in {self._token_bytes(type_, inputs) for type_ in types}:
            self.add("activations", (max(tokens, _LEAST_COPIES) + _SPARE_TOKENS) * size)

    def unpacked(self, type_: str, rows: int, inputs: int, *, is_pair: bool = False) -> None:
        """Of a core's matrix unit; without one it is not there, and it is small."""
        if BLOCK_TYPES[type_].is_float:
            return
        groups = -(-rows // _LANES)
        is_double = groups % 2 == 0 if is_pair else groups >= _GROUPS_PER_THREAD * self.num_threads
        tiles = (1 + is_double) * (1 + is_pair)
        record = _QUADS_BYTES + _VECTOR_BYTES * _VECTORS.get(type_, 1)
        size = tiles * -(-inputs // _BLOCK) * record
        self.buffers["unpacked weights", size] = self.num_threads * size

    def _token_bytes(self, type_: str, inputs: int) -> int:
        if BLOCK_TYPES[type_].is_float:
            return -(-inputs // _UNIT) * 4 * _UNIT
        return -(-inputs // _BLOCK) * (_BLOCK * self.planes + 16)


def _merged(types: Sequence[str], rows: Sequence[int]) -> list[tuple[str, int]]:
    """Parts as they are packed: neighbours of one type become one where groups of rows allow."""
    merged: list[tuple[str, int]] = []
    for type_, count in zip(types, rows, strict=True):
        if merged and merged[-1][0] == type_ and merged[-1][1] % _LANES == count % _LANES == 0:
            merged[-1] = (type_, merged[-1][1] + count)
        else:
            merged.append((type_, count))
    return merged
