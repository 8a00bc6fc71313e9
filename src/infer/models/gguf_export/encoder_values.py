"""An encoder's network → GGUF's keys under the architecture's name: the inverse of `encoder_settings`."""

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Dense
from infer.models.families.config_values import Config
from infer.models.gguf_export.values import Value


def encoder_values(config: Config, architecture: Architecture) -> dict[str, Value]:
    """Return the keys of an encoder. Windows of ModernBERT are counted over both sides, as in its config."""
    attention = architecture.attention
    dense = architecture.layers[0].feed_forward
    assert isinstance(dense, Dense)
    values: dict[str, Value] = {
        "block_count": len(architecture.layers),
        "context_length": architecture.own_length,
        "embedding_length": architecture.hidden_size,
        "vocab_size": architecture.vocab_size,
        "feed_forward_length": dense.intermediate_size,
        "attention.head_count": attention[0].num_heads,
        "attention.layer_norm_epsilon": architecture.norm_eps,
        "attention.causal": False,
    }
    wide = next((mixer.rope for mixer in attention if mixer.window is None), None)
    if wide is not None:
        values |= {"rope.freq_base": wide.theta, "rope.dimension_count": wide.dim}
    narrow = next((mixer.rope for mixer in attention if mixer.window is not None), None)
    if narrow is not None:
        full = [index for index, mixer in enumerate(attention) if mixer.window is None]
        values |= {"rope.freq_base_swa": narrow.theta, "attention.sliding_window": config.get("local_attention", 128)}
        values["attention.sliding_window_pattern"] = full[1] if len(full) > 1 else len(attention)
    return values


def token_type_values(name: str, architecture: Architecture) -> dict[str, Value]:
    """Return the number of token types. Without it, llama.cpp opens no encoder except ModernBERT."""
    inputs = architecture.text_inputs
    if inputs is None or name == "modern-bert":
        return {}
    return {"tokenizer.ggml.token_type_count": max(inputs.num_types, 1)}
