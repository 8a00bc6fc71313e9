"""Dense families with Granite's multipliers of the embedding, the parts, the scores and the logits, as rows."""

from dataclasses import replace

from infer.compute.operands.architecture import Norms
from infer.models.families import layer_kinds as kinds
from infer.models.families import ropes
from infer.models.families.config_values import positive
from infer.models.families.family import ATTENTION_BIAS, Family, usual_defaults

_GRANITE = Family(
    usual_defaults(2048, attention_multiplier=1.0),
    reads=ATTENTION_BIAS
    | {"mlp_bias", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
)

GRANITE: dict[str, Family] = {
    "granite": _GRANITE,
    "hyperclovax": replace(
        _GRANITE,
        defaults=usual_defaults(2048),
        reads=_GRANITE.reads - {"logits_scaling"} | {"output_multiplier"},
        renamed={"logits_scaling": "output_multiplier"},
        norms=lambda config: Norms(after=True, eps_after=positive(config, "rms_norm_eps")),
        refuses={"use_post_norm": True},
    ),
    "granite_swa": replace(
        _GRANITE,
        defaults={**_GRANITE.defaults, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128}
        | {"num_key_value_heads": 4, "max_position_embeddings": 8192},
        layer_kinds=kinds.windowed_but_every_fourth_from_the_first,
        rotated_layers=kinds.rotated_unless_listed_without_theta,
        rope_settings=ropes.granite_swa_rope,
        has_sinks=True,
    ),
}
