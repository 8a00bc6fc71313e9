"""Rerankers in a model's files: the rows that, multiplied by the last state, give a score.

The probability that a document is relevant is sigmoid((t − f) · h). h is the last state, t the head's row for the
answer "yes", f its row for "no". A classifier of one or two labels has these rows itself. An encoder reads the query
and the document as a pair, and its classifier of one label gives the score.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from infer.errors import UnsupportedModelError
from infer.files.heads.classifier_files import ClassifierFiles
from infer.files.heads.sentence_modules import read_modules
from infer.files.tensors.tensor_info import TensorInfo

RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt of Qwen3-Reranker's model card, as GGUF files write it.
RERANK_PROMPT = f"""<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {RERANK_INSTRUCTION}
<Query>: {{query}}
<Document>: {{document}}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
COPY = "qwen3"  # value of `RerankerName` for copies under another name
COPY_HINT = f"pass reranker={COPY!r} for a copy of Qwen3-Reranker"
_QWEN3 = "qwen3-reranker"  # in the names of models whose files do not define a reranker
RANK = 4  # llama.cpp's enum llama_pooling_type

Row = int | str  # the row's number, or the text of its token


@final
@dataclass(frozen=True)
class RerankerFiles:
    """A reranker: its score comes from the rows `yes` and `no` of `tensor`.

    If `tensor` is None, the model's classifier computes the score. `has_usual_prompt` is True for models that read
    Qwen3-Reranker's prompt. `prompt` is the prompt of a GGUF file, with `{query}` and `{document}`. `reads_pairs` is
    True for encoders.
    """

    tensor: TensorInfo | None
    yes: Row = "yes"
    no: Row | None = "no"
    has_usual_prompt: bool = True
    prompt: str | None = None
    reads_pairs: bool = False


def reranker_from_folder(
    folder: Path, tensors: Mapping[str, TensorInfo], classifier: ClassifierFiles | None
) -> RerankerFiles | None:
    """Return the reranker of a folder, or None.

    The module LogitScore of sentence-transformers names the ids of the tokens that it compares.
    """
    has_usual_prompt = any(_QWEN3 in part.lower() for part in folder.resolve().parts[-4:])
    if classifier is not None:
        reads_pairs = classifier.reads_pairs
        found = RerankerFiles(None, has_usual_prompt=has_usual_prompt and not reads_pairs, reads_pairs=reads_pairs)
        return found if len(classifier.labels) == 1 else None
    if (head := head_of(tensors)) is None:
        return None
    if (module := next((each for each in read_modules(folder) if each.kind == "LogitScore"), None)) is None:
        return RerankerFiles(head) if has_usual_prompt else None
    config = module.config()
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or not (no is None or type(no) is int):
        problem = f"LogitScore must have ids as true_token_id and false_token_id, got {yes!r:.40} and {no!r:.40}"
        raise UnsupportedModelError(f"{folder.name}: {problem}")
    return RerankerFiles(head, yes, no, has_usual_prompt)


def reranker_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], classifier: ClassifierFiles | None
) -> RerankerFiles | None:
    """Return the reranker of a GGUF file, or None."""
    names = str(metadata.get("general.name", "")).replace(" ", "-"), *path.resolve().parts[-4:]
    has_usual_prompt = any(_QWEN3 in name.lower() for name in names)
    head = head_of(tensors) if classifier is None else None
    is_reranker = metadata.get(f"{metadata['general.architecture']}.pooling_type") == RANK
    if not (is_reranker or has_usual_prompt) or (classifier is None and head is None):
        return None
    if classifier is not None and classifier.reads_pairs:
        return RerankerFiles(None, has_usual_prompt=False, reads_pairs=True) if len(classifier.labels) == 1 else None
    if classifier is not None and len(classifier.labels) > 2:
        return None
    prompt = metadata.get("tokenizer.chat_template.rerank")
    given = prompt if isinstance(prompt, str) else None
    return RerankerFiles(head, has_usual_prompt=has_usual_prompt or classifier is None, prompt=given)


def head_of(tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the tensor of the head, which is the embedding if the two are tied."""
    return tensors.get("lm_head.weight", tensors.get("model.embed_tokens.weight"))
