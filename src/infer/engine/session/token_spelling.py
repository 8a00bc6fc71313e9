"""Two spellings of one conversation: its own ids, and the ids that the template and the tokenizer make."""

from collections.abc import Collection, Sequence


def keep_spelling(
    kept: Sequence[int], rendered: Sequence[int], token_bytes: Sequence[bytes], control_ids: Collection[int]
) -> list[int]:
    """Return `rendered` with the spelling of `kept`, as long as both have the same bytes and the same control tokens.

    A model may spell its own answer differently from the tokenizer. If the two texts differ, the spelling changes at
    the last common border between tokens.
    """
    num_kept, num_rendered = 0, 0
    while num_kept < len(kept) and num_rendered < len(rendered):
        if kept[num_kept] == rendered[num_rendered]:
            num_kept, num_rendered = num_kept + 1, num_rendered + 1
            continue
        border = _next_border((kept, rendered), (num_kept, num_rendered), token_bytes, control_ids)
        if border is None:
            break
        num_kept, num_rendered = border
    return [*kept[:num_kept], *rendered[num_rendered:]]


def _next_border(
    spellings: tuple[Sequence[int], Sequence[int]],
    starts: tuple[int, int],
    token_bytes: Sequence[bytes],
    control_ids: Collection[int],
) -> tuple[int, int] | None:
    """Return where both spellings have written the same text since their starts; None if their texts differ."""
    written, ends = [b"", b""], list(starts)  # bytes that only one spelling has written so far
    while True:
        shorter = 0 if len(written[0]) <= len(written[1]) else 1
        if ends[shorter] == len(spellings[shorter]):
            return None
        token_id = spellings[shorter][ends[shorter]]
        text = b"" if token_id in control_ids or token_id >= len(token_bytes) else token_bytes[token_id]
        if not text:
            return None
        written[shorter] += text
        ends[shorter] += 1
        same = min(map(len, written))
        if written[0][:same] != written[1][:same]:
            return None
        written = [rest[same:] for rest in written]
        if not any(written):
            return ends[0], ends[1]
