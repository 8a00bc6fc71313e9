"""The keys of GGUF's metadata, and the settings of Hugging Face's config that they stand for.

An importer makes settings from keys, and an exporter makes keys from settings, by this one list.
"""

from typing import Any, Literal, NamedTuple

from infer.files.gguf.gguf_values import GGUFValues


class Key(NamedTuple):
    """A key under the architecture's name, and its setting.

    `kind` is the type that an importer reads; keys without a kind have rules of their own. A file needs the key if
    there is no `default`. `needs` is "" for keys of all files. Keys that need "experts" are read if a file has experts,
    "itself" if a file has the key, and "form" if the row of the architecture lists it.
    """

    key: str
    name: str
    kind: Literal["count", "real", "flag", "any"] | None = None
    default: Any = None
    needs: Literal["", "experts", "itself", "form"] = ""

    def read(self, values: GGUFValues) -> Any:
        """Return the value in a file. Raises ModelFormatError for another type."""
        if self.kind == "count":
            return values.count(self.key, self.default)
        if self.kind == "real":
            return values.real(self.key, self.default)
        found = values.get(self.key, self.default)
        return bool(found) if self.kind == "flag" else found


EPS, RMS_EPS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
_SIZE_KEYS = (
    Key("block_count", "num_hidden_layers"),
    Key("context_length", "max_position_embeddings", "count"),
    Key("embedding_length", "hidden_size", "count"),
    Key("vocab_size", "vocab_size"),
)
DRAFTING_LAYERS = "nextn_predict_layers"  # they follow the others, and `block_count` includes them
KEYS = (  # in the order of a file
    *_SIZE_KEYS,
    Key(DRAFTING_LAYERS, "num_nextn_predict_layers", needs="form"),
    Key(RMS_EPS, "rms_norm_eps", "real"),
    Key("attention.head_count", "num_attention_heads"),
    Key("attention.head_count_kv", "num_key_value_heads"),
    Key("attention.key_length", "head_dim"),
    Key("attention.value_length", "head_dim"),
    Key("attention.key_length_swa", "windowed_head_dim", needs="form"),
    Key("attention.value_length_swa", "windowed_head_dim", needs="form"),
    Key("attention.shared_kv_layers", "num_kv_shared_layers", "any", 0, "form"),
    Key("embedding_length_per_layer_input", "hidden_size_per_layer_input", "any", 0, "form"),
    Key("attention.sliding_window", "sliding_window"),
    Key("attention.sliding_window_pattern", "sliding_window_pattern"),
    Key("feed_forward_length", "intermediate_size"),
    Key("use_parallel_residual", "use_parallel_residual", "flag", True, "form"),
    Key("expert_count", "num_experts", "count", needs="experts"),
    Key("expert_used_count", "num_experts_per_tok", "count", needs="experts"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "n_shared_experts", "count", 1, "form"),
    Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    Key("expert_group_count", "n_group", "count", 1, "form"),
    Key("expert_gating_func", "expert_gating_func", needs="form"),
    Key("expert_weights_norm", "norm_topk_prob", "flag", True, "form"),
    Key("expert_weights_scale", "routed_scaling_factor", "real", 1.0, "form"),
    Key("leading_dense_block_count", "first_k_dense_replace", "any", 0, "form"),
    Key("interleave_moe_layer_step", "interleave_moe_layer_step", "count", needs="form"),
    Key("attention.causal", "is_causal"),
    Key("attn_logit_softcapping", "attn_logit_softcapping", "real", needs="itself"),
    Key("final_logit_softcapping", "final_logit_softcapping", "real", needs="itself"),
    Key("embedding_scale", "embedding_multiplier", "real", needs="itself"),
    Key("residual_scale", "residual_multiplier", "real", needs="itself"),
    Key("attention.scale", "attention_multiplier", "real", needs="itself"),
    Key("logit_scale", "logits_scaling", "real", needs="itself"),
    Key("shortconv.l_cache", "conv_L_cache", "count", needs="form"),
    Key("ssm.conv_kernel", "linear_conv_kernel_dim", "count", needs="form"),
    Key("ssm.state_size", "linear_key_head_dim", "count", needs="form"),
    Key("ssm.group_count", "linear_num_key_heads", "count", needs="form"),
    Key("ssm.time_step_rank", "linear_num_value_heads", "count", needs="form"),
    Key("ssm.inner_size", "linear_value_features", needs="form"),
    Key("full_attention_interval", "full_attention_interval", "count", 4, "form"),
    Key("attention.recurrent_layers", "recurrent_layers", needs="form"),
    Key("rope.freq_base", "rope_theta", "real", 10_000.0),
    Key("rope.dimension_count", "rotated_dim"),
    Key("rope.freq_base_swa", "rope_local_base_freq"),
    Key("rope.dimension_count_swa", "windowed_rotated_dim"),
)
SCALING_KEYS = (  # of settings in `rope_scaling`
    Key("rope.dimension_sections", "mrope_section", needs="form"),
    Key("rope.scaling.type", "rope_type"),
    Key("rope.scaling.factor", "factor"),
    Key("rope.scaling.original_context_length", "original_max_position_embeddings"),
    Key("rope.scaling.attn_factor", "attention_factor", "real", needs="itself"),
    Key("rope.scaling.yarn_attn_factor", "attention_factor", "real", needs="itself"),
    Key("rope.scaling.yarn_beta_fast", "beta_fast", "real", needs="itself"),
    Key("rope.scaling.yarn_beta_slow", "beta_slow", "real", needs="itself"),
    Key("attention.temperature_scale", "llama_4_scaling_beta", "real", needs="itself"),
    Key("rope.scaling.yarn_log_multiplier", "mscale_all_dim", "real", needs="itself"),
)
ENCODER_KEYS = (
    *_SIZE_KEYS,
    Key("feed_forward_length", "intermediate_size", "count"),
    Key("attention.head_count", "num_attention_heads", "count"),
    Key(EPS, "layer_norm_eps", "real"),
    Key("attention.causal", "is_causal"),
    Key("rope.freq_base", "rope_theta", "real", needs="form"),
    Key("rope.dimension_count", "rotated_dim"),
    Key("rope.freq_base_swa", "rope_local_base_freq", "real", 10_000.0, "form"),
    Key("attention.sliding_window", "sliding_window", "count", needs="form"),
    Key("attention.sliding_window_pattern", "sliding_window_pattern", "count", 3, "form"),
)
