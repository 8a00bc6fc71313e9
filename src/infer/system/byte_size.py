"""Sizes as people write them, such as 800MB or 1.5GiB."""

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int | None:
    """Return the number of bytes that a text means, or None if it is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    unit = "" if found is None else found[2].upper()
    unit += "B" if unit and not unit.endswith("B") else ""
    return None if found is None or unit not in _UNITS else round(float(found[1]) * _UNITS[unit])
