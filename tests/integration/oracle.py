"""`transformers` on the dequantised weights of a GGUF file: what every real-model test compares with."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig

from infer.checkpoint import Checkpoint
from infer.checkpoint.lazy_weights import LazyWeights
from infer.model.load import dense

_GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def make_oracle(checkpoint: Checkpoint) -> Any:
    """A float32 `transformers` model with the checkpoint's weights."""
    settings = {name: value for name, value in checkpoint.config.items() if name != "model_type"}
    is_gemma = checkpoint.config["model_type"] == "gemma3_text"
    config: PretrainedConfig = Gemma3TextConfig(**settings) if is_gemma else LlamaConfig(**settings)
    names = _GEMMA_NORMS if is_gemma else _LLAMA_NORMS
    state = {}
    for name, weight in LazyWeights(checkpoint.tensors).items():
        values = dense(weight).float().clone()
        for ours, theirs in names.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        # Gemma's modules multiply by 1 + weight; the checkpoint hands out the multiplier itself.
        state[name] = values - 1 if is_gemma and values.dim() == 1 else values
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@torch.inference_mode()
def oracle_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def mean_kl(expected: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean over positions of KL(expected ‖ logits), in float64."""
    log_p, log_q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
