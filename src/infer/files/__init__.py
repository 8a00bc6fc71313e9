"""Files → hyperparameters and named weights, found, downloaded, read and written.

Opening a model reads only headers, and the shapes and column orders that quantised matrices store as tensors. It loads
no torch. `lazy_weights.LazyWeights` makes weights from `Checkpoint.tensors`, in the types in which they are stored.
Names are those of `tensor_names`. `Checkpoint.tensors` records a format's changes to weights (GGUF's order of the rows
of q and k, Gemma's w for 1 + w). `lazy_weights` undoes these changes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from infer.compute.quantization.ggml_types import FLOAT_TYPES
from infer.errors import ModelFormatError, UnsupportedModelError
from infer.files.config import (
    config_from_folder,
    config_from_gguf,
    generation_config_from_folder,
    generation_config_from_gguf,
)
from infer.files.gguf.forms import GGUFForm, form_of, form_of_family
from infer.files.gguf.gguf import read_whole_gguf
from infer.files.heads.classifier_files import ClassifierFiles, classifier_from_folder, classifier_from_gguf
from infer.files.heads.pooling import EmbeddingFiles, embedding_from_folder, embedding_from_gguf
from infer.files.heads.reranker_files import RerankerFiles, reranker_from_folder, reranker_from_gguf
from infer.files.heads.sentence_modules import TextPrompts, prompts_from_folder, prompts_from_gguf, text_limit
from infer.files.hub.find import resolve
from infer.files.tensors.fused_tensors import taken_apart, with_joined_scales
from infer.files.tensors.quantisation_config import INSTEAD, quantisation_of
from infer.files.tensors.quantised_tensors import with_joined_matrices
from infer.files.tensors.safetensors import read_safetensors_folder
from infer.files.tensors.tensor_info import TensorInfo
from infer.files.tensors.tensor_names import (
    drafting_tensors,
    encoder_names,
    is_norm,
    names_from_gguf,
    names_from_hugging_face,
    own_tensors,
    without_padded_positions,
    without_poolers,
)
from infer.system.open_file import OpenFile

__all__ = ["Checkpoint", "open_checkpoint", "resolve"]

_NUM_SAMPLES, _SAMPLE_BYTES, _HEAD_BYTES = 1024, 64, 1 << 20  # samples of a file that identify it


@dataclass(frozen=True)
class Checkpoint:
    """A model's open files. `config` and `generation_config` use the names of Hugging Face's JSON files."""

    path: Path  # the folder, or the .gguf file
    config: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(repr=False)  # GGUF's key-values, for the tokenizer; {} for a folder
    tensors: Mapping[str, TensorInfo] = field(repr=False)  # by our names
    generation_config: Mapping[str, Any]  # {} if the model has none
    files: tuple[OpenFile, ...] = field(default=(), repr=False)  # the files with the weights
    embedding: EmbeddingFiles | None = None  # None unless the model was made for embeddings
    prompts: TextPrompts = field(default_factory=TextPrompts)  # the prompts of such a model
    reranker: RerankerFiles | None = None  # None unless the model is a reranker
    classifier: ClassifierFiles | None = None
    drafting: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)  # of a layer that only drafts tokens

    def without_metadata(self) -> "Checkpoint":
        """Return the checkpoint without metadata.

        This frees up to 40 MB of a large vocabulary after the tokenizer is made.
        """
        return replace(self, metadata={})

    def check_unchanged(self) -> None:
        """Raise ModelFormatError if the files of the weights were written since they were opened."""
        for file in self.files:
            file.check_unchanged()

    def fingerprint(self) -> str:
        """Return a digest that identifies these weights, from sizes, headers, and samples spread over the files.

        Raises the errors of `OpenFile.read`.
        """
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            size = file.size
            digest.update(size.to_bytes(8, "little") + file.read(0, min(_HEAD_BYTES, size)))
            for index in range(_NUM_SAMPLES):
                start = size * index // _NUM_SAMPLES
                digest.update(file.read(start, min(_SAMPLE_BYTES, size - start)))
        return digest.hexdigest()


def open_checkpoint(model_id: str | Path) -> Checkpoint:
    """Return the model in a folder, a .gguf file, an installed package or the hub's cache.

    Raises InvalidRequestError if it does not exist, and ModelError (ModelFormatError, UnsupportedModelError) if it is
    not a supported model.
    """
    path = resolve(model_id)
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    config = config_from_folder(folder)
    form = form_of_family(config)
    quantisation = quantisation_of(folder, config)
    in_files = read_safetensors_folder(folder)
    read = partial(_tensors_of_folder, folder, config, form)
    tensors, is_encoder = read(with_joined_matrices(own_tensors(in_files, config), quantisation)), form.is_encoder
    drafting = drafting_tensors(in_files, config, lambda layer: read(with_joined_matrices(layer, quantisation)))
    embedding, classifier = embedding_from_folder(folder), classifier_from_folder(folder, config, tensors)
    reranker, prompts = reranker_from_folder(folder, tensors, classifier), prompts_from_folder(folder)
    if (limit := text_limit(folder, is_encoder=is_encoder)) is not None:
        config["text_limit"] = limit
    if is_encoder:
        tensors = without_poolers(without_padded_positions(tensors, config))
    if (embedding or reranker or classifier) and "lm_head.weight" not in tensors:
        # No text is generated, so the files may lack the head that the config names.
        config["tie_word_embeddings"] = True
    steps = embedding.head if embedding else ()
    files = [info.file for info in in_files.values()] + [
        step.weight.file for step in steps if not isinstance(step, str)
    ]
    others = tensors, generation_config_from_folder(folder), tuple(dict.fromkeys(files))
    return Checkpoint(folder, config, {}, *others, embedding, prompts, reranker, classifier, drafting)


def _tensors_of_folder(
    folder: Path, config: Mapping[str, Any], form: GGUFForm, stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return a folder's tensors under our names, with what its format changed."""
    added = 1.0 if form.are_norms_less_one else 0.0
    whole = {"model.norm.weight"} if form.is_last_norm_whole else set[str]()
    tensors = dict[str, TensorInfo]()
    names = encoder_names(stored) if form.is_encoder else names_from_hugging_face(stored)
    for name, info in with_joined_scales(_renamed(folder, stored, names)).items():
        if info.type not in FLOAT_TYPES and info.scales is None and info.packed is None:
            problem = f"tensor {info.name!r:.80} is {info.type}: supported are {', '.join(FLOAT_TYPES)}: {INSTEAD}"
            raise UnsupportedModelError(f"{info.path.name}: {problem}")
        tensors[name] = replace(info, added=added) if is_norm(name) and name not in whole else info
    if config.get("tie_word_embeddings") and "model.embed_tokens.weight" not in tensors and "lm_head.weight" in tensors:
        # safetensors stores a shared matrix under one of its names.
        tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    if form.are_matrices_transposed:
        tensors = {name: _transposed(name, info) for name, info in tensors.items()}
    tensors = taken_apart(tensors, config, form.stacks, has_gates_in_q=form.has_gates_in_q)
    return _with_paired_rows(tensors, config, form.paired_share) if form.paired_share else tensors


