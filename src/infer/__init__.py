"""Run open-weight language models from Python.

    from infer import LLM, SamplingParams
    llm = LLM("smollm2")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_new_tokens=32)).text)

Names are loaded on first use, so that `import infer` and the command line's help do not wait for torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_MODULE_BY_NAME = {
    "LLM": "infer.llm",
    "Session": "infer.session",
    "Stream": "infer.decode",
    "load_model": "infer.llm",
    "load_tokenizer": "infer.llm",
    "generate": "infer.decode",
    "SamplingParams": "infer.params",
    "GenerationResult": "infer.results",
    "GenerationTiming": "infer.results",
    "Piece": "infer.results",
    "Tokenizer": "infer.tokenizer",
    "sample_token": "infer.sampling.reference",
    "InferError": "infer.errors",
    "InvalidRequestError": "infer.errors",
    "ModelError": "infer.errors",
}

__all__ = sorted(_MODULE_BY_NAME)

try:
    __version__ = version("infer-engine")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'infer' has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return __all__
