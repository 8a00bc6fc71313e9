"""Rerankers: how relevant documents are to a query, by a decoder that reads both and answers yes or no.

A score is computed like an embedding, from the state of the last token. So its bits depend on its own pair alone.
"""

import math
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from infer.checkpoint import Checkpoint
from infer.checkpoint.lazy_weights import read_row
from infer.checkpoint.reranker_files import RerankerFiles, Row, head_of
from infer.engine.embedding import embed, too_long
from infer.engine.host import Host
from infer.engine.model_settings import RerankerName
from infer.engine.request import check_prompt
from infer.engine.vector_options import TextIds, VectorOptions
from infer.errors import InvalidRequestError, ModelError
from infer.outputs import RankedDocument
from infer.tokenizer import Tokenizer

QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_INSTRUCTION, _QUERY, _DOCUMENT = ("{{ messages[%d].content }}" % index for index in range(3))  # noqa: UP031
# The prompt of Qwen3-Reranker's model card. An expression ends it, because Jinja drops a newline at the end.
QWEN3_TEMPLATE = f"""<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {_INSTRUCTION}
<Query>: {_QUERY}
<Document>: {_DOCUMENT}<|im_end|>
<|im_start|>assistant
<think>

</think>
{{{{ '\\n' }}}}"""
_ROLES = re.compile(r"""["']query["'].*["']document["']|["']document["'].*["']query["']""", re.DOTALL)
_POOLING = VectorOptions("last", normalize=False)


@final
@dataclass(frozen=True, eq=False)
class Reranker:
    """A prompt for a query and a document, and the row by which the last state is multiplied.

    `template` None is the model's own chat template, which has messages with the roles query and document.
    `instruction` is the one of calls that give none.
    """

    row: Float[Tensor, "hidden"]
    template: str | None
    instruction: str | None
    takes_instruction: bool = True

    def encode(self, tokenizer: Tokenizer, instruction: str | None, query: str, document: str) -> list[int]:
        """Return the ids of the prompt for a pair. Raises InvalidRequestError."""
        instruction = self.instruction if instruction is None else instruction
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None or self.template is not None:
            messages.insert(0, {"role": "system", "content": instruction or ""})
        return tokenizer.encode_chat(messages, chat_template=self.template)

    def score(self, state: Float[Tensor, "hidden"]) -> float:
        """Return the probability that the document is relevant."""
        logit = float((state.double() * self.row).sum())
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def make_reranker(checkpoint: Checkpoint, tokenizer: Tokenizer, name: RerankerName) -> Reranker | None:
    """Return the reranker of a model, or None. `name` "qwen3" makes one of a model whose files do not say so.

    Raises ModelError for a tokenizer without the answers.
    """
    files = checkpoint.reranker
    if files is None:
        head = head_of(checkpoint.tensors)
        if name == "auto" or head is None:
            return None
        files = RerankerFiles(head)
    row = _row_of(files, files.yes, tokenizer)
    if files.no is not None:
        row = row - _row_of(files, files.no, tokenizer)
    own = tokenizer.chat_template or ""
    if files.prompt is not None:
        template, takes_instruction = _template_of(files.prompt)
        return Reranker(row, template, QWEN3_INSTRUCTION if takes_instruction else None, takes_instruction)
    if name == "auto" and _ROLES.search(own):
        return Reranker(row, None, checkpoint.prompts.text_of(None) or None)
    if name == "qwen3" or files.is_qwen3:
        return Reranker(row, QWEN3_TEMPLATE, QWEN3_INSTRUCTION)
    return None  # no file says how the model reads a pair


def _row_of(files: RerankerFiles, row: Row, tokenizer: Tokenizer) -> Float[Tensor, "hidden"]:
    if isinstance(row, str):
        ids = tokenizer.encode(row, add_special_tokens=False)
        if len(ids) != 1:
            raise ModelError(f"a reranker answers {row!r} in one token, and this tokenizer has {len(ids)} for it")
        row = ids[0]
    if row >= files.tensor.shape[0]:
        raise ModelError(f"the reranker's token {row} is not one of the {files.tensor.shape[0]} rows of the head")
    return read_row(files.tensor, row).double()


