"""Hide a number in a long text and ask for it ("needle in a haystack"): a test of caches that evict.

The text is the language reference in CPython's module `pydoc_data.topics`: 100,000 tokens of prose and code.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from infer.text.tokenizer import Tokenizer

CITIES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Tbilisi", "Perth", "Oslo", "Lima", "Hanoi", "Accra")


@dataclass(frozen=True)
class Needle:
    """`token_ids` end where the answer begins."""

    depth: float  # place of the sentence: 0 is the start of the text, 1 its end
    token_ids: list[int]
    answer: str


def reference_text() -> str:
    """Return topic after topic, in the order of their names."""
    return "\n\n".join(" ".join(str(topics[name]).split()) for name in sorted(topics))


def make_needles(tokenizer: Tokenizer, num_tokens: int, depths: Sequence[float], *, seed: int = 0) -> list[Needle]:
    """Return a prompt of `num_tokens` for each depth: another stretch of the text, another city, another number."""
    source = random.Random(seed)
    text, first = tokenizer.encode(reference_text(), add_special_tokens=False), tokenizer.encode("")
    needles = []
    for depth in depths:
        city, number = source.choice(CITIES), str(source.randrange(1000, 10_000))
        hidden = f"\n\nRemember this: the magic number of {city} is {number}.\n\n"
        asked = f"\n\nQuestion: What is the magic number of {city}?\nAnswer: The magic number of {city} is"
        sentence, question = (tokenizer.encode(part, add_special_tokens=False) for part in (hidden, asked))
        length = num_tokens - len(first) - len(sentence) - len(question)
        start = source.randrange(len(text) - length)
        hay, at = text[start : start + length], round(depth * length)
        needles.append(Needle(depth, first + hay[:at] + sentence + hay[at:] + question, number))
    return needles
