"""The settings of a model: one declaration for `LLM`, the command's options, ranks and estimates. Loads no torch.

They are checked before a file is opened. Before a model is loaded, they are checked against the model.
"""

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal, Self, final, get_args, no_type_check

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.errors import InvalidRequestError
from infer.parameters import ANY, Flag, OneOf, Other, Size, Whole, check_fields, parameter, parameters_of
from infer.sampling_params import ALIASES, PARAMETER_NAMES
from infer.system.spellings import install_extra

WeightsType = Literal["auto", "bf16", "q8", "q4"]
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda", "opencl"]
PrecisionName = Literal["exact", "fast"]
KVType = Literal["auto", "f32", "f16", "bf16", "q8", "q4"]
EvictionPolicy = Literal["none", "sliding", "snapkv"]
GrammarBackend = Literal["llguidance", "xgrammar"]
Speculation = Literal["ngram", "draft", "off"]
Overflow = Literal["error", "truncate_left"]
RerankerName = Literal["auto", "qwen3"]

_INSTALL_BY_BACKEND = {"llguidance": "run pip install llguidance", "xgrammar": install_extra("xgrammar")}

# Names in llama.cpp, vLLM and transformers, and what to write. Fields declare the others.
_OTHER_NAMES = dict.fromkeys(("model_path", "model_id", "model_name", "pretrained_model_name_or_path"), "model") | {
    "load_in_4bit": "weights='q4'",
    "load_in_8bit": "weights='q8'",
    "enforce_eager": "capture=False",
}
_CHOSEN_PER_CALL = (
    *("overflow", "speculation", "num_draft_tokens", "prefill_chunk", "cancel"),
    *("on_token", "on_prefill", "options", "batch_size"),
)
_CACHE = CacheSettings()
_OF_AN_EVICTION = ("eviction_window", "protected_prefix", "memory_threshold_mb")


class UnknownSettingError(InvalidRequestError, TypeError):
    """A name that is not a setting of `LLM`."""


def _one_of(kind: Any, prefix: str = "") -> OneOf:
    return OneOf(get_args(kind), is_list=True, prefix=prefix)


DEVICE = Other("checked where it is used", lambda value: True)  # a name, or a device of torch
MODEL = Other("a model's name or path, or None", lambda value: value is None or isinstance(value, str | PathLike))
TEMPLATE = Other("a template's text or None", lambda value: value is None or isinstance(value, str))


