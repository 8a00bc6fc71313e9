"""Fill in the middle: the prompt for models that were trained to write the text between two texts.

The marks are tokens added to the vocabulary. Most models read the text before the gap first. Mistral's models read the
text after the gap first, and need no mark where the answer begins. Names: the published tokenizers, and llama.cpp's
`llama-vocab.cpp`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, final

_MARKS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Refact
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]"),  # Codestral, which reads the text after the gap first
)
_REPOSITORY_NAMES, _FILE_NAMES = ("<|repo_name|>", "<repo_name>"), ("<|file_sep|>", "<file_sep>")
_END_NAMES = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", *_REPOSITORY_NAMES, *_FILE_NAMES),
    *("<|file_separator|>", "<|endoftext|>", "<EOT>"),
)


@final
class InfillMarks(NamedTuple):
    """Token ids. `middle` is None for models that read the text after the gap first. Any of `ends` also ends an answer.

    `repository` and `file` are put before the names of a project and of each of its files, for models that read several
    files.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    repository: int | None = None
    file: int | None = None

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return the prompt of two encoded texts."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]

    def prompt(
        self,
        before: str,
        after: str,
        files: Sequence[tuple[str, str]],
        encode: Callable[[str], list[int]],
        max_tokens: int | None,
    ) -> list[int]:
        """Return the prompt of two texts. Before them are the last of some files, if there is room."""
        around, core, texts = [], self.around(encode(before), encode(after)), list[list[int]]()
        if self.file is None:
            texts = [encode(f"{text}\n\n") for _, text in files]
        elif files:
            around = [] if self.repository is None else [self.repository, *encode("project\n")]
            core = [self.file, *encode("file\n"), *core]
            texts = [[self.file, *encode(f"{name}\n{text}")] for name, text in files]
        room = None if max_tokens is None else max_tokens - len(around) - len(core)
        return around + _kept_files(texts, room) + core


def _kept_files(files: Sequence[Sequence[int]], room: int | None) -> list[int]:
    """Return the ids of the last files that have at most `room` tokens in total."""
    found = list[int]()
    for ids in reversed(files):
        if room is not None and len(found) + len(ids) > room:
            break
        found[:0] = ids
    return found


def find_marks(added_ids: Callable[[Iterable[str]], dict[str, int]]) -> InfillMarks | None:
    """Return the marks of a tokenizer, or None if it has none. `added_ids` returns the ids of known names."""
    ends = frozenset(added_ids(_END_NAMES).values())
    repository, file = (next(iter(added_ids(names).values()), None) for names in (_REPOSITORY_NAMES, _FILE_NAMES))
    for names in _MARKS:
        found = added_ids(names)
        if len(found) == len(names):
            prefix, suffix, *middle = (found[name] for name in names)
            return InfillMarks(prefix, suffix, middle[0] if middle else None, ends, repository, file)
    return None
