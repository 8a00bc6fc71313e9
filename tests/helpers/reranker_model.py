"""Tiny rerankers of random weights, in the forms in which such models are published."""

import json
from pathlib import Path
from typing import Any

from byte_tokenizer import write_byte_tokenizer
from embedding_model import SIZES
from tiny import Tiny, make_tiny

MERGES = [("y", "e"), ("ye", "s"), ("n", "o")]
YES, NO = 257, 258
CONTEXT = 1024
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}<task>{{ message.content }}{% endif %}"
    "{% if message.role == 'query' %}<q>{{ message.content }}{% endif %}"
    "{% if message.role == 'document' %}<d>{{ message.content }}{% endif %}{% endfor %}<|im_end|>"
)


def qwen3_prompt(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    """Return the prompt of the model card of Qwen3-Reranker."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return f"{prefix}{body}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def make_reranker_model(folder: Path, **settings: Any) -> Any:
    """Save a model that generates, and return it. Only the folder's name says that it is a reranker."""
    from transformers import Qwen3Config

    folder.mkdir(parents=True, exist_ok=True)
    sizes = SIZES | {"vocab_size": 261, "eos_token_id": 259, "max_position_embeddings": CONTEXT}
    model = make_tiny(Tiny("qwen3", Qwen3Config(**sizes | settings)), folder)
    write_byte_tokenizer(folder, merges=MERGES)
    return model


def make_logit_score(folder: Path, true_id: Any = YES, false_id: Any = NO, **prompts: Any) -> Any:
    """Save a model with sentence-transformers' module LogitScore, and a template for pairs."""
    model = make_reranker_model(folder)
    write_byte_tokenizer(folder, merges=MERGES, chat_template=PAIR_TEMPLATE)
    kinds = {"base.modules.transformer.Transformer": "", "cross_encoder.modules.logit_score.LogitScore": "1_LogitScore"}
    modules = [
        {"idx": at, "name": str(at), "type": f"sentence_transformers.{kind}", "path": path}
        for at, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    ids = {"true_token_id": true_id, "false_token_id": false_id}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return model
