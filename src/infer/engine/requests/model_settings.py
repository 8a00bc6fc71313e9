"""The settings of `LLM` and its calls: allowed values, and the names in other engines. Loads no torch.

All settings are checked before a file is opened. Before a model is loaded, they are checked against the model.
"""

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, get_args

from infer.errors import InvalidRequestError
from infer.sampling_params import ALIASES, PARAMETER_NAMES
from infer.system.byte_size import parse_size
from infer.system.extras import install_extra

WeightsType = Literal["auto", "bf16", "q8", "q4"]
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda", "opencl"]
PrecisionName = Literal["exact", "fast"]
KVType = Literal["auto", "f32", "f16", "bf16", "q8", "q4"]
EvictionPolicy = Literal["none", "sliding", "snapkv"]
GrammarBackend = Literal["llguidance", "xgrammar"]
Speculation = Literal["ngram"]
Overflow = Literal["error", "truncate_left"]
RerankerName = Literal["auto", "qwen3"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "weights": get_args(WeightsType),
    "precision": get_args(PrecisionName),
    "kv_type": get_args(KVType),
    "eviction_policy": get_args(EvictionPolicy),
    "grammar_backend": get_args(GrammarBackend),
    "reranker": get_args(RerankerName),
}
_FLAGS = ("capture", "allow_special", "reuse_prefixes")
_INSTALL_BY_BACKEND = {"llguidance": "run pip install llguidance", "xgrammar": install_extra("xgrammar")}

# Names in llama.cpp, vLLM and transformers, and our names.
_OTHER_NAMES = {
    "n_ctx": "max_seq_len",
    "max_model_len": "max_seq_len",
    "max_length": "max_seq_len",
    "context_length": "max_seq_len",
    "n_threads": "threads",
    "num_threads": "threads",
    "model_path": "model",
    "model_id": "model",
    "model_name": "model",
    "pretrained_model_name_or_path": "model",
    "torch_dtype": "dtype",
    "quantization": "weights",
    "load_in_4bit": "weights='q4'",
    "load_in_8bit": "weights='q8'",
    "n_gpu_layers": "device",
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "split_mode": "tensor_parallel",
    "device_map": "device",
    "backend": "device",
    "cache_type_k": "kv_type",
    "cache_type_v": "kv_type",
    "type_k": "kv_type",
    "type_v": "kv_type",
    "kv_cache_dtype": "kv_type",
    "enable_prefix_caching": "reuse_prefixes",
    "guided_decoding_backend": "grammar_backend",
    "structured_outputs_backend": "grammar_backend",
    "chat_format": "chat_template",
    "enforce_eager": "capture=False",
}
_CHOSEN_PER_CALL = (
    *("overflow", "speculation", "num_draft_tokens", "prefill_chunk", "cancel"),
    *("on_token", "on_prefill", "options", "batch_size"),
)

P = ParamSpec("P")


class UnknownSettingError(InvalidRequestError, TypeError):
    """A name that is not a setting of `LLM`."""


def checks_settings(init: Callable[P, None]) -> Callable[P, None]:
    """Return a constructor that first checks its keywords."""
    names = tuple(signature(init).parameters)[1:]

    @wraps(init)
    def call(*args: P.args, **settings: P.kwargs) -> None:
        for name in settings:
            if name not in names:
                raise UnknownSettingError(_unknown(name, names))
        check_settings(settings)
        init(*args, **settings)

    return call


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a value that no model can be loaded with."""
    for name, value in settings.items():
        if name in _CHOICES and (not isinstance(value, str) or value not in _CHOICES[name]):
            raise InvalidRequestError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r:.80}")
        if name == "dtype" and str(value).removeprefix("torch.") not in get_args(DtypeName):
            raise InvalidRequestError(f"dtype must be one of {', '.join(get_args(DtypeName))}, got {value!r:.80}")
        if name in _FLAGS and not isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be True or False, got {value!r:.80}")
        if name in ("max_seq_len", "threads", "pool_pages") and value is not None:
            _check_count(name, value, 2 if name == "max_seq_len" else 1)
        if name == "tensor_parallel":
            _check_count(name, value, 1)
        if name == "prefix_disk" and value is not None:
            prefix_bytes(value)
        if name == "chat_template" and value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"chat_template must be a template's text or None, got {value!r:.80}")
        if name == "on_progress" and value is not None and not callable(value):
            raise InvalidRequestError(f"on_progress must be a function or None, got {value!r:.80}")
    _check_installed(settings.get("grammar_backend", "llguidance"))


def prefix_bytes(value: object) -> int:
    """Return the bytes of `prefix_disk`: a number of bytes, a text such as "8GB", or None for 0.

    Raises InvalidRequestError for any other value.
    """
    found = parse_size(value) if isinstance(value, str) else value
    if found is None and value is None:
        return 0
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise InvalidRequestError(f'prefix_disk must be a number of bytes or a size such as "8GB", got {value!r:.80}')
    return found


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} must be a whole number from {least}, got {value!r:.80}")


def _check_installed(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        raise InvalidRequestError(f"grammar_backend {backend} is not installed: {_INSTALL_BY_BACKEND[backend]}")


def _unknown(name: str, names: tuple[str, ...]) -> str:
    if name in _OTHER_NAMES:
        return f"unknown setting {name!r} of LLM: did you mean {_OTHER_NAMES[name]}?"
    if name == "trust_remote_code":
        return f"unknown setting {name!r} of LLM: code in a model's folder is never run; leave it out"
    if name in PARAMETER_NAMES or name in ALIASES or name in _CHOSEN_PER_CALL:
        return f"{name!r} is not a setting of LLM: pass it to generate(), stream() or chat()"
    near = difflib.get_close_matches(name, names, n=1)
    known = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
    return f"unknown setting {name!r} of LLM: {known}"
