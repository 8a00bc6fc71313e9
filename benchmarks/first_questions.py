"""Simple questions of a newcomer, each with the rule by which an answer counts as right.

The questions were written before any answer was seen. One was replaced later, because none of 105 answers named the
first president of the United States. An answer must end by itself and must not repeat itself. Its
first two sentences must hold the right word; a list must name enough different things; a text must keep to a length.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPEATED_WORDS, REPEATED_TIMES = 8, 3
_FRUITS = (
    "apples?|bananas?|oranges?|pears?|grapes?|grapefruits?|mango(?:e?s)?|pineapples?|kiwis?|peach(?:es)?|plums?|"
    "cherry|cherries|lemons?|limes?|melons?|watermelons?|strawberry|strawberries|blueberry|blueberries|raspberry|"
    "raspberries|blackberry|blackberries|cranberry|cranberries|pomegranates?|papayas?|figs?|dates?|apricots?|coconuts?|"
    "avocado(?:e?s)?|guavas?|lychees?|tangerines?|cantaloupes?|nectarines?|passion fruits?"
)


@dataclass(frozen=True)
class Question:
    """A prompt, and a rule for an answer that ended by itself and does not repeat itself."""

    text: str
    is_right: Callable[[str], bool]


def repeats_itself(text: str) -> bool:
    """Return True if a run of eight words occurs three times."""
    words = text.lower().split()
    runs = zip(*(words[start:] for start in range(REPEATED_WORDS)), strict=False)
    return max(Counter(runs).values(), default=0) >= REPEATED_TIMES


def has_word(text: str, words: str) -> bool:
    """Return True if the text has one of the words, separated by `|`, as a whole word."""
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE) is not None


def first_sentences(text: str, count: int = 2) -> str:
    parts = [part for part in re.split(r"(?<=[.!?])\s+|\n+", text.strip()) if part.strip()]
    return " ".join(parts[:count])


def fact(words: str) -> Callable[[str], bool]:
    """Return a rule: the first two sentences hold one of the words."""
    return lambda text: has_word(first_sentences(text), words)


def all_of(*words: str) -> Callable[[str], bool]:
    """Return a rule: the answer holds one word of each group."""
    return lambda text: all(has_word(text, each) for each in words)


def names(things: str, at_least: int) -> Callable[[str], bool]:
    """Return a rule: the answer names `at_least` or more different things, and none of them more than twice."""

    def check(text: str) -> bool:
        found = Counter(match.lower().rstrip("s") for match in re.findall(rf"\b(?:{things})\b", text, re.IGNORECASE))
        return len(found) >= at_least and max(found.values()) <= 2

    return check


def writing(topic: str, most_words: int) -> Callable[[str], bool]:
    """Return a rule: the text is about its topic, has at least eight words and at most `most_words`."""
    return lambda text: has_word(text, topic) and 8 <= len(text.split()) <= most_words


def code(pattern: str, most_words: int = 250) -> Callable[[str], bool]:
    """Return a rule: the text has the pattern and keeps to a length."""
    return lambda text: re.search(pattern, text, re.DOTALL) is not None and len(text.split()) <= most_words


_AUTUMN = "autumn|autumnal|fall|falls|falling|leaf|leaves|harvest|golden"
_SUM = r"def \w+\(\s*(\w+)[^,)]*,\s*(\w+)[^)]*\).*(?:return|=) *(?:\1 ?\+ ?\2|\2 ?\+ ?\1|sum\()"

QUESTIONS: Sequence[Question] = [
    Question("What is the capital of France?", fact("Paris")),
    Question("What is 2 + 2?", fact("4|four")),
    Question("How many days are in a week?", fact("7|seven")),
    Question("What color is the sky on a clear day?", fact("blue")),
    Question("What is the opposite of hot?", fact("cold|cool")),
    Question('What is the opposite of "big"?', fact("small|little|tiny")),
    Question('How do you say "hello" in Spanish?', fact("hola")),
    Question('Translate "thank you" into French.', fact("merci")),
    Question("Who wrote Romeo and Juliet?", fact("Shakespeare")),
    Question("What is the largest planet in the solar system?", fact("Jupiter")),
    Question("How many legs does a spider have?", fact("8|eight")),
    Question("What is the chemical formula of water?", fact("H2O|H₂O")),
    Question("What is the boiling point of water in degrees Celsius?", fact("100")),
    Question("Which ocean is the largest?", fact("Pacific")),
    Question("How many months are in a year?", fact("12|twelve")),
    Question("What is the first month of the year?", fact("January")),
    Question("Which animal says meow?", fact("cats?|kittens?")),
    Question("Who was the first person to walk on the Moon?", fact("Armstrong")),
    Question("What language do people speak in Brazil?", fact("Portuguese")),
    Question("Name the three primary colors.", all_of("red", "blue", "yellow|green")),
    Question("List five fruits.", names(_FRUITS, 5)),
    Question("Write a haiku about autumn.", writing(_AUTUMN, 60)),
    Question("Write two sentences about a cat.", writing("cats?|kittens?|feline", 120)),
    Question("Write a Python function that adds two numbers.", code(_SUM)),
]
