"""The text part of multimodal models, whose folders also have a tower for images, has the logits of `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from steps import logits_of
from test_families import expected_logits, load
from tiny import BY_NAME

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3_TEXT = hf.Gemma3TextConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, sliding_window_pattern=2,
    pad_token_id=0,
)  # fmt: skip


def text_config(name: str) -> Any:
    return BY_NAME[name].config.to_dict()


def gemma4(name: str) -> tuple[Any, Any, float]:
    vision = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
    ids = {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "audio_token_id": 93}
    config = hf.Gemma4Config(text_config=text_config(name), vision_config=vision, audio_config=None, **ids)
    return hf.Gemma4ForConditionalGeneration, config, 4e-4


LLAMA4_VISION = SMALL | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
LLAMA4_VISION |= {"image_size": 28}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
MODELS: dict[str, tuple[Any, Any, float]] = {  # a class of `transformers`, its config, and the tolerance of logits
    "gemma3": (
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(
            text_config=GEMMA3_TEXT, vision_config=hf.SiglipVisionConfig(**SMALL, image_size=8, patch_size=4),
            mm_tokens_per_image=4, image_token_index=90, boi_token_index=91,
        ),
        1e-4,
    ),
    "gemma4_per_layer": gemma4("gemma4_per_layer"),
    "gemma4_moe": gemma4("gemma4_moe"),
    "llama4_chunks": (
        hf.Llama4ForConditionalGeneration,
        hf.Llama4Config(text_config=text_config("llama4_chunks"), vision_config=LLAMA4_VISION, image_token_index=90),
        1e-4,
    ),
    "qwen3_5": (
        hf.Qwen3_5ForConditionalGeneration,
        hf.Qwen3_5Config(
            text_config=text_config("qwen3_5"), vision_config=QWEN_VISION, image_token_id=90, video_token_id=91,
            vision_start_token_id=92, vision_end_token_id=93,
        ),
        1e-3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_text_of_a_multimodal_model_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, config, most = MODELS[name]
    oracle = made._from_config(config, attn_implementation="eager").float().eval()
    oracle.save_pretrained(tmp_path)
    if name.startswith("gemma4"):
        oracle.model.language_model.config.output_hidden_states = True  # `tiny.make_tiny` has the reason
    token_ids = torch.randint(3, 90, (100,)).tolist()
    expected = expected_logits(oracle.language_model if name.startswith("llama4") else oracle, token_ids)
    assert (logits_of(load(tmp_path), token_ids) - expected).abs().max() <= most
