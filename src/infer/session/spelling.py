"""Two spellings of one conversation: the ids that were said, and those that template and tokenizer make of it."""

from collections.abc import Collection, Sequence


def keep_spelling(
    said: Sequence[int], rendered: Sequence[int], token_bytes: Sequence[bytes], control_ids: Collection[int]
) -> list[int]:
    """`rendered`, but spelt as `said` as far as both are the same bytes and the same control tokens.

    A model's own answer need not be spelt as the tokenizer would. Where the two part, the last place at which both have
    a border between tokens counts.
    """
    num_said, num_rendered = 0, 0
    while num_said < len(said) and num_rendered < len(rendered):
        if said[num_said] == rendered[num_rendered]:
            num_said, num_rendered = num_said + 1, num_rendered + 1
            continue
        border = _next_border((said, rendered), (num_said, num_rendered), token_bytes, control_ids)
        if border is None:
            break
        num_said, num_rendered = border
    return [*said[:num_said], *rendered[num_rendered:]]


def _next_border(
    spellings: tuple[Sequence[int], Sequence[int]],
    starts: tuple[int, int],
    token_bytes: Sequence[bytes],
    control_ids: Collection[int],
) -> tuple[int, int] | None:
    """Where both have written the same since their starts; None if they write different things before."""
    written, ends = [b"", b""], list(starts)  # what one has written and the other has not yet
    while True:
        behind = 0 if len(written[0]) <= len(written[1]) else 1
        if ends[behind] == len(spellings[behind]):
            return None
        token_id = spellings[behind][ends[behind]]
        text = b"" if token_id in control_ids or token_id >= len(token_bytes) else token_bytes[token_id]
        if not text:
            return None
        written[behind] += text
        ends[behind] += 1
        same = min(map(len, written))
        if written[0][:same] != written[1][:same]:
            return None
        written = [rest[same:] for rest in written]
        if not any(written):
            return ends[0], ends[1]
