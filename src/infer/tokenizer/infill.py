"""Fill in the middle: the prompt of models that were trained to write the text between two texts.

The marks are tokens beside the vocabulary. Most models read the text before first. Mistral's read the text after first,
and need no mark where the answer begins. Names: the published tokenizers, and llama.cpp's `llama-vocab.cpp`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, final

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Refact
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_SUFFIX_FIRST_MARKS = (("[PREFIX]", "[SUFFIX]"),)  # Codestral
_END_NAMES = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<repo_name>", "<|file_sep|>", "<file_sep>"),
    *("<|file_separator|>", "<|endoftext|>", "<EOT>"),
)


@final
class InfillMarks(NamedTuple):
    """Token ids. `middle` is None for models that read the text after first. An answer ends at `ends`, too."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return the prompt of two encoded texts."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_marks(added_ids: Callable[[Iterable[str]], dict[str, int]]) -> InfillMarks | None:
    """Return the marks of a tokenizer, or None if it has none. `added_ids` returns the ids of known names."""
    ends = frozenset(added_ids(_END_NAMES).values())
    for names in (*_MARKS, *_SUFFIX_FIRST_MARKS):
        found = added_ids(names)
        if len(found) == len(names):
            ids = [found[name] for name in names]
            return InfillMarks(ids[0], ids[1], ids[2] if len(ids) > 2 else None, ends)
    return None
