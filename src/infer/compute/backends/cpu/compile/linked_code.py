"""Compiled code that is ready to run after it is copied to memory: object files are linked when they are stored.

LLVM, loaded to link a few kilobytes, costs a process 65 ms and 39 MB. An image needs less: memory, and the addresses of
a few symbols. Only ELF for x86-64 is understood, and only the relocations that LLVM emits there for
position-independent code. `try_make` returns None for everything else, and LLVM links that.

    b"infer image\n" | a line of JSON: [entry, places by the symbol that they hold offsets from; "" the image] | bytes
"""

import ctypes
import json
import mmap
import platform
import re
import struct
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, final

MAGIC = b"infer image\n"

# The wrapper that Numba puts around a command has a path for errors, which no command takes, and it calls these.
NEVER_CALLED = frozenset(
    {"NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure", "numba_gil_release"}
    | {"numba_runtime_build_excinfo_struct", "numba_unpickle"}
)

_MOST_BYTES = 1 << 20  # of a section: the largest kernel has a tenth of it
_SYMBOL = re.compile(r"[A-Za-z0-9_.$@]*")

# ELF, from its specification (System V ABI) and that of x86-64
_IDENTITY = b"\x7fELF\x02\x01\x01"  # 64 bits, little endian
_RELOCATABLE, _X86_64 = 1, 62
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8  # types of sections
_WRITABLE, _ALLOCATED = 1, 2  # their flags
_UNDEFINED, _ABSOLUTE, _COMMON = 0, 0xFFF1, 0xFFF2  # sections of symbols
_ABSOLUTE_64, _RELATIVE_32, _CALL_32, _RELATIVE_64 = 1, 2, 4, 24  # R_X86_64_64, PC32, PLT32, PC64


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    at: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


class _UnknownError(Exception):
    """Raised for object files that only LLVM can link."""


@final
@dataclass
class _Layout:
    """An object file's sections as they will be laid out in memory."""

    code: bytes
    sections: list[_Section]
    image: bytearray = field(default_factory=bytearray)
    start_by_section: dict[int, int] = field(default_factory=dict)
    start_by_common: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[int]] = field(default_factory=dict)  # by symbol

    def text(self, strings: int, at: int) -> str:
        start = self.sections[strings].at + at
        return self.code[start : self.code.index(b"\0", start)].decode()

    def reserve(self, size: int, align: int) -> int:
        if size > _MOST_BYTES or align > _MOST_BYTES:
            raise _UnknownError
        self.image.extend(bytes(-len(self.image) % max(align, 1)))
        start = len(self.image)
        self.image.extend(bytes(size))
        return start


def are_used_here() -> bool:
    """Return True if commands are stored as images on this machine: its object files are ELF for x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def try_make(code: bytes, entry: str) -> bytes | None:
    """Return the image of an object file, to be entered at its function `entry`; None if only LLVM can link it."""
    try:
        return _make(code, entry)
    except (_UnknownError, struct.error, IndexError, KeyError, ValueError):
        return None


def _make(code: bytes, entry: str) -> bytes:
    if not code.startswith(_IDENTITY) or struct.unpack_from("<HH", code, 16) != (_RELOCATABLE, _X86_64):
        raise _UnknownError
    table_at, count, names = *struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HH", code, 60)
    layout = _Layout(
        code, [_Section(*struct.unpack_from("<IIQQQQIIQQ", code, table_at + 64 * i)) for i in range(count)]
    )
    for index, section in enumerate(layout.sections):
        name = layout.text(names, section.name)
        if not section.flags & _ALLOCATED or name == ".eh_frame" or not section.size:
            continue
        if section.flags & _WRITABLE and ".rel.ro" not in name:
            raise _UnknownError
        start = layout.reserve(section.size, section.align)
        layout.start_by_section[index] = start
        if section.type != _NO_BITS:
            layout.image[start : start + section.size] = code[section.at : section.at + section.size]
    for section in layout.sections:
        if section.type == _RELOCATIONS and section.info in layout.start_by_section:
            _relocate(layout, section)
    return MAGIC + json.dumps([_entry(layout, entry), layout.places]).encode() + b"\n" + layout.image


def _relocate(layout: _Layout, section: _Section) -> None:
    for at in range(section.at, section.at + section.size, 24):
        place, type_, symbol, addend = struct.unpack_from("<QIIq", layout.code, at)
        place += layout.start_by_section[section.info]
        target, name = _find(layout, section.link, symbol)
        if type_ == _ABSOLUTE_64:
            struct.pack_into("<q", layout.image, place, addend + (target or 0))
            layout.places.setdefault(name if target is None else "", []).append(place)
        elif target is not None and type_ == _RELATIVE_64:
            struct.pack_into("<q", layout.image, place, target + addend - place)
        elif target is not None and type_ in (_RELATIVE_32, _CALL_32):
            struct.pack_into("<i", layout.image, place, target + addend - place)
        else:
            raise _UnknownError


def _find(layout: _Layout, table: int, index: int) -> tuple[int | None, str]:
    """Return a symbol's offset in the image (None if it is external) and its name."""
    name, section, value, size = _symbol(layout, table, index)
    if section == _UNDEFINED:
        return None, name
    if section == _COMMON:  # Numba's environment of a function, which no command reads
        if name not in layout.start_by_common:
            layout.start_by_common[name] = layout.reserve(size, value)
        return layout.start_by_common[name], name
    if section == _ABSOLUTE:
        raise _UnknownError
    return layout.start_by_section[section] + value, name


