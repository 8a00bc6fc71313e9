"""A tiny model with the files of Qwen3-Embedding: random weights, a byte tokenizer that ends each text, and prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoModel, Qwen3Config

from byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer
from tiny import Tiny, make_tiny

CONTEXT = 256
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT}
SIZES |= {"bos_token_id": None, "eos_token_id": EOS}


def make_qwen3(folder: Path, **settings: Any) -> Any:
    """Save a model that generates, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny(Tiny("qwen3", Qwen3Config(**SIZES | settings)), folder)
    write_byte_tokenizer(folder)
    return model


def make_embedding_model(
    folder: Path,
    *,
    flags: dict[str, bool] | None = None,
    pooling: dict[str, Any] | None = None,
    dense: Sequence[tuple[int, bool, str]] = (),
    is_normalized: bool = True,
    **prompts: Any,
) -> Any:
    """Save a model without a head, and return the model of `transformers`.

    `flags` are for the tokenizer's config. `pooling` has the settings of the pooling module, which takes the last token
    by default. Each dense layer is given by its size, True if it has a bias, and the name of an activation in torch.
    """
    make_qwen3(folder)
    model = AutoModel.from_pretrained(folder).eval()
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ending = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ending])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<eos>", "tokenizer_class": "Qwen2Tokenizer", **(flags or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_modules(folder, ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * is_normalized])
    own = {"word_embedding_dimension": 64, **(pooling or {"pooling_mode_lasttoken": True})}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(own))
    size = 64
    for place, (outputs, has_bias, activation) in enumerate(dense, 2):
        write_dense(folder / f"{place}_Dense", size, outputs, has_bias, activation)
        size = outputs
    settings = {"prompts": PROMPTS, "default_prompt_name": None} | prompts
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return model


def write_modules(folder: Path, kinds: Sequence[str]) -> None:
    """Write the list of modules. Each has a folder named after its index and kind, except for the first."""
    modules = []
    for place, kind in enumerate(kinds):
        path = f"{place}_{kind}" if place else ""
        (folder / path).mkdir(parents=True, exist_ok=True)
        modules.append({"idx": place, "name": str(place), "type": f"sentence_transformers.models.{kind}", "path": path})
    (folder / "modules.json").write_text(json.dumps(modules))


def write_dense(folder: Path, inputs: int, outputs: int, has_bias: bool, activation: str) -> None:
    """Write a dense layer of random weights. `activation` is the name of torch's class."""
    package = "linear" if activation == "Identity" else "activation"
    config = {"in_features": inputs, "out_features": outputs, "bias": has_bias}
    config["activation_function"] = f"torch.nn.modules.{package}.{activation}"
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(outputs)
    tensors = {"linear.weight": torch.randn(outputs, inputs, generator=noise) / 8}
    if has_bias:
        tensors["linear.bias"] = torch.randn(outputs, generator=noise)
    save_file(tensors, folder / "model.safetensors")
