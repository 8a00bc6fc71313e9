"""List of the CPU kernels that the steps of a model need, from its headers. A load compiles them ahead. No torch.

`operations` decides. A kernel that this list lacks is compiled when it is first used, while an answer waits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

from infer.compute.backends.cpu.compile import addresses
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.host import kernel_cache
from infer.compute.backends.cpu.isa import BF16_PAIRS, InstructionSet, instruction_set, stored_form
from infer.compute.backends.cpu.layouts import LAYOUTS, PAIRS, PLANES
from infer.compute.backends.cpu.workspace import add_apart, are_paired, has_odd_bias
from infer.compute.operands.architecture import Architecture, Layer, ModelOutline
from infer.compute.operands.feed_forwards import PER_LAYER_TABLE, Dense, Experts
from infer.compute.operands.mixers import GatedDeltaNet, ShortConv

_SAMPLING = (
    *("stage_1_edit:scan", "stage_2_candidates:narrow", "stage_3_filter_and_draw:choose"),
    *("stage_4_logprobs:score", "stage_4_logprobs:merge"),
    *("advance:advance", "advance:await_mask", "advance:accept"),
)


def begin_compiling(make_outline: Callable[[], ModelOutline]) -> AbstractContextManager[None]:
    """Begin compiling a model's kernels, for its load within the context, on a machine that has none yet."""
    if not kernel_cache.is_empty():
        return nullcontext()
    return addresses.compiling_ahead(needed_kernels(make_outline(), instruction_set()))


def kernel_kind(model: ModelOutline) -> str:
    """Return the name of a model's kernels in fingerprints.

    All instruction sets compute the same bits, so it names none of them, unless one multiplies BF16 by BF16.
    """
    isa = instruction_set()
    products = [kernel.variant[:2] for kernel in needed_kernels(model, isa) if kernel.record.endswith("MATMUL")]
    forms = {stored_form(model.kv_type, model.precision, layer.head_dim) for layer in model.architecture.attention}
    has_pairs = any(isa.form(LAYOUTS[str(type_)], int(planes)) == PAIRS for type_, planes in products)
    return f"cpu {isa.name}" if has_pairs or BF16_PAIRS in forms else "cpu"


def needed_kernels(model: ModelOutline, isa: InstructionSet) -> Iterator[Kernel]:
    architecture, types, kv_type, precision, reads_experts = model
    for name in ("serve", "run", "close"):
        yield Kernel(f".threads.worker_loop:{name}", (), "JOB")
    yield Kernel(".threads.worker_loop:publish", (), "FLAG")
    yield Kernel(".threads.worker_loop:dispatch", (), "TABLE")
    for name in () if architecture.reads_whole_texts else _SAMPLING:
        yield Kernel(f".sampling.{name}", (), "SAMPLE")
    yield from _of_weights(architecture, types, precision, isa)
    yield Kernel(".activations:normalize", (), "NORMALIZE")
    yield Kernel(".matmul.matmul:make_store", ("plain",), "EPILOGUE")
    if architecture.logit_softcap is not None:
        yield Kernel(".matmul.matmul:make_store", ("capped",), "EPILOGUE", "capped logits")
    if architecture.has_state_input:
        yield Kernel(".matmul.matmul:make_store", ("add",), "EPILOGUE")
    for index, layer in enumerate(architecture.layers):
        yield from _of_layer(layer, types, f"model.layers.{index}.")
        if isinstance(layer.feed_forward, Experts):
            yield from _of_experts(layer.feed_forward, types, f"model.layers.{index}.mlp", precision, isa)
    if reads_experts and any(isinstance(layer.feed_forward, Experts) for layer in architecture.layers):
        for name in ("choose", "fetch", "check"):
            yield Kernel(f".experts.kernels:{name}", (), "EXPERT_FETCH", "experts from a file")
    for form in {stored_form(kv_type, precision, layer.head_dim): None for layer in architecture.attention}:
        yield from kernels_of_cache(form)
    yield Kernel(".attention.attention:finish", (), "ATTEND")


def kernels_of_cache(kv_type: str) -> Iterator[Kernel]:
    """Yield the kernels of a kv type, or of the form that `stored_form` names."""
    yield Kernel(".attention.rotation:make_rotate", (kv_type,), "ATTEND", f"kv type {kv_type}")
    yield Kernel(".attention.attention:make_attend_few", (kv_type,), "ATTEND", f"kv type {kv_type}")
    if kv_type != "f32":
        yield Kernel(".attention.attention:make_attend_many", (kv_type,), "ATTEND", f"kv type {kv_type}")