def _symbol(layout: _Layout, table: int, index: int) -> tuple[str, int, int, int]:
    """Return name, section, value and size."""
    symbols = layout.sections[table]
    name_at, _, _, section, value, size = struct.unpack_from("<IBBHQQ", layout.code, symbols.at + 24 * index)
    return layout.text(symbols.link, name_at), section, value, size


def _entry(layout: _Layout, entry: str) -> int:
    for table, section in enumerate(layout.sections):
        if section.type == _SYMBOLS:
            for index in range(section.size // section.entry_size):
                name, of_section, value, _ = _symbol(layout, table, index)
                if name == entry and of_section in layout.start_by_section:
                    return layout.start_by_section[of_section] + value
    raise _UnknownError


def _try_parse(content: bytes) -> tuple[int, dict[str, list[int]], bytes] | None:
    """Return (entry, places, code); None unless every number is valid, and every place is within the code."""
    header, _, code = content.removeprefix(MAGIC).partition(b"\n")
    try:
        entry, places = json.loads(header)
    except (ValueError, TypeError, RecursionError):
        return None
    if not content.startswith(MAGIC) or not _is_in(entry, len(code)) or not isinstance(places, dict):
        return None
    for symbol, each in places.items():
        if not _SYMBOL.fullmatch(symbol) or not isinstance(each, list):
            return None
        if not all(_is_in(place, len(code) - 7) for place in each):
            return None
    return entry, places, code


def _is_in(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def try_load(content: bytes) -> int | None:
    """Load an image, and return the address of its entry, which stays valid for ever.

    Returns None if it is no image, if a symbol is missing, or if the system provides no executable memory.
    """
    parsed = _try_parse(content)
    if parsed is None:
        return None
    entry, places_by_symbol, code = parsed
    base = _allocate(len(code))
    if base is None:
        return None
    image = bytearray(code)
    for symbol, places in places_by_symbol.items():
        added = symbol_address(symbol) if symbol else base
        if added is None:
            return None
        for place in places:
            struct.pack_into("<Q", image, place, (struct.unpack_from("<q", image, place)[0] + added) % 2**64)
    ctypes.memmove(base, bytes(image), len(image))
    if _libc().mprotect(base, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        return None
    return base + entry


def may_run_code() -> bool:
    """Return True if the system lets a process make memory executable: hardened containers do not."""
    base = _allocate(mmap.PAGESIZE)
    return base is not None and not _libc().mprotect(base, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)


def _allocate(size: int) -> int | None:
    """Return the address of memory that is never freed: a thread may run in it while the interpreter ends."""
    protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc().mmap(None, size, protection, kind, -1, 0)
    return None if address in (None, ctypes.c_void_p(-1).value) else address


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    library.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


@cache
def symbol_address(symbol: str) -> int | None:
    """Return the address at which every process finds the symbol; None if it does not exist."""
    if symbol in NEVER_CALLED:
        return never_called_address()
    try:
        return ctypes.cast(ctypes.CDLL(None)[symbol], ctypes.c_void_p).value
    except AttributeError:
        return None


def never_called_address() -> int | None:
    return ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
