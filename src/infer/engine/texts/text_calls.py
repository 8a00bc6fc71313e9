"""Calls that wait for the vectors, scores and labels of texts: the work of `LLM`'s methods."""

import warnings
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from infer.engine.requests.host import Host
from infer.engine.requests.prompt_encoding import Prompt
from infer.engine.texts.classification import TextOrPair, classifications, classify, texts_to_classify
from infer.engine.texts.embedding import embed, texts_to_embed
from infer.engine.texts.reranking import check_top_n, documents_of
from infer.engine.texts.similarity import scoring
from infer.engine.texts.vector_options import TextIds, VectorOptions, ranked
from infer.errors import TruncationWarning
from infer.outputs import Classification, RankedDocument


def embed_texts(host: Host, texts: Sequence[Prompt], options: VectorOptions) -> Float[Tensor, "texts size"]:
    """Return one vector per text. See `LLM.embed`."""
    ids = texts_to_embed(host, texts, options)
    warn_if_cut(ids)
    return host.loop.call(embed(host, ids, options)).get()


def rank_documents(
    host: Host, query: str, documents: Sequence[str], top_n: int | None, instruction: str | None, *, truncate: bool
) -> list[RankedDocument]:
    """Return documents by their relevance to a query. See `LLM.rerank`."""
    given = documents_of(documents)
    check_top_n(top_n)
    ids, work = scoring(host, [(query, each) for each in given], instruction, truncate=truncate)
    warn_if_cut(ids)
    return ranked(host.loop.call(work).get(), given, top_n)


def classify_texts(host: Host, texts: Sequence[TextOrPair], *, truncate: bool) -> list[Classification]:
    """Return the labels of each text. See `LLM.classify`."""
    ids = texts_to_classify(host, texts, truncate=truncate)
    warn_if_cut(ids)
    return classifications(host, host.loop.call(classify(host, ids)).get())


def warn_if_cut(ids: TextIds, stacklevel: int = 4) -> None:
    """Warn about texts that were cut. `stacklevel` is the parameter of the standard library."""
    if ids.warning:
        warnings.warn(ids.warning, TruncationWarning, stacklevel=stacklevel)
