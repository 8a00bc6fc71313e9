"""A tiny model with the files of Qwen3-Embedding: random weights, a byte tokenizer that ends each text, and prompts."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors
from transformers import AutoModel, Qwen3Config

from byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer
from tiny import Tiny, make_tiny

CONTEXT = 256
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def make_qwen3(folder: Path, **settings: Any) -> Any:
    """Save a model that generates, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny(Tiny("qwen3", Qwen3Config(**SIZES | settings)), folder)
    write_byte_tokenizer(folder)
    return model


def make_embedding_model(folder: Path, *, flags: dict[str, bool] | None = None, **prompts: Any) -> Any:
    """Save a model without a head, and return the one of `transformers`. `flags` are for the tokenizer's config."""
    make_qwen3(folder)
    model = AutoModel.from_pretrained(folder).eval()
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ending = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ending])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<eos>", "tokenizer_class": "Qwen2Tokenizer", **(flags or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": at, "name": str(at), "type": f"sentence_transformers.models.{kind}", "path": path}
        for at, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 64, "pooling_mode_lasttoken": true}'
    )
    settings = {"prompts": PROMPTS, "default_prompt_name": None} | prompts
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return model
