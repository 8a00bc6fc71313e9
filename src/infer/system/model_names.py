"""Spellings of a model's name that mean the same: clients write a hub's host before it, or Ollama's tag behind it."""

_HOSTS = ("https://", "hf.co/", "huggingface.co/")
_DEFAULT_TAG = ":latest"


def plain_name(name: str) -> str:
    """Return the name without a hub's host and without the tag of Ollama's clients.

    Examples:
        >>> plain_name("hf.co/org/repo:Q4_K_M"), plain_name("smollm2:latest")
        ('org/repo:Q4_K_M', 'smollm2')
    """
    for host in _HOSTS:
        name = name.removeprefix(host)
    return name.removesuffix(_DEFAULT_TAG)