def _open_gguf(path: Path) -> Checkpoint:
    file = read_whole_gguf(path)
    config = config_from_gguf(file)
    form = form_of(str(file.metadata["general.architecture"]))
    with_arrays = file.tensors | file.values_of_layers(form.arrays)
    stored = with_factors(with_arrays, has_expert_scales=form.has_expert_scales)
    tensors = _renamed(path, stored, names_from_gguf(stored, form.names))

    def read(some: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        apart = taken_apart(some, config, has_gates_in_q=form.has_gates_in_q)
        apart = _with_paired_rows(apart, config, 1.0) if form.are_rows_paired else apart
        return {
            name: info if info.factor is None else replace(info, type="NVFP4_SCALED") for name, info in apart.items()
        }

    drafting, tensors = drafting_tensors(tensors, config, read), read(own_tensors(tensors, config))
    embedding = embedding_from_gguf(path, file.metadata, tensors)
    classifier = classifier_from_gguf(path, file.metadata, tensors)
    reranker = reranker_from_gguf(path, file.metadata, tensors, classifier)
    others = config, file.metadata, tensors, generation_config_from_gguf(file), file.files
    prompts = prompts_from_gguf(path, file.metadata)
    return Checkpoint(file.path, *others, embedding, prompts, reranker, classifier, drafting)


def _transposed(name: str, info: TensorInfo) -> TensorInfo:
    """Return a matrix of a layer with its rows and columns exchanged, and any other tensor as it is."""
    if len(info.shape) != 2 or not name.startswith("model.layers."):
        return info
    if info.type not in FLOAT_TYPES:
        info.fail(f"expected floats, because the file has it transposed, got {info.type}")
    return info.transposed


def _with_paired_rows(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], share: float
) -> dict[str, TensorInfo]:
    """Return the tensors with the rows of q and k marked as in GGUF, where neighbours rotate together.

    `share` of a head rotates, if the config does not say another. In a layer without rotation, the order does not
    matter. Wrong shapes and numbers are reported later.
    """
    found, num_heads = dict(tensors), config.get("num_attention_heads")
    for given in (config, config.get("rope_scaling"), config.get("rope_parameters")):
        if isinstance(given, Mapping):
            is_proportional = given.get("rope_type", given.get("type")) == "proportional"
            share = 1.0 if is_proportional else given.get("partial_rotary_factor", share)
    if type(num_heads) is not int or num_heads < 1 or not isinstance(share, int | float):
        return found
    for name, info in tensors.items():
        at, is_q, kind = name.partition(".self_attn.q_proj.")
        head_rows = info.shape[0] // num_heads if is_q else 0
        rotated = int(head_rows * share)
        if rotated % 2:
            info.fail(f"expected rows for {num_heads} heads of even size, got the shape {info.shape}")
        if 0 < rotated <= head_rows:
            of_k = f"{at}.self_attn.k_proj.{kind}"
            for each in (name, of_k) if of_k in tensors else (name,):
                num_rows = tensors[each].shape[0]
                if num_rows % head_rows == 0:
                    paired = replace(tensors[each], num_paired_heads=num_rows // head_rows)
                    found[each] = replace(paired, num_paired_rows=rotated)
    return found


def _renamed(path: Path, stored: Mapping[str, TensorInfo], names: Mapping[str, str]) -> dict[str, TensorInfo]:
    """Return the tensors under our names.

    Raises ModelFormatError if two tensors of the file get the same name.
    """
    renamed: dict[str, TensorInfo] = {}
    for theirs, ours in names.items():
        if ours in renamed:
            raise ModelFormatError(path, f"tensor {theirs!r:.80}", f"is the same weight as {renamed[ours].name!r:.80}")
        renamed[ours] = stored[theirs]
    return renamed


def with_factors(tensors: Mapping[str, TensorInfo], *, has_expert_scales: bool) -> dict[str, TensorInfo]:
    """Return the tensors of a file with each scale as the `factor` of its matrix, and without scales of activations.

    If the architecture `has_expert_scales`, the scales of `ffn_down_exps` belong to the router. Raises ModelFormatError
    for a scale of another type or shape.
    """
    found = dict(tensors)
    for name, matrix in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or matrix.type != "NVFP4":
            continue
        found.pop(f"{module}.input_scale", None)
        if f"{module}.scale" not in found or (has_expert_scales and module.endswith(".ffn_down_exps")):
            continue
        scale, shape = found.pop(f"{module}.scale"), matrix.shape[:-2] or (1,)
        if scale.type != "F32" or scale.shape != shape:
            scale.fail(f"expected F32 of the shape {shape}, got {scale.type} of {scale.shape}")
        found[name] = replace(matrix, factor=scale)
    return found
