"""Claims about tensor names: names of Hugging Face and GGUF become ours, one name per tensor."""

import pytest

from cases import cases
from infer.files.tensors.tensor_names import is_norm, names_from_gguf, names_from_hugging_face

PROJECTIONS = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
PROJECTIONS += [f"mlp.{which}_proj" for which in ("gate", "up", "down")]
LAYER = "model.layers.7."
GEMMA_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "post_attention_norm"}
GEMMA_NORMS |= {"pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "post_mlp_norm"}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_the_text_part_of_a_multimodal_model_has_the_same_names(prefix: str) -> None:
    ours = [*PROJECTIONS, *GEMMA_NORMS]
    expected = {f"{prefix}{name}.weight": f"model.{name}.weight" for name in ("embed_tokens", "norm")}
    expected |= {f"{prefix}layers.7.{name}.weight": f"{LAYER}{GEMMA_NORMS.get(name, name)}.weight" for name in ours}
    assert names_from_hugging_face(expected) == expected


def test_the_head_has_one_name() -> None:
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert names_from_hugging_face([name]) == {name: "lm_head.weight"}


@cases(
    "name",
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
    "model.vision_tower.vision_model.post_layernorm.weight",
    "model.visual.blocks.0.norm1.weight",
    "multi_modal_projector.mm_input_projection_weight",
    "model.multi_modal_projector.mm_soft_emb_norm.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
)
def test_tensors_outside_the_text_network_are_skipped(name: str) -> None:
    assert names_from_hugging_face([name]) == {}


def test_ropes_factors_are_no_weight() -> None:
    assert names_from_gguf(["rope_freqs.weight"]) == {}


@pytest.mark.parametrize("name", ["blk.0.ssm_d.weight", "blk.00.attn_q.weight", "blk.-1.attn_q.weight", "blk.0.attn_q"])
def test_a_name_that_we_do_not_know_is_kept_to_be_reported(name: str) -> None:
    assert names_from_gguf([name]) == {name: name}
    assert names_from_hugging_face([name]) == {name: name}


def test_norms_are_known_by_name() -> None:
    norms = [f"{LAYER}{name}.weight" for name in (*GEMMA_NORMS.values(), "self_attn.q_norm", "self_attn.k_norm")]
    assert all(is_norm(name) for name in (*norms, "model.norm.weight"))
    others = [f"{LAYER}{name}.weight" for name in PROJECTIONS if not name.endswith("norm")]
    assert not any(is_norm(name) for name in (*others, "model.embed_tokens.weight", f"{LAYER}self_attn.q_proj.bias"))
