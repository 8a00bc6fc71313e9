"""Formats for the values of a trace, in tables and in pictures."""

import re
import unicodedata

from infer.sampling_params import PARAMETERS

_STYLE = re.compile(r"\x1b\[[\d;]*m")


def heading(stage: str) -> str:
    """Return the heading of a stage of the sampler."""
    return PARAMETERS[stage].stage if stage in PARAMETERS else stage


def percent(share: float) -> str:
    """Return a share in percent, with two decimals. A share that would round to 0 is shown as <0.01%."""
    return "<0.01%" if 0 < share < 0.00005 else f"{share:.2%}"


def quoted(text: str) -> str:
    """Return the text in quotes, on one line, with escapes for characters that do not print."""
    return "'" + "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text) + "'"


def tail(text: str, count: int) -> str:
    return text if len(text) <= count else "…" + text[1 - count :]


def shortened(text: str, width: int) -> str:
    while display_width(text) > width:
        text = text.removesuffix("…")[:-1] + "…"
    return text


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text.

    Wide East Asian characters take two; combining and invisible characters and styles take none.
    """
    return sum(map(_columns, _STYLE.sub("", text) if "\x1b" in text else text))


def _columns(character: str) -> int:
    if " " <= character <= "~":
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
