"""The table of docs/reference/models.md, made from lists of the tests.

As a program, this module writes the table, and the settings that `infer models --supported` prints.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PretrainedConfig

from converted_encoders import ARCHITECTURES
from encoder_models import ENCODERS, WITHOUT_MASK, config_of
from infer.compute.operands.architecture import Architecture, Layer
from infer.compute.operands.feed_forwards import Dense, Experts, FeedForward
from infer.compute.operands.mixers import Attention, GatedDeltaNet, ShortConv
from infer.compute.quantization.ggml_types import FLOAT_TYPES, GGML_TYPES
from infer.models.catalog import supported
from infer.models.catalog.supported import SUPPORTED
from infer.models.families import make_architecture
from test_family_files import CONVERTED
from tiny import LONGROPE, TINY

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
SETTINGS = Path(supported.__file__).with_name("proven_settings.json")
BEGIN, END = "<!-- what loads: written by tests/helpers/what_loads.py -->\n", "<!-- end of what loads -->\n"


def _of_attention(has: Callable[[Attention], bool]) -> Callable[[Layer], bool]:
    return lambda layer: isinstance(layer.mixer, Attention) and has(layer.mixer)


def _has_shared(experts: Experts) -> bool:
    return experts.shared_size > 0 and not experts.has_norms


def _has_weighted_inputs(feed_forward: FeedForward | None) -> bool:
    return isinstance(feed_forward, Experts) and feed_forward.router.weighs_inputs


_SETTINGS = (
    ("no mask", _of_attention(lambda attention: not attention.is_causal)),
    ("LayerNorm", lambda layer: layer.norms.are_centred),
    ("norms without weights", lambda layer: not layer.norms.have_weight),
    ("attention in parallel to the MLP", lambda layer: layer.norms.parallel is not None),
    ("norms of sums", lambda layer: layer.norms.of_sum),
    ("an MLP without a gate", lambda layer: isinstance(layer.feed_forward, Dense) and not layer.feed_forward.is_gated),
    ("experts", lambda layer: isinstance(layer.feed_forward, Experts)),
    ("experts with weighted inputs", lambda layer: _has_weighted_inputs(layer.feed_forward)),
    ("experts beside an MLP", lambda layer: isinstance(layer.feed_forward, Experts) and layer.feed_forward.has_norms),
    ("per-layer inputs", lambda layer: layer.per_layer_input is not None),
    ("a shared expert", lambda layer: isinstance(layer.feed_forward, Experts) and _has_shared(layer.feed_forward)),
    ("windows", _of_attention(lambda attention: attention.window is not None)),
    ("chunks", _of_attention(lambda attention: attention.chunk is not None)),
    ("q, k, v biases", _of_attention(lambda attention: attention.has_qkv_bias)),
    ("output bias", _of_attention(lambda attention: attention.has_output_bias)),
    ("MLP biases", lambda layer: layer.feed_forward.has_bias),
    ("short convolutions", lambda layer: isinstance(layer.mixer, ShortConv)),
    ("biases of convolutions", lambda layer: isinstance(layer.mixer, ShortConv) and layer.mixer.has_bias),
    ("gated delta nets", lambda layer: isinstance(layer.mixer, GatedDeltaNet)),
    ("gated attention", _of_attention(lambda attention: attention.has_gate)),
    ("one gate per head", _of_attention(lambda attention: attention.are_gates_of_heads)),
    ("attention sinks", _of_attention(lambda attention: attention.has_sinks)),
    ("capped scores", _of_attention(lambda attention: attention.softcap is not None)),
    ("norms of each q and k head", _of_attention(lambda attention: attention.qk_norm == "head")),
    ("norms of each q and k head without weights", _of_attention(lambda own: own.qk_norm == "head_unweighted")),
    ("norms over all q and k heads", _of_attention(lambda attention: attention.qk_norm == "all")),
    ("norms of each q and k head after the rotation", _of_attention(lambda own: own.qk_norm == "head_after")),
    ("norms of v", _of_attention(lambda attention: attention.has_v_norm)),
    ("values that are keys", _of_attention(lambda attention: attention.are_values_keys)),
    ("shared keys and values", _of_attention(lambda attention: not attention.has_keys)),
    ("queries scaled by position", _of_attention(lambda attention: attention.query_scale is not None)),
    ("layers with a scale", lambda layer: layer.has_scale),
    ("layers that do not rotate", _of_attention(lambda attention: attention.rope is None)),
    ("partial rotation", _of_attention(lambda own: own.rope is not None and own.rope.dim < own.head_dim)),
    ("one kv head", _of_attention(lambda attention: attention.num_kv_heads == 1)),
)


def proven() -> dict[str, list[str]]:
    """Return the settings that the tests of each family prove."""
    found = dict[str, list[str]]()
    for each in SUPPORTED:
        configs = [tiny.config for tiny in (*TINY, LONGROPE) if tiny.config.model_type == each.model_type]
        encoders = [encoder for encoder in (*ENCODERS, *WITHOUT_MASK) if encoder.model_type == each.model_type]
        configs += map(config_of, encoders)
        found[each.model_type] = list(dict.fromkeys(setting for config in configs for setting in settings(config)))
    return found


def table() -> str:
    tested, settings_of = [*TINY, LONGROPE], proven()
    types = [kind.name for kind in GGML_TYPES.values() if not kind.is_float]
    lines = ["| models | `model_type` | GGUF too | proven on | settings proven |", "|---|---|---|---|---|"]
    for each in SUPPORTED:
        mine = [tiny for tiny in tested if tiny.config.model_type == each.model_type]
        is_converted = any(tiny in CONVERTED for tiny in mine) or each.model_type in ARCHITECTURES
        gguf = "yes" if is_converted else "no"
        found = ", ".join(settings_of[each.model_type])
        lines.append(f"| {each.models} | `{each.model_type}` | {gguf} | {each.proof} | {found} |")
    lines.append("")
    stored = f"Folders hold {', '.join(FLOAT_TYPES)} and quantised matrices (below). "
    lines.append(f"{stored}GGUF files hold those and all block types of llama.cpp:")
    lines.append(", ".join(f"`{type_}`" for type_ in types) + ".")
    return "\n".join(lines) + "\n"


def settings(config: PretrainedConfig) -> Iterator[str]:
    """Yield the settings of a model that differ from those of a plain model."""
    architecture = make_architecture(config.to_dict())
    for name, has in _SETTINGS:
        if any(has(layer) for layer in architecture.layers):
            yield name
    if len({attention.num_heads for attention in architecture.attention}) > 1:
        yield "heads that differ by layer"
    if architecture.has_embedding_norm:
        yield "a norm of the embedding"
    yield from _values(architecture, architecture.layers[0])
    yield from _ropes(config)


def _values(architecture: Architecture, layer: Layer) -> Iterator[str]:
    if architecture.logit_softcap is not None:
        yield "capped logits"
    if architecture.attention[0].query_features != architecture.hidden_size:
        yield "`head_dim` of its own"
    if architecture.text_inputs is not None and architecture.text_inputs.num_positions:
        yield "learned positions"
    if architecture.tied_embeddings and not architecture.reads_whole_texts:
        yield "tied embeddings"
    if layer.feed_forward.activation not in ("silu", "gelu_tanh"):
        yield f"`{layer.feed_forward.activation}`"
    if architecture.logit_scale != 1:
        yield "multipliers of embedding, residual, attention and logits"


def _ropes(config: PretrainedConfig) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    for rope in parameters.values() if "full_attention" in parameters else [parameters]:
        if rope["rope_type"] != "default":
            yield f"rope `{rope['rope_type']}`"


def page_with_table() -> str:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
    lines = (f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in proven().items())
    SETTINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
