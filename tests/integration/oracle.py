"""`transformers` on the dequantised weights of a GGUF file, with which all tests of real models compare."""

from typing import Any

import torch
import transformers

from infer.files import Checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.weight_loader import dense

_GEMMA_NORMS = {"attention_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_GEMMA_NORMS |= {"mlp_norm": "pre_feedforward_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
_LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "gemma3_text": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig),
}


def make_oracle(checkpoint: Checkpoint) -> Any:
    """Return a float32 `transformers` model with the checkpoint's weights."""
    settings = {name: value for name, value in checkpoint.config.items() if name != "model_type"}
    is_gemma = checkpoint.config["model_type"] == "gemma3_text"
    names = _GEMMA_NORMS if is_gemma else _LLAMA_NORMS
    state = {}
    for name, weight in LazyWeights(checkpoint.tensors).items():
        values = dense(weight).float()
        for ours, theirs in names.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        # Gemma's modules multiply by 1 + weight, and the checkpoint has the multiplier itself.
        state[name] = values - 1 if is_gemma and values.dim() == 1 else values
    kind, make_config = _KINDS[checkpoint.config["model_type"]]
    config = make_config(**settings)
    options = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    # `from_pretrained` makes no random weights first, which would take seconds for a large vocabulary.
    model, problems = kind.from_pretrained(None, config=config, state_dict=state, **options)
    assert not any(problems.values()), problems
    return model.eval()


@torch.inference_mode()
def oracle_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def mean_kl(expected: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean over positions of KL(expected ‖ logits), in float64, some positions at a time: all of a large vocabulary's
    would be gigabytes."""
    found = []
    for some, others in zip(expected.split(8), logits.split(8), strict=True):
        log_p, log_q = some.double().log_softmax(-1), others.double().log_softmax(-1)
        found.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return float(torch.cat(found).mean())
