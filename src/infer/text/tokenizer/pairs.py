"""Two texts as one input, in the form that a model was trained on: `[CLS] first [SEP] second [SEP]`."""

from typing import NamedTuple, final

import tokenizers

from infer.errors import InvalidRequestError
from infer.text.tokenizer.tokenizers_library import MAX_SHORT, check_encodable, panics_as


@final
class EncodedPair(NamedTuple):
    """The ids of one or two texts, and for each id the type that the model's table of token types expects."""

    ids: list[int]
    type_ids: list[int]

    @classmethod
    def of_one(cls, ids: list[int]) -> "EncodedPair":
        """Return ids that all have the first type."""
        return cls(ids, [0] * len(ids))

    @property
    def second_start(self) -> int:
        """The index of the first token of the second type, or the number of tokens if there is none."""
        return self.type_ids.index(1) if 1 in self.type_ids else len(self.ids)


def encode_pair(backend: tokenizers.Tokenizer, first: str, second: str) -> tuple[EncodedPair, list[int]]:
    """Return the pair, and its ids that come from the texts.

    `backend` must treat special tokens in a text as ordinary text. Raises InvalidRequestError if the tokenizer has no
    form for pairs, which has a token between two texts, or if the library fails on the texts.
    """
    check_encodable(first)
    check_encodable(second)
    with panics_as(lambda problem: InvalidRequestError(f"the tokenizer fails on the texts: {problem}")):
        if not _separates(backend):
            raise InvalidRequestError(
                "the tokenizer has no form for pairs of texts: use a model that was trained on pairs"
            )
        if max(len(first), len(second)) <= MAX_SHORT:
            found = backend.encode(first, second)
        else:
            found = backend.encode_batch_fast([(first, second)])[0]
    is_added = found.special_tokens_mask
    spelled = [token_id for token_id, added in zip(found.ids, is_added, strict=True) if not added]
    return EncodedPair(list(found.ids), list(found.type_ids)), spelled


def _separates(backend: tokenizers.Tokenizer) -> bool:
    """Return True if both texts are kept, with an added token between them."""
    is_added = backend.encode("a", "a").special_tokens_mask
    num_texts = 2 * len(backend.encode("a", add_special_tokens=False).ids)
    places = [place for place, added in enumerate(is_added) if not added]
    return len(places) == num_texts > 0 and places[-1] - places[0] >= num_texts
