"""The bodies and answers of embeddings, reranking, scores and labels.

The server's routes and the rows of `infer batch` share them.
"""

import base64
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, final

from msgspec import UNSET, Meta, Struct, UnsetType

from infer.engine.texts.text_ids import VectorOptions
from infer.outputs import Pooling, RankedDocument
from infer.request_limits import MAX_TEXTS, MAX_TOKENS
from infer.serving.protocols.bodies import prompts_of
from infer.serving.protocols.events import Count, Output
from infer.serving.protocols.fields import refuse
from infer.serving.protocols.foreign import Foreign
from infer.serving.protocols.openai.ask import Body

Encoding = Literal["float", "base64"]
_Item = TypeVar("_Item")
_Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class Embedding(Struct, tag_field="object", tag="embedding"):
    index: Count
    embedding: list[float] | str


def _texts_of(given: str | Sequence[Any]) -> list[Any]:
    texts = [] if given == [] else prompts_of(given, "input")
    if "" in texts:
        path = "input" if isinstance(given, str) else f"input[{texts.index('')}]"
        raise refuse(f"{path} must not be empty", path)
    return texts


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

    def texts(self) -> list[Any]:
        """Return the inputs as texts or lists of ids. Raises BodyError. Only a body of Ollama may have none."""
        return _texts_of(self.input)

    def options(self) -> VectorOptions:
        """Return the options that the body sets."""
        return VectorOptions(self.pooling, self.prompt_name, self.dimensions, self.normalize, bool(self.truncate))

    def items(self, vectors: Any) -> list[Embedding]:
        """Return the items of the answer for `vectors`, an array `[texts, size]` of float32."""
        as_texts = (base64.b64encode(each.astype("<f4")).decode() for each in vectors)
        values = as_texts if self.encoding_format == "base64" else vectors.tolist()
        return list(starmap(Embedding, enumerate(values)))


@final
class RerankDocument(Struct):
    """A document as an object, which may have further keys."""

    text: str


class RerankResult(Struct):
    index: Count
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RankedText(Struct):
    """A text of an answer to a body of Text Embeddings Inference."""

    index: Count
    score: float
    text: str | UnsetType = UNSET


@final
class RerankBody(Body, kw_only=True):
    """The fields of Cohere, of Jina and of `LLM.rerank`, or those of Text Embeddings Inference, which has `texts`."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        "return_text": Foreign(same_as=("return_documents",)),
        "instruct": Foreign(same_as=("instruction",)),
        "top_k": Foreign(same_as=("top_n",)),
    }

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=MAX_TEXTS)] | None = None
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)] | None = None
    top_n: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    return_documents: bool | None = None
    raw_scores: bool | None = None
    instruction: str | None = None
    truncate: bool | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Names of the fields with the documents and with the query."""
        return "documents" if self.texts is None else "texts", "query"

    def document_texts(self) -> list[str]:
        """Return the texts of the documents. Raises BodyError if no field has them, or both."""
        if self.texts is not None and self.documents is not None:
            raise refuse("texts must be left out beside documents, which has the same texts", "texts")
        given = self.documents if self.texts is None else self.texts
        if given is None:
            raise refuse("documents is missing: it is required", "documents", "missing_required_parameter")
        return [each if isinstance(each, str) else each.text for each in given]

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, each) for each in self.document_texts()]

    def ranked_texts(self, documents: Sequence[RankedDocument]) -> list[RankedText]:
        """Return the answer to a body with `texts`, with the texts themselves if the body asks for them."""
        return [
            RankedText(each.index, each.score, each.document if self.return_documents else UNSET) for each in documents
        ]

    def items(self, documents: Sequence[RankedDocument]) -> list[RerankResult]:
        """Return the items of the answer, with the documents' texts if the body asks for them."""
        return [
            RerankResult(each.index, each.score, RerankDocument(each.document) if self.return_documents else UNSET)
            for each in documents
        ]


class Labelled(Struct):
    """The most probable label of a text, and the probabilities of all labels in the model's order."""

    index: Count
    label: str
    probs: list[float]
    num_classes: Count


@final
class ClassifyBody(Body, kw_only=True):
    """vLLM's fields. A pair of texts is a list of two texts."""

    input: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_TEXTS)]
    truncate: bool | None = None

    def texts(self) -> list[Any]:
        """Return the inputs as texts, lists of ids or pairs of texts. Raises BodyError."""
        given: Any = self.input
        if type(given) is list and all(isinstance(each, list) and [*map(type, each)] == [str] * 2 for each in given):
            return given
        return _texts_of(given)

    def items(self, values: Sequence[list[float]], labels: Sequence[str]) -> list[Labelled]:
        """Return the items of the answer for the values of texts, each in the order of the labels."""
        return [Labelled(index, labels[each.index(max(each))], each, len(labels)) for index, each in enumerate(values)]


@final
class ScoreBody(Body, kw_only=True):
    """vLLM's fields: one text and several, or the same number of texts on both sides."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        "queries": Foreign(same_as=("text_1",)),
        "documents": Foreign(same_as=("text_2",)),
    }
    names: ClassVar[tuple[str, str]] = ("text_2", "text_1")  # of the fields with the texts and with the queries
    raw_scores: ClassVar[bool] = False

    text_1: _Texts
    text_2: _Texts
    instruction: str | None = None
    truncate: bool | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts. Raises BodyError if the numbers of texts do not fit each other."""
        first, second = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            message = f"text_1 must be one text or as many as text_2, got {len(first)} and {len(second)}"
            raise refuse(message, "text_1")
        return list(zip(first, second, strict=True))


class EmbeddingsUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


class Embeddings(Output, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class RerankOutput(Output):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingsUsage


class Score(Struct, tag_field="object", tag="score"):
    index: Count
    score: float


class ListOutput(Output, Generic[_Item], kw_only=True, tag_field="object", tag="list"):
    """The scores or the labels of texts."""

    id: str
    created: Count
    model: str
    data: list[_Item]
    usage: EmbeddingsUsage
