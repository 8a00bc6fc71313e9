"""Tiny classifiers of random weights: decoders whose head has one row per label."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from byte_tokenizer import write_byte_tokenizer
from embedding_model import SIZES
from tiny import Tiny, make_tiny

LABELS = ("bad", "so-so", "good")


def make_classifier(
    folder: Path, config_class: Any = None, labels: Sequence[str] | None = LABELS, num_labels: int = 3, **settings: Any
) -> Any:
    """Save a classifier, and return it. Without `labels`, its labels have the default names of `transformers`."""
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    folder.mkdir(parents=True, exist_ok=True)
    make_tiny(Tiny("classifier", (config_class or Qwen3Config)(**SIZES | settings)), folder)
    names: dict[str, Any] = {"num_labels": num_labels}
    if labels is not None:
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: at for at, name in enumerate(labels)}}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **names, **settings).eval()
    model.score.weight.data.normal_(std=0.3)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return model


def join_pairs(folder: Path) -> None:
    """Give the tokenizer a format for pairs: a token between the two texts."""
    path = folder / "tokenizer.json"
    joined = json.loads(path.read_text())
    pieces = {"single": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}
    mark = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    pieces["pair"] = [pieces["single"][0], mark, {"Sequence": {"id": "B", "type_id": 1}}]
    pieces["special_tokens"] = {"<|im_end|>": {"id": "<|im_end|>", "ids": [257], "tokens": ["<|im_end|>"]}}
    joined["post_processor"] = {"type": "TemplateProcessing"} | pieces
    path.write_text(json.dumps(joined))
