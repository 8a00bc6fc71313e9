"""Tiny models for stored answers: every weight is a small integer times a power of two.

The integers are raw bits of PCG64, seeded by the tensor's name, so they are the same with every version of numpy and
torch. Float32, float16 and bfloat16 store each weight exactly. No other library defines a config or a tensor here.
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from byte_tokenizer import write_byte_tokenizer
from tool_templates import template_of

HIDDEN, WIDTH, HEADS, HEAD_DIM, ROWS = 64, 96, 4, 32, 272
Q, KV = HEADS * HEAD_DIM, HEADS // 2 * HEAD_DIM
CONTEXT = 512
MERGES = [("y", "e"), ("ye", "s"), ("n", "o")]  # a reranker answers "yes" or "no" in one token
EOS = 256 + len(MERGES)
_HIGHEST_BITS = np.uint64(57)  # a shift that leaves 7 of 64 bits

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


@dataclass(frozen=True)
class Folder:
    """A model as a folder. With `has_centred_norms`, a norm multiplies by 1 + weight."""

    config: Mapping[str, Any]
    tensors: Shapes
    dtype: torch.dtype = torch.float32
    has_centred_norms: bool = False
    embedding_exponent: int = -6
    files: Mapping[str, Any] = field(default_factory=dict)  # JSON files beside the weights

    def write(self, path: Path) -> Path:
        """Write the model into a new folder, and return its path."""
        path.mkdir(parents=True)
        tensors = {name: self._values(name, shape) for name, shape in self.tensors.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        write_byte_tokenizer(path, merges=MERGES, chat_template=template_of("hermes"))
        (path / "config.json").write_text(json.dumps(self.config))
        for name, content in self.files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(json.dumps(content))
        return path

    def _values(self, name: str, shape: Shape) -> torch.Tensor:
        exponent = self.embedding_exponent if "embed_tokens" in name else exponent_of(name, shape)
        values = integers(name, shape) * 2.0**exponent
        is_centred = self.has_centred_norms and not name.endswith("linear_attn.norm.weight")
        if is_multiplier(name) and not is_centred:
            values = values + 1
        return torch.from_numpy(values).to(self.dtype)


def bits(name: str, shape: Shape) -> NDArray[np.uint64]:
    """Return words of 64 random bits that depend only on the name and the shape."""
    return np.asarray(np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))).reshape(shape)


def integers(name: str, shape: Shape) -> NDArray[np.float64]:
    """Return integers from -64 to 63 that depend only on the name and the shape."""
    return (bits(name, shape) >> _HIGHEST_BITS).astype(np.float64) - 64


def is_multiplier(name: str) -> bool:
    """Return True for the weights of norms and for scalars of layers, which lie around 1."""
    return ("norm" in name.lower() and name.endswith("weight")) or name.endswith("layer_scalar")


def exponent_of(name: str, shape: Shape) -> int:
    """Return the power of two that keeps the sizes of activations. Logits are spread four times as wide."""
    if is_multiplier(name):
        return -7
    if len(shape) == 1 or "embed" in name or "bias" in name:
        return -6
    columns = shape[1] if "experts." in name and len(shape) == 3 else shape[-1]
    return (2 if "lm_head" in name else 0) - round(math.log2(37 * math.sqrt(columns)))


def _with(prefix: str, *parts: Mapping[str, Any]) -> Shapes:
    """Return the tensors of all parts. An integer is the size of a vector."""
    merged = {name: shape for part in parts for name, shape in part.items()}
    return {f"{prefix}{name}": (shape,) if isinstance(shape, int) else shape for name, shape in merged.items()}


def _projections(rows: Mapping[str, int]) -> Shapes:
    return {f"{which}_proj.weight": (count, HIDDEN) for which, count in rows.items()}


def _layers(count: int, layer: Callable[[int], Shapes]) -> Shapes:
    return {name: shape for at in range(count) for name, shape in _with(f"model.layers.{at}.", layer(at)).items()}


def _ends(norm: str = "norm", *, has_head: bool = True) -> Shapes:
    head = {"lm_head.weight": (ROWS, HIDDEN)} if has_head else {}
    return {"model.embed_tokens.weight": (ROWS, HIDDEN), f"model.{norm}.weight": (HIDDEN,), **head}


def _attention(queries: int = Q, kv: int = KV, *, out: str = "o_proj", bias: str = "", norms: str = "") -> Shapes:
    """Return the matrices, biases of the projections whose letters are in `bias`, and norms named by `norms`."""
    rows = {"q": queries, "k": kv, "v": kv}
    shapes = _with("self_attn.", _projections(rows))
    shapes[f"self_attn.{out}.weight"] = (HIDDEN, Q)
    shapes |= {f"self_attn.{which}_proj.bias": ((rows | {"o": HIDDEN})[which],) for which in bias}
    return shapes | ({f"self_attn.{which}_{norms}.weight": (HEAD_DIM,) for which in "qk"} if norms else {})


def _mlp(at: str = "mlp.", width: int = WIDTH, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = (f"{at}{name}.weight" for name in names)
    return {gate: (width, HIDDEN), up: (width, HIDDEN), down: (HIDDEN, width)}


def _norms(*names: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in names}


_USUAL = _norms("input_layernorm", "post_attention_layernorm")
_SANDWICH = _USUAL | _norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _rope(theta: float = 10_000.0, **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | others


def _config(kind: str, num_layers: int, **settings: Any) -> dict[str, Any]:
    sizes = {"vocab_size": ROWS, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "head_dim": HEAD_DIM}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "num_hidden_layers": num_layers}
    fixed = {"model_type": kind, "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": EOS}
    return sizes | fixed | {"rms_norm_eps": 1e-6, "rope_parameters": _rope(), "hidden_act": "silu"} | settings


def _llama(dtype: torch.dtype = torch.float32) -> Folder:
    config = _config("llama", 2, tie_word_embeddings=False)
    return Folder(config, _ends() | _layers(2, lambda at: _attention() | _mlp() | _USUAL), dtype)


def _gemma2() -> Folder:
    """Return a model with a sliding window, a soft cap of scores and logits, and norms after each part."""
    own = {"sliding_window": 8, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 1.5}
    own |= {"final_logit_softcapping": 12.0, "layer_types": [_WINDOW, _FULL], "tie_word_embeddings": True}
    config = _config("gemma2", 2, hidden_activation="gelu_pytorch_tanh", **own)
    layers = _layers(2, lambda at: _attention() | _mlp() | _SANDWICH)
    return Folder(config, _ends(has_head=False) | layers, has_centred_norms=True, embedding_exponent=-9)


def _gemma4() -> Folder:
    """Return a model with heads of two sizes and values that are keys. Its last layers use keys of the first ones."""
    kinds = [_WINDOW, _FULL] * 2
    own = {"head_dim": 16, "global_head_dim": HEAD_DIM, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    own |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
    ropes = {_WINDOW: _rope(), _FULL: _rope(1_000_000.0, rope_type="proportional", partial_rotary_factor=0.25)}
    own |= {"sliding_window": 9, "rope_parameters": ropes, "layer_types": kinds, "tie_word_embeddings": True}
    config = _config("gemma4_text", 4, hidden_activation="gelu_pytorch_tanh", enable_moe_block=False, **own)

    def layer(at: int) -> Shapes:
        dim = 16 if kinds[at] == _WINDOW else HEAD_DIM
        rows = {"q": HEADS * dim} | ({"k": 32} if at < 2 else {}) | ({"v": 32} if at == 0 else {})
        shapes = _with("self_attn.", _projections(rows))
        shapes |= {f"self_attn.{which}_norm.weight": (dim,) for which in rows if which != "v"}
        return shapes | {"self_attn.o_proj.weight": (HIDDEN, HEADS * dim), "layer_scalar": (1,)} | _mlp() | _SANDWICH

    return Folder(config, _ends(has_head=False) | _layers(4, layer), embedding_exponent=-9)


def _qwen2_moe() -> Folder:
    """Return a model with experts, a shared expert with a gate, and biases of q, k and v."""
    own = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": False}
    own |= {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
    own |= {"use_sliding_window": False, "tie_word_embeddings": False}
    experts = _with("mlp.", *(_mlp(f"experts.{index}.", 64) for index in range(6)), _mlp("shared_expert.", 64))
    experts |= {"mlp.gate.weight": (6, HIDDEN), "mlp.shared_expert_gate.weight": (1, HIDDEN)}
    layers = _layers(2, lambda at: _attention(bias="qkv") | experts | _USUAL)
    return Folder(_config("qwen2_moe", 2, **own), _ends() | layers)


def _gpt_oss() -> Folder:
    """Return a model with sinks, windows, biases everywhere, clamped experts and a stretched rope."""
    own = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": [_WINDOW, _FULL]}
    own |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True, "tie_word_embeddings": False}
    yarn = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
    experts: Shapes = {"down_proj": (6, WIDTH, HIDDEN), "down_proj_bias": (6, HIDDEN)}
    experts |= {"gate_up_proj": (6, HIDDEN, 2 * WIDTH), "gate_up_proj_bias": (6, 2 * WIDTH)}
    own_layer = {"mlp.router.weight": (6, HIDDEN), "mlp.router.bias": (6,), "self_attn.sinks": (HEADS,)}
    layer = _attention(bias="qkvo") | _with("mlp.experts.", experts) | own_layer | _USUAL
    return Folder(_config("gpt_oss", 2, rope_parameters=yarn, **own), _ends() | _layers(2, lambda at: layer))


def _llama4() -> Folder:
    """Return a model that attends in chunks, with queries that grow with the position, and experts in some layers."""
    own = {"attention_chunk_size": 23, "floor_scale": 16, "attn_scale": 0.5, "attn_temperature_tuning": True}
    own |= {"interleave_moe_layer_step": 2, "moe_layers": [1], "intermediate_size_mlp": 128, "no_rope_layers": [1, 0]}
    own |= {"layer_types": ["chunked_attention", _FULL], "use_qk_norm": True, "num_local_experts": 4}
    config = _config("llama4_text", 2, num_experts_per_tok=1, tie_word_embeddings=False, **own)
    experts: Shapes = {"feed_forward.experts.down_proj": (4, WIDTH, HIDDEN), "feed_forward.router.weight": (4, HIDDEN)}
    experts |= {"feed_forward.experts.gate_up_proj": (4, HIDDEN, 2 * WIDTH)} | _mlp("feed_forward.shared_expert.")

    def layer(at: int) -> Shapes:
        return _attention() | (experts if at == 1 else _mlp("feed_forward.", 128)) | _USUAL

    return Folder(config, _ends() | _layers(2, layer))


def _qwen3_5() -> Folder:
    """Return a model of gated delta nets, whose attention has output gates and rotates a part of each head."""
    own = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    own |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": [_LINEAR, _LINEAR, _FULL]}
    config = _config("qwen3_5_text", 3, tie_word_embeddings=False, **own)
    config["rope_parameters"] = _rope(partial_rotary_factor=0.25)
    net: Shapes = {"in_proj_qkv.weight": (128, HIDDEN), "in_proj_z.weight": (64, HIDDEN), "A_log": (4,)}
    net |= {"in_proj_a.weight": (4, HIDDEN), "in_proj_b.weight": (4, HIDDEN), "dt_bias": (4,), "norm.weight": (16,)}
    net |= {"conv1d.weight": (128, 1, 4), "out_proj.weight": (HIDDEN, 64)}

    def layer(at: int) -> Shapes:
        return (_attention(2 * Q, norms="norm") if at == 2 else _with("linear_attn.", net)) | _mlp() | _USUAL

    return Folder(config, _ends() | _layers(3, layer), has_centred_norms=True)


def _olmo_hybrid() -> Folder:
    """Return a model of delta nets that may reverse their state, with separate projections and no positions."""
    own = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    own |= {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_allow_neg_eigval": True}
    own |= {"layer_types": [_LINEAR, _FULL], "rope_parameters": _rope() | {"rope_theta": None}, "head_dim": 16}
    rows = {"q": 64, "k": 64, "v": 128}
    net = _projections(rows | {"g": 128, "a": 4, "b": 4})
    net |= {f"{which}_conv1d.weight": (count, 1, 4) for which, count in rows.items()}
    net |= {"A_log": (4,), "dt_bias": (4,), "o_norm.weight": (32,), "o_proj.weight": (HIDDEN, 128)}
    linear = _with("linear_attn.", net) | _norms("attention_layer_norm", "feedforward_layer_norm")
    full = _with("self_attn.", _projections({"q": 64, "k": 32, "v": 32, "o": 64}))
    full |= {"self_attn.q_norm.weight": (64,), "self_attn.k_norm.weight": (32,)}
    full |= _norms("feedforward_layer_norm", "post_feedforward_layernorm")
    config = _config("olmo_hybrid", 2, attention_bias=False, tie_word_embeddings=False, **own)
    return Folder(config, _ends() | _layers(2, lambda at: (full if at else linear) | _mlp()))


def _lfm2() -> Folder:
    """Return a model of short convolutions."""
    own = {"layer_types": ["conv", _FULL, "conv"], "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5}
    own |= {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True, "head_dim": 16}
    conv: Shapes = {"conv.conv.weight": (HIDDEN, 1, 3), "conv.in_proj.weight": (3 * HIDDEN, HIDDEN)}
    conv["conv.out_proj.weight"] = (HIDDEN, HIDDEN)
    full = _with("self_attn.", _projections({"q": 64, "k": 32, "v": 32, "out": 64}))
    full |= {f"self_attn.{which}_layernorm.weight": (16,) for which in "qk"}
    others = _mlp("feed_forward.", names=("w1", "w3", "w2")) | _norms("ffn_norm", "operator_norm")
    tensors = _ends("embedding_norm", has_head=False) | _layers(3, lambda at: (full if at == 1 else conv) | others)
    return Folder(_config("lfm2", 3, **own), tensors)


def _qwen3(*, has_head: bool = True, files: Mapping[str, Any] | None = None, **settings: Any) -> Folder:
    config = _config("qwen3", 2, tie_word_embeddings=False, attention_bias=False, use_sliding_window=False, **settings)
    layers = _layers(2, lambda at: _attention(norms="norm") | _mlp() | _USUAL)
    return Folder(config, _ends(has_head=has_head) | layers, files=files or {})


def _embedder() -> Folder:
    """Return an embedding model in the form of sentence-transformers."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    named = {f"sentence_transformers.models.{kind}": path for kind, path in kinds.items()}
    modules = [{"idx": i, "name": str(i), "type": kind, "path": at} for i, (kind, at) in enumerate(named.items())]
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_lasttoken": True}
    return _qwen3(has_head=False, files={"modules.json": modules, "1_Pooling/config.json": pooling})


