"""How texts become vectors and scores, and the results, as values. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final, get_args

from infer.engine.requests.request_options import check_choice, check_count
from infer.outputs import Pooling, RankedDocument


@final
@dataclass(frozen=True)
class VectorOptions:
    """How texts become vectors: the arguments of `LLM.embed`."""

    pooling: Pooling | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: bool = False

    def check(self, size: int) -> None:
        """Raise InvalidRequestError for a pooling that does not exist, or more dimensions than a vector has."""
        if self.pooling is not None:
            check_choice("pooling", self.pooling, get_args(Pooling))
        if self.dimensions is not None:
            check_count("dimensions", self.dimensions, 1, size)


class TextIds(NamedTuple):
    """The ids of each text, and the number of texts that were cut to `most` tokens.

    `num_skipped` has the number of first tokens of each text that are not pooled; () skips none. `second_starts` has
    the index of each text's first token of the second type, for an encoder that reads pairs; () means that all tokens
    have the first type.
    """

    token_ids: list[list[int]]
    most: int
    num_cut: int = 0
    num_skipped: Sequence[int] = ()
    second_starts: Sequence[int] = ()

    def part(self, start: int, end: int) -> "TextIds":
        """Return the texts from `start` up to `end`."""
        return self._replace(
            token_ids=self.token_ids[start:end],
            num_skipped=self.num_skipped[start:end],
            second_starts=self.second_starts[start:end],
        )

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def warning(self) -> str:
        """The warning about texts that were cut, or "" if none was."""
        total = len(self.token_ids)
        return f"{self.num_cut} of {total} texts were cut to {self.most} tokens" if self.num_cut else ""


class Computed(NamedTuple):
    """Vectors `[texts, size]`, a list of scores or of labels, and the texts from which they were computed."""

    found: Any
    texts: TextIds


def ranked(found: Sequence[float], documents: Sequence[str], top_n: int | None) -> list[RankedDocument]:
    """Return at most `top_n` documents, the most relevant first. If two scores are equal, the first one comes first."""
    order = sorted(range(len(found)), key=lambda index: -found[index])[:top_n]
    return [RankedDocument(index, found[index], documents[index]) for index in order]
