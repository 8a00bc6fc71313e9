"""How texts become vectors, the ids that a model reads, and what is computed of them, as values. Loads no torch."""

from dataclasses import dataclass
from typing import Any, NamedTuple, final, get_args

from infer.outputs import Pooling
from infer.parameters import Count, OneOf


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
            OneOf(get_args(Pooling)).check("pooling", self.pooling)
        if self.dimensions is not None:
            Count(1, size).check("dimensions", self.dimensions)


class ReadText(NamedTuple):
    """The ids of a text or a pair, which `is_cut` if it did not fit.

    The first `num_skipped` tokens are not pooled. Tokens from `second_start` on have the second type, for an encoder
    that reads pairs; None means that all tokens have the first type.
    """

    ids: list[int]
    is_cut: bool = False
    num_skipped: int = 0
    second_start: int | None = None

    def without(self, pad_id: int | None) -> "ReadText":
        """Return the text up to its last token that is not padding, but at least one, as `transformers` pools it."""
        count = len(self.ids)
        while count > 1 and self.ids[count - 1] == pad_id:
            count -= 1
        return self._replace(ids=self.ids[:count])


@final
class TextIds(NamedTuple):
    """The texts of a call, each of at most `most` tokens."""

    texts: list[ReadText]
    most: int

    def part(self, start: int, end: int) -> "TextIds":
        """Return the texts from `start` up to `end`."""
        return self._replace(texts=self.texts[start:end])

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    @property
    def warning(self) -> str:
        """The warning about texts that were cut, or "" if none was."""
        num_cut = sum(text.is_cut for text in self.texts)
        return f"{num_cut} of {len(self.texts)} texts were cut to {self.most} tokens" if num_cut else ""


class Computed(NamedTuple):
    """Vectors `[texts, size]`, a list of scores or of labels, and the texts from which they were computed."""

    found: Any
    texts: TextIds