# The checks of this class name the broken rule; the type checks of the tests' import hook would raise before them.
@no_type_check
@final
@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings with which a model is loaded and run, the same in `LLM`, in the command and in each rank.

    After construction `dtype` is a name and `prefix_disk` a number of bytes or None. Fields are in the order of the
    command's help, in which each group is shown as a whole. `LLM` describes them.
    """

    # fmt: off
    threads: int | None = parameter(
        None, Whole(1, is_optional=True), "Number of threads that compute.  [default: all cores]", group="numbers",
        other_names=("n_threads", "num_threads"))
    precision: PrecisionName = parameter(
        "exact", _one_of(PrecisionName),
        "Bits of activations with quantised weights on a CPU: 16, or 8 (fast). With BF16 weights: 32, or 16 (fast).",
        group="numbers")
    weights: WeightsType = parameter(
        "auto", _one_of(WeightsType), "Quantise float weights at load; auto keeps the file's format.",
        group="numbers", other_names=("quantization",))
    dtype: DtypeName = parameter(
        "auto", _one_of(DtypeName, "torch."), "Dequantise weights at load; auto keeps the file's format.",
        group="numbers", other_names=("torch_dtype",), takes="DtypeName | torch.dtype")
    reuse_prefixes: bool = parameter(
        False, Flag(), "Read the common beginning of prompts once; not with a policy.",
        group="prefixes", other_names=("enable_prefix_caching",))
    kv_type: KVType = parameter(
        _CACHE.kv_type, _one_of(KVType),
        "Format of stored keys and values; auto chooses by the device and the weights.",
        group="cache", other_names=("cache_type_k", "cache_type_v", "type_k", "type_v", "kv_cache_dtype"))
    eviction_policy: EvictionPolicy = parameter(
        _CACHE.eviction_policy, _one_of(EvictionPolicy),
        "Tokens of a long text to forget. sliding: all but its first and last tokens; snapkv: those of the prompt "
        "that its end does not attend to, then as sliding.", group="cache")
    eviction_window: int = parameter(
        _CACHE.eviction_window, ANY, "With a policy: number of tokens to keep, including the protected ones.",
        group="cache")
    protected_prefix: int = parameter(
        _CACHE.protected_prefix, ANY, "With a policy: number of first tokens that are never forgotten.", group="cache")
    memory_threshold_mb: int | None = parameter(
        None, ANY, "With a policy: forget tokens only if the system has less available memory.",
        group="cache", metavar="MB")
    state_memory_mb: int | None = parameter(
        None, ANY, "Memory for states of recurrent layers, current and stored.  [default: a share of what is free]",
        group="cache", flags=("--state-memory-mb", "--state-memory"), metavar="MB")
    draft_model: str | None = parameter(
        None, MODEL, "A smaller model with the same vocabulary that drafts tokens: faster where they pay, same tokens.",
        group="draft", flags=("-md", "--draft-model", "--model-draft"), metavar="NAME|PATH",
        other_names=("model_draft", "draft", "speculative_model", "assistant_model"), takes="str | Path | None")
    draft_head: bool = parameter(
        True, Flag(), "Leave out the model's own head that drafts tokens.", group="draft", other_names=("mtp",))
    max_seq_len: int | None = parameter(
        None, Whole(2, is_optional=True, is_range=False),
        "Context: tokens of prompt and answer together.  [default: the model's own, at most 8192]",
        group="running", other_names=("n_ctx", "max_model_len", "max_length", "context_length"))
    grammar_backend: GrammarBackend = parameter(
        "llguidance", _one_of(GrammarBackend), "Library that enforces a schema, a pattern or a grammar.",
        group="running", other_names=("guided_decoding_backend", "structured_outputs_backend"))
    tensor_parallel: int = parameter(
        1, Whole(1), "Number of processes that divide the model, each with --threads; same tokens.",
        group="running", other_names=("tensor_parallel_size", "tp_size", "split_mode"))
    capture: bool = parameter(
        True, Flag(), "Run each operation separately: slower, with the same tokens.", group="running")
    chat_template: str | None = parameter(
        None, TEMPLATE, "A Jinja template for conversations, in place of the model's own.",
        group="running", metavar="FILE", other_names=("chat_format",))
    allow_special: bool = parameter(
        False, Flag(), "Read control tokens in a message as control tokens, not as text.", group="running")
    device: str = parameter(  # or a device of torch
        "cpu", DEVICE, "", group="device", flags=("--device", "--backend"), takes="DeviceName | str | torch.device",
        other_names=("n_gpu_layers", "device_map", "backend"), metavar="[auto|cpu|cuda|opencl[:NAME]]")
    reranker: RerankerName = parameter(
        "auto", _one_of(RerankerName),
        "Kind of reranker; qwen3: a copy of Qwen3-Reranker; auto: by the model's files and name.", group="reranker")
    pool_pages: int | None = parameter(
        None, Whole(1, is_optional=True),
        "Pages of 64 tokens that all answers share.  [default: 8 full contexts; with CUDA all that fit]", group="pool")
    prefix_disk: int | None = parameter(
        None, Size(),
        "Size of the files that keep beginnings of prompts for use after a restart; 0 keeps none.  "
        "[default: 8GB, 0 with --api-key-file]",
        group="disk", metavar="SIZE", envvar="INFER_PREFIX_DISK", takes="int | str | None")
    experts_memory: int | None = parameter(
        None, Size(),
        "Memory for a model's experts; those that it cannot hold are read from a file when they are needed.  "
        "[default: all are in memory if they fit]", group="numbers", metavar="SIZE", takes="int | str | None")
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, SETTINGS)
        if importlib.util.find_spec(self.grammar_backend) is None:
            install = _INSTALL_BY_BACKEND[self.grammar_backend]
            raise InvalidRequestError(f"grammar_backend {self.grammar_backend} is not installed: {install}")
        if "auto" not in (self.dtype, self.weights):
            raise InvalidRequestError(
                f"dtype={self.dtype} and weights={self.weights} contradict each other: give only one of them"
            )
        if self.experts_memory is not None and self.tensor_parallel > 1:
            raise InvalidRequestError(
                f"experts_memory works in one process, not with tensor_parallel={self.tensor_parallel}: leave one out"
            )
        _ = self.cache  # which checks the others

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Return the settings that keywords give. Raises InvalidRequestError for an unknown name or a wrong value."""
        for name in keywords:
            if name not in SETTINGS:
                raise UnknownSettingError(_unknown(name))
        return cls(**keywords)

    @property
    def cache(self) -> CacheSettings:
        """The settings of the cache. Prefixes on disk are also reused in memory."""
        values = {each.name: getattr(self, each.name) for each in fields(CacheSettings) if each.name in SETTINGS}
        return CacheSettings(**values | {"reuse_prefixes": self.reuse_prefixes or bool(self.prefix_disk)})

    @property
    def unused(self) -> str | None:
        """The warning for values that apply only to an eviction, if no policy evicts."""
        given = {name: getattr(self, name) for name in _OF_AN_EVICTION}
        changed = [f"{name}={value}" for name, value in given.items() if value != getattr(_CACHE, name)]
        if self.eviction_policy != "none" or not changed:
            return None
        return f"{', '.join(changed)}: no effect with eviction_policy none; sliding or snapkv evicts"


SETTINGS = parameters_of(ModelSettings)
_OTHER_NAMES |= {other: name for name, declared in SETTINGS.items() for other in declared.other_names}


def _unknown(name: str) -> str:
    if name in _OTHER_NAMES:
        return f"unknown setting {name!r} of LLM: did you mean {_OTHER_NAMES[name]}?"
    if name == "trust_remote_code":
        return f"unknown setting {name!r} of LLM: code in a model's folder is never run; leave it out"
    if name in PARAMETER_NAMES or name in ALIASES or name in _CHOSEN_PER_CALL:
        return f"{name!r} is not a setting of LLM: pass it to generate(), stream() or chat()"
    names = ("model", *SETTINGS, "on_progress")
    near = difflib.get_close_matches(name, names, n=1)
    known = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
    return f"unknown setting {name!r} of LLM: {known}"
