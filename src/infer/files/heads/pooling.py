"""Files of an embedding model: how the states of a text's tokens become one vector. Loads no torch.

The steps after the pooling, layers and activations, are also those of classifiers.

A folder has modules of sentence-transformers: `Pooling`, then any number of `Dense`, then perhaps `Normalize`. A GGUF
file has a pooling type, and perhaps two dense layers.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from infer.compute.quantization.ggml_types import FLOAT_TYPES
from infer.errors import UnsupportedModelError
from infer.files.heads.sentence_modules import ARE_POOLED_KEY, SentenceModule, read_modules, vector_size_from_folder
from infer.files.tensors.tensor_info import TensorInfo
from infer.outputs import Pooling

ActivationName = Literal["gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]


@final
@dataclass(frozen=True)
class LayerFiles:
    """The weight and the bias of a dense layer, `[outputs, inputs]`, or with an eps of a layer norm."""

    weight: TensorInfo
    bias: TensorInfo | None = None
    eps: float | None = None

    @property
    def is_dense(self) -> bool:
        return self.eps is None


StepFiles = LayerFiles | ActivationName
HeadFiles = tuple[StepFiles, ...]


def take_layer(tensors: MutableMapping[str, TensorInfo], prefix: str, eps: float | None = None) -> LayerFiles:
    """Remove the tensors `prefix.weight` and, if present, `prefix.bias`, and return their layer."""
    return LayerFiles(tensors.pop(f"{prefix}.weight"), tensors.pop(f"{prefix}.bias", None), eps)


def check_head(steps: Sequence[StepFiles], size: int) -> int:
    """Return the size of the vector that the steps compute from a state of `size`.

    Raises ModelFormatError for a wrong shape, and for a tensor type without values.
    """
    for step in steps:
        if isinstance(step, str):
            continue
        outputs = step.weight.shape[0] if step.weight.shape else 0
        _check_shape(step.weight, (max(outputs, 1), size) if step.is_dense else (size,))
        size = outputs
        if step.bias is not None:
            _check_shape(step.bias, (size,))
    return size


def _check_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        tensor.fail(f"expected {shape}, got {tensor.shape}")
    if tensor.type not in FLOAT_TYPES and tensor.path.suffix == ".safetensors":
        supported = ", ".join(FLOAT_TYPES)
        tensor.fail(f"expected {supported}, got {tensor.type}")


_PREFIX = "pooling_mode_"
# Names of sentence-transformers: its flags, and its newer `pooling_mode`.
_MODES: dict[Pooling, tuple[str, ...]] = {
    "cls": ("cls_token", "cls"),
    "max": ("max_tokens", "max"),
    "mean": ("mean_tokens", "mean"),
    "mean_sqrt_len": ("mean_sqrt_len_tokens",),
    "weightedmean": ("weightedmean_tokens", "weightedmean"),
    "last": ("lasttoken",),
}
_POOLING_BY_MODE = {mode: pooling for pooling, modes in _MODES.items() for mode in modes}
POOLING_BY_NUMBER: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's enum llama_pooling_type
_NOT_ONE_VECTOR = (0, 4)  # in the same enum: the states of all tokens, and the score of a reranker
_ACTIVATIONS_BY_CLASS: dict[str, tuple[ActivationName, ...]] = {
    "torch.nn.modules.linear.Identity": (),
    "torch.nn.modules.activation.GELU": ("gelu",),
    "torch.nn.modules.activation.ReLU": ("relu",),
    "torch.nn.modules.activation.Sigmoid": ("sigmoid",),
    "torch.nn.modules.activation.SiLU": ("silu",),
    "torch.nn.modules.activation.Tanh": ("tanh",),
}
_GGUF_DENSE = ("dense_2", "dense_3")
_SENTENCE = "sentence_embedding"  # sentence-transformers' name of the pooled vector
_NO_VECTOR = ("Transformer", "Dropout", "LogitScore")


@final
@dataclass(frozen=True)
class EmbeddingFiles:
    """A pooling and the layers after it.

    If `normalizes`, vectors have length 1. If `skips_prompt`, the tokens of a prompt are not pooled. Vectors keep the
    first `dimensions`; None means all.
    """

    pooling: Pooling
    head: HeadFiles = ()
    normalizes: bool = True
    skips_prompt: bool = False
    dimensions: int | None = None


def embedding_from_folder(folder: Path) -> EmbeddingFiles | None:
    """Return how vectors are made, or None for a model that was not made for embeddings.

    Raises UnsupportedModelError for a pooling or a module that is not supported, and ModelError for a malformed file.
    """
    modules = [each for each in read_modules(folder) if each.kind not in _NO_VECTOR]
    if not modules:
        return None
    pooling, *after = modules
    if pooling.kind != "Pooling":
        raise pooling.unsupported("after Transformer, only Pooling is supported")
    normalizes = bool(after) and after[-1].kind == "Normalize"
    steps = list[StepFiles]()
    for module in after[:-1] if normalizes else after:
        if module.kind != "Dense":
            raise module.unsupported("after Pooling, only Dense layers and a last Normalize are supported")
        steps += _dense_steps(module)
    config = pooling.config()
    skips_prompt = config.get("include_prompt") is False
    own = vector_size_from_folder(folder)
    return EmbeddingFiles(_pooling_of(pooling, config), tuple(steps), normalizes, skips_prompt, own)


def _pooling_of(module: SentenceModule, config: Mapping[str, Any]) -> Pooling:
    """Return the only pooling in a module's settings. The default is the mean."""
    modes = [name.removeprefix(_PREFIX) for name, value in config.items() if name.startswith(_PREFIX) and value]
    if (named := config.get("pooling_mode")) is not None:
        modes = named if isinstance(named, list) else [named]
    modes = modes or ["mean"]
    if len(modes) != 1 or str(modes[0]) not in _POOLING_BY_MODE:
        supported = ", ".join(name for name in _POOLING_BY_MODE if not name.endswith("_token"))
        raise UnsupportedModelError(
            f"{module.folder.name}: {module.config_name} has the pooling {' and '.join(map(str, modes))!r:.80}: "
            f"supported is one of {supported}"
        )
    return _POOLING_BY_MODE[str(modes[0])]


