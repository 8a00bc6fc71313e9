"""The scores of pairs of texts: by a reranker, which reads both, or by the cosine of an embedding model's vectors."""

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from infer.engine.requests.host import Host
from infer.engine.requests.loop_messages import Work
from infer.engine.texts.embedding import embed, texts_to_embed
from infer.engine.texts.reranking import pairs_to_score, scores
from infer.engine.texts.vector_options import TextIds, VectorOptions
from infer.errors import InvalidRequestError

TextPair = tuple[str, str]


def scoring(
    host: Host,
    pairs: Sequence[TextPair],
    instruction: str | None,
    *,
    truncate: bool,
    may_compare: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[TextIds, Work[list[float]]]:
    """Return the ids that a model reads to score pairs, and the work that scores them.

    A model that is not a reranker compares vectors if its files were made for embeddings, or with `may_compare`.
    `check` is called before each text, and may raise.

    Raises InvalidRequestError for a model of neither kind, for an instruction that the model's prompt cannot have, and
    for a text that does not fit.
    """
    heads = host.facts.heads
    if heads.reranker is not None or not (heads.embedder or may_compare):
        ids = pairs_to_score(host, pairs, instruction, truncate=truncate, check=check)
        return ids, scores(host, ids)
    if instruction is not None:
        raise InvalidRequestError(
            "instruction must be left out: this model compares vectors, without a prompt", param="instruction"
        )
    options = VectorOptions(normalize=True, truncate=truncate)
    ids = texts_to_embed(host, texts_of_pairs(pairs), options, check)
    return ids, _compare(host, pairs, ids, options)


def _compare(host: Host, pairs: Sequence[TextPair], texts: TextIds, options: VectorOptions) -> Work[list[float]]:
    vectors = yield from embed(host, texts, options)
    return cosines(pairs, vectors)


def texts_of_pairs(pairs: Sequence[TextPair]) -> list[str]:
    """Return the texts to embed: the second text of each pair, then each different first text once."""
    return [*(second for _, second in pairs), *dict.fromkeys(first for first, _ in pairs)]


def cosines(pairs: Sequence[TextPair], vectors: Float[Tensor, "texts size"]) -> list[float]:
    """Return the cosine of each pair, from −1 to 1. `vectors` are those of `texts_of_pairs`, of length 1.

    Each sum is computed separately in float64, so a cosine's bits depend only on its own pair. Vectors are rounded, so
    the cosine of a text with itself may be slightly above 1.
    """
    firsts, wide = dict.fromkeys(first for first, _ in pairs), vectors.double()
    places = {first: len(pairs) + at for at, first in enumerate(firsts)}
    sums = (float((wide[places[first]] * wide[at]).sum()) for at, (first, _) in enumerate(pairs))
    return [max(-1.0, min(1.0, each)) for each in sums]
