"""The form of each architecture's files: one table, which importers and exporters read beside the list of `keys`.

The rows of the table are what differs between architectures: the names of families, the order of rows, fused tensors,
the keys of some architectures only, and the constants of llama.cpp. A family without parts of its own needs one row.
Rows also have what the folders of safetensors of the same families store differently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infer.compute.operands.feed_forwards import XIELU
from infer.files.gguf.gguf_values import (
    GGUFValues,
    chunked_layers,
    delta_nets,
    layers_of_other_heads,
    layers_of_two_kinds,
    layers_that_rotate_in_windows,
    learned_positions,
    parts_in_parallel,
    short_convolutions,
    types_of_texts,
)
from infer.files.gguf.keys import DRAFTING_LAYERS, ENCODER_KEYS, EPS, KEYS, RMS_EPS, Key
from infer.files.tensors.fused_tensors import PLAIN, StackOrder


@dataclass(frozen=True)
class GGUFForm:
    """The differences of an architecture's files from the usual ones."""

    model_type: str  # of the config of a file
    model_types: tuple[str, ...] = ()  # other families with files of this form
    windowed_type: str | None = None  # the family of files with windows
    sparse_type: str | None = None  # the family of files with experts
    unmasked: str | None = None  # the architecture of the family's models without a mask
    is_encoder: bool = False
    keys: tuple[str, ...] = ()  # those that only some architectures have
    # Names of settings by keys, if they are not the usual ones. None: not read, or by a rule of its own.
    settings: Mapping[str, str | None] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)  # values of keys besides which no other is supported
    fixed: dict[str, Any] = field(default_factory=dict)  # settings of all files
    arrays: tuple[str, ...] = ()  # keys with a value for each layer, which are tensors here
    # Settings, and endings of the tensors that set them.
    flags: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    differing: tuple[str, ...] = ()  # keys whose values may differ between layers
    derived: Callable[[GGUFValues, Mapping[str, Any]], dict[str, Any]] | None = None
    window_period: int | None = None  # the last layer of each period has no window; a constant of llama.cpp
    num_wide_layers: int | None = None  # of the size that scales attention by hidden_size / heads, not by head_dim
    num_layers_of_70b: int | None = None  # of the size whose values of attention get more bits
    local_theta: float | None = None  # of windows in a file without it; by default that of the other layers
    scaling: Mapping[str, Any] = field(default_factory=dict)  # settings of every scaled rope
    has_default_rope: bool = False  # a file without scaling has none; the family's default has one
    writes_zero_window: bool = False  # because llama.cpp's default is a window
    has_layer_norm: bool = False  # so the eps has another key
    has_expert_scales: bool = False  # routers have one scale per expert
    are_rows_paired: bool = False  # elements of q and k that rotate together are neighbours
    has_gates_in_q: bool = False  # in folders, too
    has_scale_in_q_norm: bool = False
    fused: tuple[str, ...] = ()  # our names of matrices that contain several
    names: Mapping[str, str] = field(default_factory=dict)  # unusual names of tensors: ours → GGUF's
    vocabulary: str = "llama"  # GGUF's name of a vocabulary that marks spaces
    # Of folders:
    are_norms_less_one: bool = False  # they store w for 1 + w; GGUF files store 1 + w
    is_last_norm_whole: bool = False  # the last norm is stored as it is
    # The share of each head whose elements rotate with a neighbour, if a config gives no other; 0: halves rotate.
    paired_share: float = 0.0
    stacks: StackOrder = PLAIN
    are_matrices_transposed: bool = False  # of layers

    @property
    def all_keys(self) -> tuple[Key, ...]:
        """The keys of files, in their order."""
        eps, own = RMS_EPS, EPS if self.has_layer_norm else RMS_EPS
        return tuple(key._replace(key=own) if key.key == eps else key for key in KEYS)

    @property
    def families(self) -> tuple[str | None, ...]:
        return self.model_type, self.windowed_type, self.sparse_type, *self.model_types


