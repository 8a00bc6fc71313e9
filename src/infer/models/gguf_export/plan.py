"""A folder of safetensors → the metadata and the tensors of a GGUF file of the same model."""

from typing import NamedTuple

from infer.errors import UnsupportedModelError
from infer.files import Checkpoint
from infer.files.gguf.forms import architecture_in_gguf, form_of
from infer.files.gguf.gguf import TypedValue
from infer.files.heads.text_prompts import ARE_POOLED_KEY, DEFAULT_KEY, NAMES_KEY, TEXTS_KEY
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import FAMILIES, as_read, make_architecture
from infer.models.gguf_export.general_values import general_values
from infer.models.gguf_export.heads import head_plan
from infer.models.gguf_export.network_values import decoder_values, encoder_values
from infer.models.gguf_export.rope_values import RopeValues, rope_values
from infer.models.gguf_export.round_trip import check_round_trip
from infer.models.gguf_export.tensors import ExportTensor, export_tensors
from infer.models.gguf_export.tokenizer_values import tokenizer_values
from infer.models.gguf_export.values import Value, typed
from infer.models.tensors import check_tensors


class ExportPlan(NamedTuple):
    """The content of a GGUF file: its key-values and its tensors, in their order."""

    values: dict[str, TypedValue]
    tensors: list[ExportTensor]


def export_plan(checkpoint: Checkpoint) -> ExportPlan:
    """Return the content of a GGUF file of the model in a folder.

    Raises:
        UnsupportedModelError: GGUF has no form for the network or the tokenizer. The error names the missing part.
        ModelError: The config and the tensors disagree, or reading them fails.
    """
    network, path = network_plan(checkpoint), checkpoint.path
    name = str(network.values["general.architecture"].value)
    tokenizer = tokenizer_values(path, name, int(checkpoint.config["vocab_size"]))
    values = network.values | {key: typed(value) for key, value in tokenizer.items()}
    return ExportPlan(values, network.tensors)


def network_plan(checkpoint: Checkpoint) -> ExportPlan:
    """Return the same content without a tokenizer."""
    config, path = checkpoint.config, checkpoint.path
    architecture, name = make_architecture(config), architecture_in_gguf(config)
    if name is None:
        raise UnsupportedModelError(f"{path.name}: GGUF has no architecture for model_type {config['model_type']!r}")
    check_tensors(architecture, checkpoint.tensors)
    form, ropes = form_of(name), RopeValues({}, {}, {})
    if form.is_encoder:
        own = encoder_values(form, config, architecture)
    else:
        read = as_read(config, FAMILIES[str(config["model_type"])])
        ropes = rope_values(form, read, architecture)
        own = decoder_values(form, read, architecture, ropes.settings) | ropes.values
    tensors = export_tensors(path, name, architecture, LazyWeights(checkpoint.tensors), ropes.factors)
    values = general_values(path, name, tensors, checkpoint.generation_config)
    head = head_plan(checkpoint, name, architecture.norm_eps)
    others = prompt_values(checkpoint)
    if architecture.text_inputs is not None and name != "modern-bert":  # otherwise llama.cpp opens no such encoder
        others["tokenizer.ggml.token_type_count"] = max(architecture.text_inputs.num_types, 1)
    values |= {key: typed(value) for key, value in others.items()}
    values |= {f"{name}.{key}": typed(value) for key, value in (own | head.values).items()}
    if head.prompt is not None:
        values["tokenizer.chat_template.rerank"] = typed(head.prompt)
    check_round_trip(path, architecture, values, tensors, ropes.factors, checkpoint.files[0])
    return ExportPlan(values, tensors + head.tensors)


def prompt_values(checkpoint: Checkpoint) -> dict[str, Value]:
    """Return the keys, or none for a model without prompts."""
    prompts = checkpoint.prompts
    if not prompts.by_name:
        return {}
    values: dict[str, Value] = {NAMES_KEY: list(prompts.by_name), TEXTS_KEY: list(prompts.by_name.values())}
    if prompts.default is not None:
        values[DEFAULT_KEY] = prompts.default
    if checkpoint.embedding is not None and checkpoint.embedding.skips_prompt:
        values[ARE_POOLED_KEY] = False
    return values
