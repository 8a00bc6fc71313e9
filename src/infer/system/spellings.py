"""Sizes, names of models and extras, as people write them. Loads nothing."""

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_HOSTS = ("https://", "hf.co/", "huggingface.co/")
_DEFAULT_TAG = ":latest"


def parse_size(text: str) -> int | None:
    """Return the number of bytes that a text means, or None if it is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    unit = "" if found is None else found[2].upper()
    unit += "B" if unit and not unit.endswith("B") else ""
    return None if found is None or unit not in _UNITS else round(float(found[1]) * _UNITS[unit])


def install_extra(name: str) -> str:
    """Return the fix for a package that is missing: the command that installs its extra.

    Until a release is on the package index, the only place that everybody has is a clone (docs/install.md).
    """
    return f"run pip install '.[{name}]' in the clone of infer"


def plain_name(name: str) -> str:
    """Return the name without a hub's host and without the tag of Ollama's clients.

    Examples:
        >>> plain_name("hf.co/org/repo:Q4_K_M"), plain_name("smollm2:latest")
        ('org/repo:Q4_K_M', 'smollm2')
    """
    for host in _HOSTS:
        name = name.removeprefix(host)
    return name.removesuffix(_DEFAULT_TAG)