_STEP, _SHARED_SIZE = "interleave_moe_layer_step", "expert_shared_feed_forward_length"
_QKV, _GATE_UP, _LOCAL_BASE = "self_attn.qkv_proj", "mlp.gate_up_proj", "rope.freq_base_swa"
_PARALLEL = "use_parallel_residual"
_WINDOWED_HEADS = ("attention.key_length_swa", "attention.value_length_swa")
_GATED_UP = {_GATE_UP: "ffn_up"}
_AFTER_ATTENTION = {"mlp_norm": "post_attention_norm"}
_ENCODER_NAMES = {"model.embed_norm": "token_embd_norm"}
_ENCODER_NAMES |= {"post_attention_norm": "attn_output_norm", "post_mlp_norm": "layer_output_norm"}
_NORMALIZED = {"norm_topk_prob": True}  # a constant of llama.cpp
SIGMOID = 2  # a value of `expert_gating_func`
_SIGMOID_KEYS = ("expert_gating_func", "expert_weights_norm", "expert_weights_scale", "leading_dense_block_count")
_DELTA_NETS = (
    *(key.key for key in KEYS if key.key.startswith("ssm.")),
    "full_attention_interval",
    "attention.recurrent_layers",
)


_GEMMA3 = GGUFForm(
    "gemma3_text",
    ("gemma3",),
    unmasked="gemma-embedding",
    keys=(_LOCAL_BASE,),
    window_period=6,
    num_wide_layers=62,
    local_theta=10_000.0,
    are_norms_less_one=True,
)
_LFM2 = GGUFForm(
    "lfm2",
    keys=("shortconv.l_cache",),
    fixed={"block_auto_adjust_ff_dim": False},
    derived=short_convolutions,
    names={"model.norm": "token_embd_norm"},
)
_QWEN3_NEXT = GGUFForm(
    "qwen3_next",
    keys=(DRAFTING_LAYERS, *_DELTA_NETS),
    fixed={"linear_value_heads_are_tiled": False} | _NORMALIZED,
    derived=delta_nets,
    has_gates_in_q=True,
    fused=("linear_attn.ba_proj",),
    names=_AFTER_ATTENTION,
    are_norms_less_one=True,
)
_QWEN35 = replace(
    _QWEN3_NEXT,
    model_type="qwen3_5_text",
    model_types=("qwen3_5",),
    keys=(*_QWEN3_NEXT.keys, "rope.dimension_sections"),
    fixed={"linear_value_heads_are_tiled": True},
    fused=(),
)
_COHERE = GGUFForm(
    "cohere",
    keys=("logit_scale",),
    settings={"logit_scale": "output_multiplier"},
    has_layer_norm=True,
    are_rows_paired=True,
    paired_share=1.0,
)
_QWEN35_MOE = replace(_QWEN35, model_type="qwen3_5_moe_text", model_types=("qwen3_5_moe",))

