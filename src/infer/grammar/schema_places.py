"""Targets of a JSON schema's references: its draft, and the URIs and anchors inside it."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, final
from urllib.parse import unquote, urldefrag, urljoin

from infer.grammar.schema_node import escaped, refuse

_HOLDERS = frozenset(
    {
        *(
            "properties",
            "patternProperties",
            "$defs",
            "definitions",
            "dependentSchemas",
            "dependencies",
            "anyOf",
            "oneOf",
        ),
        *("allOf", "prefixItems", "items", "additionalItems", "additionalProperties", "unevaluatedItems", "not", "if"),
        *("unevaluatedProperties", "then", "else", "contains", "propertyNames", "extends", "disallow", "type"),
    }
)  # of schemas, of names or lists of such
MAX_KEPT_CHARACTERS = 1_000  # of a reference and its base
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})


class NamedPlaces(NamedTuple):
    """Pointers by the URI of a resource, and by URI and anchor, and the number of places of each dynamic anchor."""

    resources: dict[str, str]
    anchors: dict[tuple[str, str], str]
    num_dynamic: Counter[str]


def _joined(base: str, reference: str) -> str:
    """Return the reference resolved against the base, or the reference itself if it is no URI.

    Results of short ones are cached, because the same reference occurs hundreds of times.
    """
    is_short = len(base) + len(reference) <= MAX_KEPT_CHARACTERS
    return _kept_joined(base, reference) if is_short else _join(base, reference)


@lru_cache(maxsize=1_000)
def _kept_joined(base: str, reference: str) -> str:
    return _join(base, reference)


def _join(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _split(uri: str) -> tuple[str, str]:
    """Return the URI and its fragment. A text that is no URI has no fragment."""
    try:
        return urldefrag(uri)[:2]
    except ValueError:
        return uri, ""


@final
class Document:
    """A schema with all targets of its references, which are always inside it. Raises InvalidRequestError."""

    def __init__(self, root: Any, where: str) -> None:
        self.draft = draft_of(root)
        self._raw = root
        self._where = where
        self._id_word = "id" if self.draft <= 4 else "$id"
        self._root_base = self._base_of(root, "")

    @cached_property
    def _named(self) -> NamedPlaces:
        return named_places(self._raw, self._id_word)

    def base_within(self, raw: Mapping[str, Any], base: str) -> str:
        """Return the URI to which references in `raw` are relative. `base` is the URI of the surrounding schema."""
        own_id = raw.get(self._id_word)
        is_hidden = "$ref" in raw and self.draft <= 7
        return _joined(base, own_id) if isinstance(own_id, str) and not is_hidden else base

    def target(self, reference: str, pointer: str, base: str) -> str:
        """Return the pointer of the target of a reference in the schema at `pointer`."""
        if reference.startswith("#/") and "%" not in reference and base in ("", self._root_base):
            return reference[1:]
        uri, fragment = _split(_joined(base, reference))
        fragment = unquote(fragment)
        start = self._named.resources.get(uri)
        if start is None:
            refuse(self._where, pointer, f"'$ref' must stay in the schema (#/...), got {reference!r:.80}")
        if fragment and not fragment.startswith("/"):
            found = self._named.anchors.get((uri, fragment))
            if found is None:
                refuse(self._where, pointer, f"'$ref' leads to no schema: {reference!r:.80}")
            start, fragment = found, ""
        return start + fragment

    def check_dynamic(self, reference: str, pointer: str) -> None:
        if self._named.num_dynamic.get(reference.rpartition("#")[2], 0) > 1:
            refuse(self._where, pointer, f"'$dynamicRef' {reference!r:.80} has several targets, which is not supported")

    def at(self, pointer: str, asked_at: str) -> tuple[Any, str]:
        """Return the schema at `pointer` and its base. `asked_at` is the place of the reference."""
        raw, base = self._raw, self._root_base
        steps = pointer.split("/")[1:]
        for index, step in enumerate(steps):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(raw, Mapping) and name in raw:
                raw = raw[name]
            elif isinstance(raw, list) and name.isdecimal() and int(name[:9]) < len(raw):
                raw = raw[int(name)]
            else:
                refuse(self._where, asked_at, f"'$ref' leads to no schema: {'#' + pointer!r:.80}")
            if index < len(steps) - 1:
                base = self._base_of(raw, base)
        if not isinstance(raw, Mapping | bool):
            refuse(self._where, asked_at, f"'$ref' leads to no schema: {'#' + pointer!r:.80}")
        return raw, base

    def _base_of(self, raw: Any, base: str) -> str:
        own_id = raw.get(self._id_word) if isinstance(raw, Mapping) else None
        return _joined(base, own_id) if isinstance(own_id, str) else base


def draft_of(root: Any) -> int:
    """Return the draft that `$schema` names, or 2020 if it names no known draft."""
    named = root.get("$schema") if isinstance(root, Mapping) else None
    for draft in (3, 4, 6, 7):
        if isinstance(named, str) and f"draft-0{draft}" in named:
            return draft
    return 2019 if isinstance(named, str) and "2019-09" in named else 2020


def named_places(root: Any, id_word: str) -> NamedPlaces:
    num_dynamic: Counter[str] = Counter()
    resources = {"": ""}
    anchors: dict[tuple[str, str], str] = {}
    pending: list[tuple[Any, str, str, bool]] = [(root, "", "", False)]
    unknown: list[
        tuple[Any, str, str, bool]
    ] = []  # words of nobody, whose schemas count only where no other has the URI
    while pending or unknown:
        raw, pointer, base, is_map = (pending or unknown).pop()
        if isinstance(raw, list):
            pending += [
                (item, f"{pointer}/{index}", base, False)
                for index, item in enumerate(raw)
                if isinstance(item, dict | list)
            ]
        elif is_map and isinstance(raw, dict):
            pending += [
                (item, f"{pointer}/{escaped(name)}", base, False)
                for name, item in raw.items()
                if isinstance(item, dict | list)
            ]
        elif isinstance(raw, dict):
            own_id = raw.get(id_word)
            if isinstance(own_id, str):
                uri, fragment = _split(_joined(base, own_id))
                if fragment and own_id.startswith("#"):
                    anchors.setdefault((uri, unquote(fragment)), pointer)
                else:
                    base = uri
                    resources.setdefault(base, pointer)
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(raw.get(word), str):
                    anchors.setdefault((base, raw[word]), pointer)
                    num_dynamic[raw[word]] += word == "$dynamicAnchor"
            for name, item in raw.items():
                if name not in ("enum", "const", "default", "examples") and isinstance(item, dict | list):
                    found = pending if name in _HOLDERS else unknown
                    found.append((item, f"{pointer}/{escaped(name)}", base, name in _MAPS))
    return NamedPlaces(resources, anchors, num_dynamic)