def _dense_steps(module: SentenceModule) -> HeadFiles:
    """Return a Dense module's layer and its activation."""
    config = module.config()
    for name, usual in (("module_input_name", _SENTENCE), ("module_output_name", _SENTENCE), ("use_residual", False)):
        if config.get(name) not in (None, usual):
            raise module.unsupported(f"{module.config_name} has {name} {config[name]!r:.60}, supported is {usual!r}")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in _ACTIVATIONS_BY_CLASS:
        known = ", ".join(each.rpartition(".")[2] for each in _ACTIVATIONS_BY_CLASS)
        problem = f"{module.config_name} has the activation_function {activation!r:.80}, supported are {known}"
        raise module.unsupported(problem)
    tensors = module.tensors()
    if "linear.weight" not in tensors:
        raise module.unsupported(f"its weights have no tensor 'linear.weight': {', '.join(tensors)!r:.80}")
    return take_layer(tensors, "linear"), *_ACTIVATIONS_BY_CLASS[activation]


def embedding_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> EmbeddingFiles | None:
    """Return how vectors are made, or None. The tensors of dense layers are removed from `tensors`.

    Raises UnsupportedModelError for a pooling type that is not supported.
    """
    steps = tuple(take_layer(tensors, name) for name in _GGUF_DENSE if f"{name}.weight" in tensors)
    key = f"{metadata['general.architecture']}.pooling_type"
    number = metadata.get(key, 0)
    if type(number) is not int or number not in (*_NOT_ONE_VECTOR, *POOLING_BY_NUMBER):
        supported = ", ".join(f"{number} ({name})" for number, name in POOLING_BY_NUMBER.items())
        raise UnsupportedModelError(f"{path.name}: {key} {number!r:.60} is not supported: supported are {supported}")
    if number in _NOT_ONE_VECTOR:
        return None
    skips_prompt = metadata.get(ARE_POOLED_KEY) is False
    return EmbeddingFiles(POOLING_BY_NUMBER[number], steps, skips_prompt=skips_prompt)