# By names of architectures. If families are in several rows, the first is that of exports.
FORMS = {name: GGUFForm(name) for name in ("exaone", "exaone4", "olmoe", "qwen2", "qwen3")}
FORMS |= {name: GGUFForm(name, are_rows_paired=True) for name in ("granite", "smollm3")}
FORMS |= {
    "llama": GGUFForm(
        "llama",
        ("internlm3", "iquestcoder"),
        windowed_type="mistral",
        sparse_type="mixtral",
        num_layers_of_70b=80,
        are_rows_paired=True,
    ),
    "granitemoe": GGUFForm("granitemoe", ("granitemoeshared",), are_rows_paired=True),
    "llama-embed": GGUFForm("llama_bidirec", are_rows_paired=True),
    "mistral3": GGUFForm("ministral3", has_default_rope=True, are_rows_paired=True),
    "llama4": GGUFForm(
        "llama4_text",
        ("llama4",),
        are_rows_paired=True,
        keys=(_STEP,),
        derived=chunked_layers,
        writes_zero_window=True,
        paired_share=1.0,
        stacks=StackOrder(are_transposed=True),
    ),
    "muse-glimmer": GGUFForm(
        "muse_glimmer_text",
        ("muse_glimmer",),
        are_rows_paired=True,
        keys=("logit_scale",),
        settings={"logit_scale": "output_multiplier"},
        fixed={"qk_norm_has_weights": True, "qk_scale_factor": 1.0},  # these weights include the scale of queries
        derived=layers_that_rotate_in_windows,
        window_period=4,
        has_scale_in_q_norm=True,
        are_norms_less_one=True,
        is_last_norm_whole=True,
    ),
    "gemma": GGUFForm("gemma", are_norms_less_one=True),
    "gemma2": GGUFForm("gemma2", window_period=2, num_wide_layers=46, are_norms_less_one=True),
    "gemma3": _GEMMA3,
    "gemma-embedding": replace(_GEMMA3, num_wide_layers=0, fixed={"use_bidirectional_attention": True}),
    "gemma4": GGUFForm(
        "gemma4_text",
        ("gemma4", "gemma4_unified", "gemma4_unified_text"),
        keys=(*_WINDOWED_HEADS, "attention.shared_kv_layers", "embedding_length_per_layer_input", _LOCAL_BASE),
        differing=("attention.head_count_kv", "feed_forward_length"),
        derived=layers_of_two_kinds,
        local_theta=10_000.0,
        has_expert_scales=True,
        fused=("mlp.experts.gate_up_proj",),
        vocabulary="gemma4",
    ),
    "qwen2moe": GGUFForm("qwen2_moe"),
    "qwen3moe": GGUFForm("qwen3_moe", fixed=_NORMALIZED),
    "qwen3next": _QWEN3_NEXT,
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35_MOE, fixed=_QWEN35.fixed | _NORMALIZED),
    "phi3": GGUFForm("phi3", writes_zero_window=True, fused=(_QKV, _GATE_UP), names=_GATED_UP),
    "olmo2": GGUFForm("olmo2", windowed_type="olmo3"),
    "seed_oss": GGUFForm("seed_oss", names=_AFTER_ATTENTION),
    "ernie4_5": GGUFForm("ernie4_5", are_rows_paired=True, paired_share=1.0),
    "ernie4_5-moe": GGUFForm(
        "ernie4_5_moe",
        keys=(_STEP, "expert_shared_count", _SHARED_SIZE, "leading_dense_block_count"),
        are_rows_paired=True,
        paired_share=1.0,
    ),
    "arcee": GGUFForm("arcee", are_rows_paired=True),
    "apertus": GGUFForm("apertus", arrays=tuple(f"xielu.{each}" for each in XIELU), has_default_rope=True),
    "hunyuan-dense": GGUFForm("hunyuan_v1_dense"),
    "starcoder2": GGUFForm("starcoder2", has_layer_norm=True),
    "jais2": GGUFForm("jais2", has_layer_norm=True),
    "stablelm": GGUFForm(
        "stablelm",
        has_layer_norm=True,
        keys=(_PARALLEL,),
        flags={"qk_layernorm": "blk.0.attn_q_norm.weight"},
        settings={_PARALLEL: None},  # llama.cpp's converter writes true if a config has no such setting
        derived=parts_in_parallel,
    ),
    "gpt2": GGUFForm("gpt2", has_layer_norm=True, fused=(_QKV,), are_matrices_transposed=True),
    "gptneox": GGUFForm("gpt_neox", has_layer_norm=True, keys=(_PARALLEL,), fused=(_QKV,)),
    "nemotron": GGUFForm("nemotron", has_layer_norm=True, are_norms_less_one=True),
    "phi2": GGUFForm("phi", has_layer_norm=True),
    "olmo": GGUFForm("olmo", has_layer_norm=True, are_rows_paired=True, only={"attention.clamp_kqv": None}),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, model_type="cohere2", window_period=4),
    "chatglm": GGUFForm("glm", are_rows_paired=True, fused=(_GATE_UP,), names=_GATED_UP, paired_share=0.5),
    "glm4": GGUFForm("glm4", are_rows_paired=True, fused=(_GATE_UP,), names=_GATED_UP, paired_share=0.5),
    "glm4moe": GGUFForm(
        "glm4_moe",
        ("solar_open",),
        keys=(DRAFTING_LAYERS, "expert_count", "expert_shared_count", "expert_group_count", *_SIGMOID_KEYS),
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
        names=_AFTER_ATTENTION,
    ),
    "bailingmoe2": GGUFForm(
        "sarvam_moe",
        keys=("expert_shared_count", "expert_group_count", *_SIGMOID_KEYS),
        only={"expert_gating_func": SIGMOID},
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
        fused=(_QKV,),
    ),
    "dots1": GGUFForm("dots1", keys=("expert_count", "expert_shared_count", *_SIGMOID_KEYS)),
    "exaone-moe": GGUFForm("exaone_moe", keys=("expert_shared_count", *_SIGMOID_KEYS)),
    "afmoe": GGUFForm(
        "afmoe",
        keys=("expert_shared_count", *_SIGMOID_KEYS),
        fixed={"mup_enabled": True},
        window_period=4,
    ),
    "minimax-m2": GGUFForm("minimax_m2"),
    "hunyuan-moe": GGUFForm("hunyuan_v1_moe"),
    "gpt-oss": GGUFForm(
        "gpt_oss",
        window_period=2,
        scaling={"truncate": False},  # files do not tell that yarn's bounds are not rounded
        has_default_rope=True,
        names=_AFTER_ATTENTION,
        stacks=StackOrder(are_transposed=True, are_interleaved=True),
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        keys=("shortconv.l_cache", *_SIGMOID_KEYS),
        settings={"expert_weights_norm": None},
        only={"expert_gating_func": SIGMOID},
        fixed=_LFM2.fixed | _NORMALIZED,
        flags={"use_expert_bias": ".exp_probs_b.bias"},
    ),
    "mellum": GGUFForm("mellum", keys=(_LOCAL_BASE,), window_period=4, fixed=_NORMALIZED),
    "laguna": GGUFForm(
        "laguna",
        keys=_SIGMOID_KEYS,
        settings={"expert_weights_norm": None, "leading_dense_block_count": None},
        only={"expert_gating_func": SIGMOID, "expert_weights_norm": True},
        differing=("attention.head_count",),
        derived=layers_of_other_heads,
    ),
    "bert": GGUFForm(
        "bert",
        ("distilbert", "electra", "roberta", "xlm-roberta"),
        is_encoder=True,
        fixed={"hidden_act": "gelu"},
        derived=learned_positions,
        names=_ENCODER_NAMES,
    ),
    "nomic-bert": GGUFForm(
        "nomic_bert",
        is_encoder=True,
        keys=("rope.freq_base",),
        derived=types_of_texts,
        fused=(_QKV,),
        names=_ENCODER_NAMES,
    ),
    "modern-bert": GGUFForm(
        "modernbert",
        is_encoder=True,
        keys=tuple(key.key for key in ENCODER_KEYS if key.needs == "form"),
        settings={"attention.sliding_window": "local_attention"},
        flags={"norm_bias": "token_embd_norm.bias"},
        fused=(_QKV, _GATE_UP),
        names=_ENCODER_NAMES | _GATED_UP,
    ),
}
# Families of which only folders are read, with their differences.
FOLDERS = {"helium": GGUFForm("helium", paired_share=1.0)}
FOLDERS |= {"vaultgemma": GGUFForm("vaultgemma", are_norms_less_one=True)}
FOLDERS |= {name: GGUFForm(name) for name in ("cwm", "nanochat", "hyperclovax", "lfm3", "hy_v3", "flint", "kolibri1")}
_BY_FAMILY = {family: name for name, form in reversed(FORMS.items()) for family in form.families if family is not None}


def form_of(architecture: str) -> GGUFForm:
    """Return the form of an architecture. An unknown one has the usual form, and its own name as that of the family."""
    return FORMS.get(architecture) or GGUFForm(architecture)


def architecture_in_gguf(config: Mapping[str, Any]) -> str | None:
    """Return the architecture's name in GGUF for the family of a config, or None if GGUF has none."""
    found = _BY_FAMILY.get(str(config.get("model_type")))
    unmasked = None if found is None else FORMS[found].unmasked
    return unmasked if unmasked is not None and config.get("use_bidirectional_attention") is True else found


def form_of_family(config: Mapping[str, Any]) -> GGUFForm:
    """Return the form of the files of a config's family."""
    family = str(config.get("model_type"))
    return FOLDERS.get(family) or form_of(_BY_FAMILY.get(family, ""))
