"""Config → the experts of a layer, by the rules of its family, and the layers that have experts."""

from dataclasses import dataclass
from typing import Literal

from infer.compute.operands.feed_forwards import MAX_EXPERTS, Activation, Experts, Router
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, flag, layer_numbers, of_layers, positive

NUM_SHARED, SHARED_SIZE = "n_shared_experts", "shared_expert_intermediate_size"


@dataclass(frozen=True)
class ExpertRules:
    """The experts of a family: values of `Router` and `Experts`, or names of the settings that have them.

    A truth value that is a name is true if the setting of this name is.
    """

    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"] = "softmax"
    is_normalized: bool | str = "norm_topk_prob"
    floor: float = 0.0
    is_scaled: bool = False  # by `routed_scaling_factor`
    has_correction: bool | str = False
    weighs_inputs: bool = False
    size: str = "moe_intermediate_size"  # the setting with the size of an expert
    shared: str | None = None  # the setting with the size of the shared expert, or with the number of experts in it
    has_shared_gate: bool = False
    activation: Activation | None = None  # None: that of the config
    has_bias: bool = False
    has_norms: bool = False  # the router also has a scale for each expert
    setting: str | None = None  # the setting that decides if there are experts


def make_experts(config: Config, activation: Activation, rules: ExpertRules) -> Experts | None:
    """Return the experts of a config, or None if it has none."""
    if rules.setting is not None and not flag(config, rules.setting):
        return None
    size, shared_size = count(config, rules.size), 0
    if rules.shared is not None and config.get(rules.shared):
        shared_size = count(config, rules.shared) * (size if rules.shared == NUM_SHARED else 1)
    return Experts(
        _router(config, rules),
        size,
        rules.activation or activation,
        has_bias=rules.has_bias,
        shared_size=shared_size,
        has_shared_gate=rules.has_shared_gate and shared_size > 0,
        has_norms=rules.has_norms,
    )


def _router(config: Config, rules: ExpertRules) -> Router:
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"  # the same setting
    num_experts = count(_of_all_layers(config, name), name, maximum=MAX_EXPERTS)
    num_chosen = count(_of_all_layers(config, "num_experts_per_tok"), "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"config: num_experts_per_tok must be at most {name}={num_experts}, got {num_chosen}")
    return Router(
        num_experts,
        num_chosen,
        rules.scores,
        is_normalized=_is_true(config, rules.is_normalized),
        floor=rules.floor,
        scale=positive(config, "routed_scaling_factor", 1.0) if rules.is_scaled else 1.0,
        has_bias=rules.has_bias,
        has_correction=_is_true(config, rules.has_correction),
        has_expert_scales=rules.has_norms,
        weighs_inputs=rules.weighs_inputs,
    )


def _is_true(config: Config, value: bool | str) -> bool:
    return flag(config, value) if isinstance(value, str) else value


def _of_all_layers(config: Config, name: str) -> Config:
    """Return {name: the setting}.

    The config may have a number for all layers, or a list of equal numbers, one per layer.
    """
    given = config.get(name)
    if not isinstance(given, list):
        return {name: given}
    if given != given[:1] * len(given):
        raise UnsupportedModelError(f"{name}={given!r:.60} is not supported: it must be equal for all layers")
    return {name: given[0] if given else None}


def is_sparse_after_the_first(config: Config, index: int) -> bool:
    """Return True for every layer after the first `first_k_dense_replace`."""
    first = config.get("first_k_dense_replace", 1)
    if type(first) is not int or first < 0:
        raise ModelError(f"config: first_k_dense_replace must be a whole number of at least 0, got {first!r:.60}")
    return index >= first


def is_sparse_as_listed(config: Config, index: int) -> bool:
    """Return True for every layer that `mlp_layer_types` marks as sparse; without the list, for all after the first."""
    num_layers = count(config, "num_hidden_layers")
    rule, kinds = f"{num_layers} times dense or sparse", ("dense", "sparse")
    given = of_layers(config, "mlp_layer_types", num_layers, rule, lambda each: each in kinds)
    return is_sparse_after_the_first(config, index) if given is None else bool(given[index] == "sparse")


def is_sparse_in_ernie(config: Config, index: int) -> bool:
    """Return True for the layers of the interval after the first ones, up to `moe_layer_end_index`."""
    last = config.get("moe_layer_end_index", -1)
    if type(last) is not int:
        raise ModelError(f"config: moe_layer_end_index must be a whole number, got {last!r:.60}")
    is_within = is_sparse_after_the_first(config, index) and (last == -1 or index <= last)
    return is_within and is_sparse_in_llama4(config, index)


def is_sparse_in_llama4(config: Config, index: int) -> bool:
    """Return True for every layer that `moe_layers` lists; without the list, for every nth layer of the step."""
    if config.get("moe_layers") is not None:
        return index in layer_numbers(config, "moe_layers")
    return (index + 1) % count(config, "interleave_moe_layer_step", default=1) == 0


def is_sparse_in_qwen(config: Config, index: int) -> bool:
    """Return True for every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
    is_dense = bool(config.get("mlp_only_layers")) and index in layer_numbers(config, "mlp_only_layers")
    return not is_dense and (index + 1) % count(config, "decoder_sparse_step", default=1) == 0