def _of_weights(
    architecture: Architecture, types: Mapping[str, str], precision: str, isa: InstructionSet
) -> Iterator[Kernel]:
    table = "model.embed_tokens.weight"
    yield Kernel(".weights.embed:make_embed", (types[table], isa.inputs), "EMBED", f"weights {types[table]}")
    kept = types.get(PER_LAYER_TABLE)
    if kept is not None:
        yield Kernel(".weights.embed:make_embed_from_file", (kept,), "EMBED_FROM_FILE", "per-layer embeddings")
    for type_ in sorted({type_ for name, type_ in types.items() if name != PER_LAYER_TABLE}):
        yield Kernel(".weights.pack_kernels:make_pack", (type_, isa.inputs), "PACK", f"weights {type_}")
    others = {name for name in types if ".mlp.experts." in name}  # multiplied by kernels of their own
    others |= {PER_LAYER_TABLE} if architecture.tied_embeddings else {PER_LAYER_TABLE, table}
    multiplied = {type_ for name, type_ in types.items() if name not in others}
    for type_ in sorted(multiplied):
        reason = f"weights {type_}" if precision == "exact" else f"precision {precision}"
        yield Kernel(".matmul.matmul:make_matmul", (type_, PLANES[precision], isa.name), "MATMUL", reason)


def _of_layer(layer: Layer, types: Mapping[str, str], at: str) -> Iterator[Kernel]:
    if isinstance(layer.mixer, ShortConv):
        yield Kernel(".delta_net.inputs:short_conv", (), "SHORT_CONV", "short convolutions")
    elif isinstance(layer.mixer, GatedDeltaNet):
        yield Kernel(".delta_net.recurrence:gated_delta_net", (), "GATED_DELTA_NET", "gated delta nets")
    if layer.norms.are_centred or layer.norms.of_sum:
        yield Kernel(".activations:sum_norm", (), "SUM_NORM", "norms of sums")
    if layer.norms.after or layer.has_scale or layer.per_layer_input is not None or add_apart(layer):
        yield Kernel(".activations:add_rows", (), "ADD_ROWS", "post norms")
    if not (layer.norms.after or layer.norms.of_sum):
        yield Kernel(".matmul.matmul:make_store", ("add",), "EPILOGUE")
    if layer.per_layer_input is not None:
        yield Kernel(
            ".matmul.matmul:make_store", (f"gate_{layer.per_layer_input.activation}",), "EPILOGUE", "per-layer inputs"
        )
    dense = layer.feed_forward
    if add_apart(layer):
        yield Kernel(".activations:clear_rows", (), "ADD_ROWS", "experts")
    if isinstance(dense, Dense) and not dense.is_gated:
        kind = f"only_{dense.activation}"
        yield Kernel(".matmul.matmul:make_store", (kind,), "EPILOGUE", f"activation {dense.activation}")
    elif isinstance(dense, Dense):
        maker = "gate" if are_paired(dense, types, at + "mlp") else "store"
        yield Kernel(f".matmul.matmul:make_{maker}", (dense.activation,), "EPILOGUE", f"activation {dense.activation}")


def _of_experts(
    experts: Experts, types: Mapping[str, str], at: str, precision: str, isa: InstructionSet
) -> Iterator[Kernel]:
    gate, up, down = (types[f"{at}.experts.0.{which}_proj.weight"] for which in ("gate", "up", "down"))
    reason, planes = "experts", PLANES[precision]
    yield Kernel(".experts.kernels:make_route", (experts.router.scores,), "ROUTING", reason)
    yield Kernel(".experts.kernels:group", (), "ROUTING", reason)
    yield Kernel(".experts.kernels:inputs", (), "EXPERT_INPUTS", reason)
    for type_ in sorted({gate, up}):
        yield Kernel(".experts.kernels:make_multiply", (type_, planes, isa.name, "wide"), "EXPERT_MATMUL", reason)
    yield Kernel(".experts.kernels:make_multiply", (down, planes, isa.name, "narrow"), "EXPERT_MATMUL", reason)
    is_paired = gate == up and not has_odd_bias(experts.intermediate_size, experts.has_bias)
    maker = "gate" if is_paired else "store"
    yield Kernel(f".matmul.matmul:make_{maker}", (experts.activation,), "EPILOGUE", f"activation {experts.activation}")
    stored = "by_token" if experts.router.weighs_inputs else "weighted"
    yield Kernel(".matmul.matmul:make_store", (stored,), "EPILOGUE", reason)
    if experts.shared_size:
        shared_at = f"{at.removesuffix('mlp')}{experts.shared_module}"
        maker = "gate" if are_paired(experts.shared, types, shared_at) else "store"
        yield Kernel(f".matmul.matmul:make_{maker}", (experts.activation,), "EPILOGUE", reason)
        kind = "plain" if experts.has_norms else "sigmoid" if experts.has_shared_gate else "add"
        yield Kernel(".matmul.matmul:make_store", (kind,), "EPILOGUE", reason)
