"""The bodies of embeddings, reranking, scores and labels, and the items of their answers.

The server's routes and the rows of `infer batch` share them.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, final

from msgspec import UNSET, Meta, Struct, UnsetType

from infer.engine.texts.text_ids import VectorOptions
from infer.errors import InvalidRequestError
from infer.outputs import Pooling, RankedDocument
from infer.request_limits import MAX_TEXTS, MAX_TOKENS
from infer.serving.protocols.bodies import Body
from infer.serving.protocols.foreign import Foreign
from infer.serving.protocols.params import prompts_of, refusal
from infer.serving.protocols.refusals import refuse

Encoding = Literal["float", "base64"]
_OWN_FIELDS = ("dimensions", "prompt_name", "query", "instruction", "top_n")


@final
class EmbeddingsBody(Body, kw_only=True):
    """OpenAI's fields, and those of `LLM.embed`."""

    input: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    pooling: Pooling | None = None  # the default is the model's own, else the mean
    prompt_name: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None


@final
class RerankDocument(Struct):
    """A document as an object, which may have further keys."""

    text: str


@final
class RerankBody(Body, kw_only=True):
    """Cohere's and Jina's fields, and those of `LLM.rerank`."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        "texts": Foreign(same_as=("documents",)),
        "return_text": Foreign(same_as=("return_documents",)),
        "instruct": Foreign(same_as=("instruction",)),
        "top_k": Foreign(same_as=("top_n",)),
    }

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate: bool | None = None


@final
class ClassifyBody(Body, kw_only=True):
    """vLLM's fields. A pair of texts is a list of two texts."""

    input: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_TEXTS)]
    truncate: bool | None = None


_Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


@final
class ScoreBody(Body, kw_only=True):
    """vLLM's fields: one text and several, or the same number of texts on both sides."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        "queries": Foreign(same_as=("text_1",)),
        "documents": Foreign(same_as=("text_2",)),
    }

    text_1: _Texts
    text_2: _Texts
    instruction: str | None = None
    truncate: bool | None = None


def vector_options(body: EmbeddingsBody) -> VectorOptions:
    """Return the options that a body sets."""
    return VectorOptions(
        body.pooling,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate=bool(body.truncate),
    )


def texts_of(given: str | Sequence[Any]) -> list[Any]:
    """Return the inputs as texts or lists of ids. Raises BodyError."""
    texts = prompts_of(given, "input")
    for index, text in enumerate(texts):
        if len(text) == 0:
            path = "input" if isinstance(given, str) else f"input[{index}]"
            raise refuse(f"{path} must not be empty", path)
    return texts


def texts_or_pairs_of(given: str | Sequence[Any]) -> list[Any]:
    """Return the inputs as texts, lists of ids or pairs of texts. Raises BodyError."""
    if not isinstance(given, str) and all(_is_pair(each) for each in given):
        return list(given)
    return texts_of(given)


def _is_pair(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2 and all(isinstance(each, str) for each in given)


def documents_of_body(body: RerankBody) -> list[str]:
    """Return the documents as texts."""
    return [each if isinstance(each, str) else each.text for each in body.documents]


def pairs_of_body(body: ScoreBody) -> list[tuple[str, str]]:
    """Return the pairs of texts. Raises BodyError if the numbers of texts do not fit each other."""
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        message = f"text_1 must be one text or as many as text_2, got {len(first)} and {len(second)}"
        raise refuse(message, "text_1")
    return list(zip(first, second, strict=True))


class Embedding(Struct, tag_field="object", tag="embedding"):
    index: Annotated[int, Meta(ge=0)]
    embedding: list[float] | str


class RerankResult(Struct):
    index: Annotated[int, Meta(ge=0)]
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class Labelled(Struct):
    """The most probable label of a text, and the probabilities of all labels in the model's order."""

    index: Annotated[int, Meta(ge=0)]
    label: str
    probs: list[float]
    num_classes: Annotated[int, Meta(ge=0)]


def embeddings_of(vectors: Any, encoding: Encoding | None) -> list[Embedding]:
    """Return the items for `vectors`, an array `[texts, size]` of float32."""
    if encoding == "base64":
        return [
            Embedding(index, base64.b64encode(vector.astype("<f4").tobytes()).decode())
            for index, vector in enumerate(vectors)
        ]
    return [Embedding(index, vector.tolist()) for index, vector in enumerate(vectors)]


def rerank_results(documents: Sequence[RankedDocument], body: RerankBody) -> list[RerankResult]:
    """Return the items for documents, with their texts if the body asks for them."""
    return [
        RerankResult(each.index, each.score, RerankDocument(each.document) if body.return_documents else UNSET)
        for each in documents
    ]


def labelled(values: Sequence[list[float]], labels: Sequence[str]) -> list[Labelled]:
    """Return the items for the values of texts, each in the order of the labels."""
    return [Labelled(index, labels[each.index(max(each))], each, len(labels)) for index, each in enumerate(values)]


def refusal_of_texts(error: InvalidRequestError, name: str) -> InvalidRequestError:
    """Return the library's error with the name of the body's field. `name` is the field with the texts."""
    return refuse(str(error), error.param) if error.param in _OWN_FIELDS else refusal(error, name)
