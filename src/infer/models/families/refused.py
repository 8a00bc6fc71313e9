"""Families that are refused by name, and the parts that they need."""

_LATENT = "latent attention"
_STATES = "the state-space layers of Mamba2"
_ALTUP = "four parallel residual streams"
# Unsupported parts that models need, by the model's name in Hugging Face's and GGUF's files.
NEEDS: dict[str, str] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek2": _LATENT,
    "kimi_k2": _LATENT,
    "glm4_moe_lite": _LATENT,
    "granitemoehybrid": _STATES,
    "nemotron_h": _STATES,
    "mpnet": "a bias of attention by distance",
    "gemma3n": _ALTUP,
    "gemma3n_text": _ALTUP,
    "mistral3": "the model_type of its text_config",
}
