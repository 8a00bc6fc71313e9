"""Config → the experts of a layer, one function per family that has experts."""

from dataclasses import replace
from typing import Literal

from infer.compute.operands.feed_forwards import MAX_EXPERTS, Activation, Experts, Router
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, flag, positive


def qwen_experts(config: Config, activation: Activation) -> Experts:
    """Return the experts of Qwen2-MoE and Qwen3-MoE. Only the former has a shared expert, with a gate."""
    shared_size = count(config, "shared_expert_intermediate_size") if "shared_expert_intermediate_size" in config else 0
    return Experts(
        _router(config, scores="softmax", is_normalized=flag(config, "norm_topk_prob")),
        count(config, "moe_intermediate_size"),
        activation,
        shared_size=shared_size,
        has_shared_gate=bool(shared_size),
    )


def flint_experts(config: Config, activation: Activation) -> Experts:
    """Return Flint's experts: chosen by a sigmoid, with a shared expert without a gate."""
    router = _router(config, scores="sigmoid", is_normalized=flag(config, "norm_topk_prob"))
    return replace(qwen_experts(config, activation), router=router, has_shared_gate=False)


def kolibri_experts(config: Config, activation: Activation) -> Experts:
    """Return Kolibri's experts: chosen by corrected logits, with a shared expert without a gate."""
    router = _router(config, scores="sigmoid_of_chosen", is_normalized=flag(config, "norm_topk_prob"))
    router = replace(router, has_correction=True)
    return replace(qwen_experts(config, activation), router=router, has_shared_gate=False)


def olmoe_experts(config: Config, activation: Activation) -> Experts:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModelError(f"clip_qkv={config['clip_qkv']!r:.60} is not supported for olmoe: it must be null")
    router = _router(config, scores="softmax", is_normalized=flag(config, "norm_topk_prob"))
    return Experts(router, count(config, "intermediate_size"), activation)


def mixtral_experts(config: Config, activation: Activation) -> Experts:
    router = _router(config, scores="softmax", is_normalized=True)
    return Experts(router, count(config, "intermediate_size"), activation)


def granite_experts(config: Config, activation: Activation) -> Experts:
    router = _router(config, scores="softmax_of_chosen")
    shared = count(config, "shared_intermediate_size") if config.get("shared_intermediate_size") else 0
    return Experts(router, count(config, "intermediate_size"), activation, shared_size=shared)


def gpt_oss_experts(config: Config, activation: Activation) -> Experts:
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if positive(config, name, only) != only:
            raise UnsupportedModelError(f"{name}={config[name]!r:.60} is not supported for gpt_oss: it must be {only}")
    router = replace(_router(config, scores="softmax_of_chosen"), has_bias=True)
    return Experts(router, count(config, "intermediate_size"), "clamped_swiglu", has_bias=True)


def glm_experts(config: Config, activation: Activation) -> Experts:
    """Return the experts of GLM-4.5 to 4.7: chosen by a corrected sigmoid, with a shared expert without a gate."""
    if config.get("n_group") not in (None, 1):
        refused = f"n_group={config['n_group']!r:.60}"
        raise UnsupportedModelError(f"{refused} is not supported for {config['model_type']}: it must be 1")
    renamed = {"num_experts": config.get("n_routed_experts"), **config}
    router = replace(
        _router(renamed, scores="sigmoid", is_normalized=flag(config, "norm_topk_prob")),
        floor=1e-20,
        scale=positive(config, "routed_scaling_factor", 1.0),
        has_correction=True,
    )
    size = count(config, "moe_intermediate_size")
    return Experts(router, size, activation, shared_size=size * count(config, "n_shared_experts", default=1))


def afmoe_experts(config: Config, activation: Activation) -> Experts:
    """Return AFMoE's experts, which differ from GLM's in the names of settings."""
    own = {"routed_scaling_factor": config.get("route_scale"), "n_shared_experts": config.get("num_shared_experts")}
    return glm_experts({**config, **own, "norm_topk_prob": True}, activation)


def minimax_experts(config: Config, activation: Activation) -> Experts:
    """Return MiniMax M2's experts: chosen by a corrected sigmoid."""
    router = replace(_router(config, scores="sigmoid", is_normalized=True), has_correction=True)
    return Experts(router, count(config, "intermediate_size"), activation)


def hunyuan_experts(config: Config, activation: Activation) -> Experts:
    """Return Hunyuan's experts, with a shared one of the same size."""
    for name in ("num_experts", "moe_topk"):
        if isinstance(given := config.get(name), list) and len(set(given)) != 1:
            raise UnsupportedModelError(f"{name}={given!r:.60} is not supported: it must be equal for all layers")
    usual = {"num_experts": config.get("num_experts"), "num_experts_per_tok": config.get("moe_topk")}
    usual = {name: each[0] if isinstance(each, list) else each for name, each in usual.items()}
    size, router = count(config, "intermediate_size"), _router(usual, scores="softmax", is_normalized=True)
    return Experts(router, size, activation, shared_size=size)


def ernie_experts(config: Config, activation: Activation) -> Experts:
    """Return ERNIE 4.5's experts: chosen by a corrected softmax, with shared experts in one."""
    if flag(config, "use_bias"):
        raise UnsupportedModelError("use_bias=true is not supported for ernie4_5_moe: its head would have a bias, too")
    router = replace(_router(config, scores="softmax", is_normalized=True), has_correction=True)
    size, num_shared = count(config, "moe_intermediate_size"), config.get("moe_num_shared_experts")
    shared = size * count(config, "moe_num_shared_experts") if num_shared else 0
    return Experts(router, size, activation, shared_size=shared)


