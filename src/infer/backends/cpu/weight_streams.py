"""How weights are read from memory, which a core's maker decides and no instruction set says. No bit depends on it.

A stream is a group of 16 rows, record by record. Zen's prefetchers follow one from page to page and are held up by what
else is asked for; of two at once they make little. Others stop at each page's end: docs/log.md.
"""

from functools import cache
from importlib import import_module

_NEAR, FAR = 512, 16384


@cache
def prefers_one_stream() -> bool:
    """Whether this machine reads the weights of a single token faster group by group, whatever CPU is compiled for."""
    name: str = import_module("llvmlite.binding").get_host_cpu_name()
    return name.startswith("znver")


def bytes_ahead(groups: int, columns: int) -> int:
    """How far after a record a tile asks for what comes. Tiles of many tokens wait for products, not for memory."""
    return _NEAR if groups == columns == 1 and prefers_one_stream() else FAR
