"""How weights are read from memory on each maker's cores: the order of groups, and the prefetch distance.

A stream is a group of 16 rows, record by record. A tile reads one stream, or two at the same time. Zen's prefetchers
follow one stream from page to page, and handle two streams badly. Up to Zen 4 other prefetches delay them. Zen 5's are
too late for tiles that consume records quickly. The prefetchers of other cores stop at each page's end:
docs/dev/log.md. The instruction set does not matter, and no bit changes.
"""

from functools import cache
from importlib import import_module

_NEAR, FAR = 512, 16384


@cache
def most_by_one_stream(*, is_float: bool) -> int:
    """Return the largest number of tokens for which weights are read faster in one stream than in two.

    It is 0 if two are always at least as fast. Zen reads one stream faster than two. With more tokens, two groups that
    share activations are faster.
    """
    if not _core_name().startswith("znver"):
        return 0
    return 1 if is_float or prefers_near() else 4


@cache
def prefers_near() -> bool:
    """Return True if a far prefetch of one stream delays the core's own prefetches: Zen 1 to Zen 4."""
    return _core_name() in {f"znver{generation}" for generation in range(1, 5)}


def halves_vectors() -> bool:
    """Return True if cores with AVX-512 compute 512 bits in two halves, so that to widen F16 delays products: Zen 4."""
    return prefers_near()


def way_of_reading() -> str:
    """Return "two" (streams), or "near" or "far" (one stream, with this prefetch distance), for this machine."""
    if not _core_name().startswith("znver"):
        return "two"
    return "near" if prefers_near() else "far"


def bytes_ahead(groups: int, columns: int) -> int:
    """Return the prefetch distance of a tile of `groups` × `columns`: bytes from the record that it reads now.

    Tiles of many tokens wait for products, not for memory.
    """
    return _NEAR if groups == columns == 1 and prefers_near() else FAR


def _core_name() -> str:
    name: str = import_module("llvmlite.binding").get_host_cpu_name()
    return name
