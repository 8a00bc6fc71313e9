"""Fill in the middle: the prompt of models that were trained to write what stands between two texts.

The marks are tokens beside the vocabulary. Most models read the text before first; Mistral's read the text after first
and need no mark where the answer begins. Names: the published tokenizers, and llama.cpp's `llama-vocab.cpp`.
"""

from typing import NamedTuple, final

from infer.tokenizer.tokenizer import Tokenizer

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
    """Token ids. `middle` is None for models that read the text after first."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]  # an answer ends there, besides the model's own end tokens


def infill_marks(tokenizer: Tokenizer) -> InfillMarks | None:
    """Return the model's marks, or None for a model without them."""
    ends = frozenset(tokenizer.added_ids(_END_NAMES).values())
    for names in (*_MARKS, *_SUFFIX_FIRST_MARKS):
        found = tokenizer.added_ids(names)
        if len(found) == len(names):
            ids = [found[name] for name in names]
            return InfillMarks(ids[0], ids[1], ids[2] if len(ids) > 2 else None, ends)
    return None


def infill_ids(tokenizer: Tokenizer, marks: InfillMarks, before: str, after: str) -> list[int]:
    """Return the prompt's ids, with BOS in front where the model wants one."""
    first, last = (
        tokenizer.encode(text, add_special_tokens=False, parse_special=False) if text else []
        for text in (before, after)
    )
    bos = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    if marks.middle is None:
        return [*bos, marks.suffix, *last, marks.prefix, *first]
    return [*bos, marks.prefix, *first, marks.suffix, *last, marks.middle]