def laguna_experts(config: Config, activation: Activation) -> Experts:
    """Return Laguna's experts: chosen by a corrected sigmoid, with a shared expert without a gate."""
    for name in ("moe_apply_router_weight_on_input", "moe_router_logit_softcapping"):
        if config.get(name):
            raise UnsupportedModelError(f"{name}={config[name]!r:.60} is not supported for laguna")
    router = replace(
        _router(config, scores="sigmoid", is_normalized=True),
        scale=positive(config, "moe_routed_scaling_factor", 1.0),
        has_correction=True,
    )
    size, shared = (count(config, f"{name}_intermediate_size") for name in ("moe", "shared_expert"))
    return Experts(router, size, activation, shared_size=shared)


def llama4_experts(config: Config, activation: Activation) -> Experts:
    """Return Llama 4's experts: their inputs are multiplied by the sigmoid of logits, and there is a shared expert."""
    router = replace(_router(config, scores="sigmoid_of_chosen"), weighs_inputs=True)
    size = count(config, "intermediate_size")
    return Experts(router, size, activation, shared_size=size)


def lfm2_experts(config: Config, activation: Activation) -> Experts:
    router = replace(
        _router(config, scores="sigmoid", is_normalized=flag(config, "norm_topk_prob")),
        floor=1e-6,
        scale=positive(config, "routed_scaling_factor", 1.0),
        has_correction=flag(config, "use_expert_bias"),
    )
    return Experts(router, count(config, "moe_intermediate_size"), activation)


def gemma4_experts(config: Config, activation: Activation) -> Experts | None:
    """Return the experts of Gemma 4's 26B-A4B, in parallel to the layer's usual MLP; None if a model has none."""
    if not flag(config, "enable_moe_block"):
        return None
    router = replace(_router(config, scores="softmax", is_normalized=True), has_expert_scales=True)
    size, shared_size = count(config, "moe_intermediate_size"), count(config, "intermediate_size")
    return Experts(router, size, activation, shared_size=shared_size, has_norms=True)


def every_layer_is_sparse(config: Config, index: int) -> bool:
    return True


def is_sparse_in_glm(config: Config, index: int) -> bool:
    """Return True for every layer after the first `first_k_dense_replace`."""
    return index >= _num_dense(config, "first_k_dense_replace", 1)


def is_sparse_in_lfm2(config: Config, index: int) -> bool:
    """Return True for every layer after the first `num_dense_layers`."""
    return index >= _num_dense(config, "num_dense_layers", 2)


def is_sparse_as_listed(config: Config, index: int) -> bool:
    """Return True for every layer that `mlp_layer_types` marks as sparse; without the list, for every layer."""
    given = config.get("mlp_layer_types")
    if given is None:
        return True
    num_layers = count(config, "num_hidden_layers")
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or not all(each in ("dense", "sparse") for each in given)
    ):
        raise ModelError(f"config: mlp_layer_types must list {num_layers} times dense or sparse, got {given!r:.60}")
    return bool(given[index] == "sparse")


def is_sparse_in_exaone(config: Config, index: int) -> bool:
    """Return True for every layer that `mlp_layer_types` marks as sparse; without the list, as in GLM."""
    is_listed = config.get("mlp_layer_types") is not None
    return (is_sparse_as_listed if is_listed else is_sparse_in_glm)(config, index)


def is_sparse_in_ernie(config: Config, index: int) -> bool:
    """Return True for every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`."""
    last = config.get("moe_layer_end_index", -1)
    if type(last) is not int:
        raise ModelError(f"config: moe_layer_end_index must be a whole number, got {last!r:.60}")
    is_within = _num_dense(config, "moe_layer_start_index", 1) <= index and (last == -1 or index <= last)
    return is_within and (index + 1) % count(config, "moe_layer_interval", default=1) == 0


def is_sparse_in_laguna(config: Config, index: int) -> bool:
    """Return True for every layer that `mlp_layer_types` marks as sparse; without the list, for all but the first."""
    return is_sparse_as_listed(config, index) if config.get("mlp_layer_types") is not None else index > 0


def is_sparse_in_llama4(config: Config, index: int) -> bool:
    """Return True for every layer that `moe_layers` lists; without the list, for every nth layer of the step."""
    listed = config.get("moe_layers")
    if listed is None:
        return (index + 1) % count(config, "interleave_moe_layer_step", default=1) == 0
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise ModelError(f"config: moe_layers must list the numbers of layers, got {listed!r:.60}")
    return index in listed


def _num_dense(config: Config, name: str, default: int) -> int:
    first = config.get(name, default)
    if type(first) is not int or first < 0:
        raise ModelError(f"config: {name} must be a whole number of at least 0, got {first!r:.60}")
    return first


def is_sparse_in_qwen(config: Config, index: int) -> bool:
    """Return True for every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise ModelError(f"config: mlp_only_layers must list the numbers of layers, got {dense!r:.60}")
    return index not in dense and (index + 1) % count(config, "decoder_sparse_step", default=1) == 0


def _router(
    config: Config,
    *,
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"],
    is_normalized: bool = False,
) -> Router:
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"  # the same setting
    num_experts = count(config, name, maximum=MAX_EXPERTS)
    num_chosen = count(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"config: num_experts_per_tok must be at most {name}={num_experts}, got {num_chosen}")
    return Router(num_experts, num_chosen, scores, is_normalized)
