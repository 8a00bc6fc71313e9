"""Targets of a JSON schema's references: JSON pointers, and the names that `$id` and `$anchor` give."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, final
from urllib.parse import unquote

from infer.text.grammar.schema_part import refuse, refuse_malformed

_DATA = ("enum", "const", "default", "examples")  # keywords whose values are not schemas


@final
class References:
    """A schema and the named places inside it. Raises SchemaError for a reference that leads elsewhere.

    A pointer is relative to a base: the pointer of the nearest schema around it that has an `$id`. A URI must be
    spelled as in the `$id`.
    """

    def __init__(self, root: Any, where: str) -> None:
        self.draft = draft_of(root)
        self._root = root
        self._where = where
        self._id_word = "id" if self.draft <= 4 else "$id"

    def base_within(self, raw: Mapping[str, Any], pointer: str, base: str) -> str:
        """Return the base of references in the schema `raw` at `pointer`. `base` belongs to the surrounding schema."""
        own = raw.get(self._id_word)
        return pointer if isinstance(own, str) and not own.startswith("#") else base

    def target(self, reference: str, pointer: str, base: str) -> str:
        """Return the pointer of the target of a reference in the schema at `pointer`."""
        uri, _, fragment = reference.partition("#")
        start = self._pointers.get(uri) if uri else base
        if fragment and not fragment.startswith("/"):
            start, fragment = self._pointers.get(f"#{fragment}"), ""
        if start is None:
            refuse(self._where, pointer, f"'$ref' must stay in the schema (#/...), got {reference!r:.80}")
        return start + unquote(fragment)

    def at(self, pointer: str, asked_at: str) -> tuple[Any, str]:
        """Return the schema at `pointer` and the base around it. `asked_at` is the place of the reference."""
        raw, base, passed = self._root, "", ""
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(raw, Mapping):
                base = self.base_within(raw, passed, base)
                raw = raw.get(name)
            else:
                is_place = isinstance(raw, list) and name.isdecimal() and int(name[:9]) < len(raw)
                raw = raw[int(name)] if is_place else None
            passed = f"{passed}/{step}"
        if not isinstance(raw, Mapping | bool):
            refuse_malformed(self._where, asked_at, f"'$ref' leads to no schema: {'#' + pointer!r:.80}")
        return raw, base

    @cached_property
    def _pointers(self) -> dict[str, str | None]:
        """The pointer of each `$id`, and of each anchor after a `#`. None for a name with several places."""
        found: dict[str, str | None] = {}
        pending: list[tuple[Any, str]] = [(self._root, "")]
        while pending:
            raw, pointer = pending.pop()
            if isinstance(raw, Mapping):
                anchor = raw.get("$anchor")
                for name in (raw.get(self._id_word), f"#{anchor}" if isinstance(anchor, str) else None):
                    if isinstance(name, str):
                        name = name if name.startswith("#") else name.removesuffix("#")
                        found[name] = None if name in found else pointer
            inner = raw.items() if isinstance(raw, Mapping) else enumerate(raw) if isinstance(raw, list) else ()
            pending += [(item, f"{pointer}/{escaped(str(name))}") for name, item in inner if name not in _DATA]
        return found


def draft_of(root: Any) -> int:
    """Return the draft that `$schema` names, or 2020 if it names no known draft."""
    named = root.get("$schema") if isinstance(root, Mapping) else None
    for draft in (3, 4, 6, 7):
        if isinstance(named, str) and f"draft-0{draft}" in named:
            return draft
    return 2019 if isinstance(named, str) and "2019-09" in named else 2020


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