def _template_of(prompt: str) -> tuple[str, bool]:
    """Return llama.cpp's prompt as a chat template, and True if it has the instruction that a call may replace."""
    text = prompt.replace("{query}", _QUERY).replace("{document}", _DOCUMENT)
    text = text.replace(QWEN3_INSTRUCTION, _INSTRUCTION)
    return (text[:-1] + "{{ '\\n' }}" if text.endswith("\n") else text), _INSTRUCTION in text


def reranker_of(host: Host) -> Reranker:
    """Return the reranker of a model. Raises InvalidRequestError if it is none."""
    if not isinstance(host.settings.reranker, Reranker):
        raise InvalidRequestError(
            "this model is no reranker, as far as its files say: load a reranker, or pass reranker='qwen3' for a copy "
            "of Qwen3-Reranker"
        )
    return host.settings.reranker


def pairs_to_score(host: Host, pairs: Sequence[tuple[Any, Any]], instruction: str | None, *, truncate: bool) -> TextIds:
    """Return the ids of the prompt for each query and document.

    Raises InvalidRequestError for what is no text, and ContextLengthError for a pair that does not fit the context.
    With `truncate`, the document is cut at its end.
    """
    reranker = reranker_of(host)
    _check_text("instruction", instruction if instruction is not None else "")
    if instruction is not None and not reranker.takes_instruction:
        raise InvalidRequestError("instruction must be left out: this model's prompt has none", param="instruction")
    found, num_cut = list[list[int]](), 0
    for index, (query, document) in enumerate(pairs):
        _check_text("query", query)
        _check_text("document", document, f" {index}")
        try:
            ids, is_cut = _fitting(host, reranker, instruction, query, document, truncate=truncate)
            found.append(check_prompt(host.requests.limits, ids, room=0))
        except InvalidRequestError as error:
            raise type(error)(f"document {index}: {error}", param=error.param) from error
        num_cut += is_cut
    return TextIds(found, host.requests.limits.max_seq_len, num_cut)


def _fitting(
    host: Host, reranker: Reranker, instruction: str | None, query: str, document: str, *, truncate: bool
) -> tuple[list[int], bool]:
    """Return the ids of a pair's prompt, and True if the document was cut."""
    tokenizer, most = host.tokenizer, host.requests.limits.max_seq_len
    if not truncate and (least := tokenizer.least_num_tokens(query + document)) > most:
        raise too_long(f"at least {least}", most)
    ids, own = reranker.encode(tokenizer, instruction, query, document), list[int]()
    if len(ids) <= most:
        return ids, False
    if truncate:
        own = tokenizer.encode(document, add_special_tokens=False, parse_special=False)
    while len(ids) > most:
        if len(own) < len(ids) - most:
            raise too_long(str(len(ids)), most)
        own = own[: len(own) - (len(ids) - most)]
        ids = reranker.encode(tokenizer, instruction, query, tokenizer.decode(own, skip_special_tokens=False))
    return ids, True


def _check_text(name: str, value: object, where: str = "") -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name}{where} must be a text, got {type(value).__name__}", param=name)


def scores(host: Host, pairs: Sequence[list[int]]) -> Generator[None, None, list[float]]:
    """Return the score of each prompt of a pair, from 0 to 1. Work for the loop, a step at a time."""
    reranker = reranker_of(host)
    states = yield from embed(host, pairs, _POOLING)
    return [reranker.score(state) for state in states]


def ranked(found: Sequence[float], documents: Sequence[str], top_n: int | None) -> list[RankedDocument]:
    """Return the documents by their scores, the most relevant first, `top_n` at most. At ties, the first one leads."""
    order = sorted(range(len(found)), key=lambda index: -found[index])[:top_n]
    return [RankedDocument(index, found[index], documents[index]) for index in order]


def check_top_n(top_n: int | None) -> None:
    """Raise InvalidRequestError for a number of documents that is not at least 1."""
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequestError(f"top_n must be a whole number of at least 1, got {top_n!r:.40}", param="top_n")


def documents_of(documents: object) -> list[str]:
    """Return a list of documents. Raises InvalidRequestError for one text in place of a list."""
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise InvalidRequestError(
            f"documents must be a list of texts, got {type(documents).__name__}", param="documents"
        )
    return list(documents)