def _classifier() -> Folder:
    labels = {str(at): name for at, name in enumerate(("bad", "so-so", "good"))}
    named = {"id2label": labels, "label2id": {name: int(at) for at, name in labels.items()}}
    folder = _qwen3(has_head=False, architectures=["Qwen3ForSequenceClassification"], pad_token_id=EOS, **named)
    return Folder(folder.config, folder.tensors | {"score.weight": (3, HIDDEN)})


def _bert() -> Folder:
    """Return an encoder with learned positions, LayerNorm and biases."""
    config = _config("bert", 2, hidden_act="gelu", layer_norm_eps=1e-12, type_vocab_size=2, pad_token_id=EOS)
    del config["head_dim"]
    norm = {"LayerNorm.weight": HIDDEN, "LayerNorm.bias": HIDDEN}
    square = {"weight": (HIDDEN, HIDDEN), "bias": HIDDEN}
    parts = [_with(f"attention.self.{name}.", square) for name in ("query", "key", "value")]
    parts += [_with("attention.output.", norm), _with("attention.output.dense.", square), _with("output.", norm)]
    parts += [_with("intermediate.dense.", {"weight": (WIDTH, HIDDEN), "bias": WIDTH})]
    layer = _with("", *parts, _with("output.dense.", {"weight": (HIDDEN, WIDTH), "bias": HIDDEN}))
    kinds = {"word": ROWS, "position": CONTEXT, "token_type": 2}
    tables = {f"{kind}_embeddings.weight": (rows, HIDDEN) for kind, rows in kinds.items()}
    layers = {name: shape for at in range(2) for name, shape in _with(f"encoder.layer.{at}.", layer).items()}
    return Folder(config, _with("embeddings.", tables, norm) | layers)


_MAKERS: tuple[Callable[[], Folder], ...] = (
    *(_llama, _gemma2, _gemma4, _qwen2_moe, _gpt_oss, _llama4, _qwen3_5, _olmo_hybrid, _lfm2),
    *(_qwen3, _embedder, _classifier, _bert),
)
MODELS = {make.__name__.removeprefix("_"): make for make in _MAKERS}
MODELS |= {"llama in bf16": lambda: _llama(torch.bfloat16), "llama in f16": lambda: _llama(torch.float16)}
