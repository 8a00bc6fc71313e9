"""Run open-weight language models from Python.

    from infer import LLM, SamplingParams
    llm = LLM("smollm2")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_new_tokens=32)).text)

Names are loaded on first use, so that `import infer` and the command line's help do not wait for torch.
"""

import sys
import warnings
from importlib import import_module

_MODULE_BY_NAME = {
    "LLM": "infer.llm",
    "AsyncLLM": "infer.async_llm",
    "Session": "infer.engine.session.session",
    "Stream": "infer.engine.requests.stream",
    "AsyncStream": "infer.engine.requests.stream",
    "load_model": "infer.llm",
    "load_tokenizer": "infer.llm",
    "BatchEngine": "infer.serving.distributed.ray_batch",
    "SamplingParams": "infer.sampling_params",
    "Classification": "infer.outputs",
    "GenerationResult": "infer.outputs",
    "GenerationTiming": "infer.outputs",
    "Piece": "infer.outputs",
    "RankedDocument": "infer.outputs",
    "ReasoningDelta": "infer.outputs",
    "ToolCall": "infer.outputs",
    "ToolCallDelta": "infer.outputs",
    "RequestOptions": "infer.engine.step.request_options",
    "Tokenizer": "infer.text.tokenizer",
    "sample_token": "infer.compute.sampling.definition",
    "sample_trace": "infer.compute.sampling.trace",
    "apply_repetition_penalty": "infer.compute.sampling.row_stages",
    "apply_frequency_penalty": "infer.compute.sampling.row_stages",
    "apply_presence_penalty": "infer.compute.sampling.row_stages",
    "apply_logit_bias": "infer.compute.sampling.row_stages",
    "apply_temperature": "infer.compute.sampling.row_stages",
    "apply_top_k": "infer.compute.sampling.row_stages",
    "apply_top_p": "infer.compute.sampling.row_stages",
    "apply_min_p": "infer.compute.sampling.row_stages",
    "InferError": "infer.errors",
    "InvalidRequestError": "infer.errors",
    "ModelError": "infer.errors",
}

_FORMER_NAMES: dict[str, str] = {}  # former name → name; a former name answers for one release

__all__ = sorted(_MODULE_BY_NAME)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name in _FORMER_NAMES:
        current = _FORMER_NAMES[name]
        message = f"infer.{name} has been renamed: use infer.{current}. The next release removes the former name"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = current
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'infer' has no attribute {name!r}")
    if sys.platform == "win32":
        raise ImportError(import_module("infer.errors").NO_WINDOWS)
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("infer-engine")
    except PackageNotFoundError:  # the source tree is not installed
        return "0+unknown"
