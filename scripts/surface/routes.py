"""Rows of the server: routes with the fields of their bodies and answers, and the metrics.

The fields are those of the server's OpenAPI description. A field of an object in a field is written with a dot, and a
field of the objects in a list with `[].`, so a row does not depend on the classes that describe them. A value that a
field may have is a row too, if the field has few.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
from msgspec import Struct

from infer.engine.step.snapshot import EngineSnapshot, PoolState, SequenceState
from infer.serving.distributed.front import ShelfFront
from infer.serving.distributed.shelf import Shelf
from infer.serving.protocols.events import Output
from infer.serving.protocols.foreign import FOREIGN, Foreign
from infer.serving.server.app import ROUTES
from infer.serving.server.endpoint import ApiRoute
from infer.serving.server.metrics import Metrics
from infer.serving.server.routes.openapi import document

Row = tuple[str, str]
_ONE_OF = ("anyOf", "oneOf", "allOf")
_IDLE: Any = SimpleNamespace(pools=(), running=(), waiting=(), max_running=1, num_preemptions=0)  # a snapshot
_FAMILIES_OF_THE_SYSTEM = "process_"  # those that prometheus_client finds only on Linux


def engine_event_rows() -> Iterator[Row]:
    """Yield the fields of the events of `/v1/engine/events`."""
    parts = {"": EngineSnapshot, "sequences[].": SequenceState, "pools[].": PoolState}
    for place, kind in parts.items():
        yield from ((f"{place}{field.name}", "a field") for field in fields(kind))


def all_routes() -> list[ApiRoute]:
    """Return the routes of a server of one model, and those that only a server of several models has."""
    known, table = {(each.method, each.path) for each in ROUTES}, ShelfFront(Mock(Shelf, models={})).table
    return [*ROUTES, *(each for each in table if (each.method, each.path) not in known)]


def route_rows() -> Iterator[Row]:
    routes = all_routes()
    described = document(routes)
    schemas = described["components"]["schemas"]
    for each in routes:
        path = each.path.replace(":path}", "}")
        name, operation = f"{each.method} {path}", described["paths"][path][each.method.lower()]
        media = operation["responses"]["200"]["content"]
        yield name, f"answers {', '.join(media)}{', without a key' * each.is_open}"
        for parameter in operation.get("parameters", ()):
            yield f"{name} {parameter['in']} {parameter['name']}", _kind_of(parameter["schema"])
        contents = {"request": operation.get("requestBody", {}).get("content", {}), "response": media}
        for side, content in contents.items():
            for media_type in content.values():
                yield from _fields(f"{name} {side} ", media_type["schema"], schemas)


def _fields(place: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the fields of an object by their paths. A field of several objects of a choice has the kinds of all."""
    kinds: dict[str, set[str]] = {}
    _collect("", schema, schemas, frozenset(), kinds)
    for path, found in kinds.items():
        yield place + path, " | ".join(sorted(found))


def _collect(
    path: str,
    schema: Mapping[str, Any],
    schemas: Mapping[str, Any],
    open_names: frozenset[str],
    kinds: dict[str, set[str]],
) -> None:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in open_names:  # an object that contains itself
            _collect(path, schemas[name], schemas, open_names | {name}, kinds)
        return
    for each in (choice for word in _ONE_OF for choice in schema.get(word, ())):
        _collect(path, each, schemas, open_names, kinds)
    if isinstance(items := schema.get("items"), Mapping):
        _collect(f"{path}[]", items, schemas, open_names, kinds)
    if isinstance(values := schema.get("additionalProperties"), Mapping):
        _collect(f"{path}.*", values, schemas, open_names, kinds)
    for value in _choices_of(schema):
        kinds.setdefault(f"{path} {value!r}".strip(), set()).add("a choice")
    for name, field in schema.get("properties", {}).items():
        inner = f"{path}.{name}".removeprefix(".")
        needed = " (required)" if name in schema.get("required", ()) else ""
        kinds.setdefault(inner, set()).add(_kind_of(field) + needed)
        _collect(inner, field, schemas, open_names, kinds)


def _choices_of(schema: Mapping[str, Any]) -> list[Any]:
    return schema.get("enum", [schema["const"]] if "const" in schema else [])


def _kind_of(schema: Mapping[str, Any]) -> str:
    """Return the JSON types of a value."""
    if _choices_of(schema):
        return "choice"
    parts = [_kind_of(choice) for word in _ONE_OF for choice in schema.get(word, ())]
    own = "object" if "$ref" in schema else schema.get("type", "" if parts else "any")
    own = own if isinstance(own, str) else " | ".join(own)
    return " | ".join(dict.fromkeys(filter(None, [own, *parts])))


def chunk_rows() -> Iterator[Row]:
    """Yield the fields of the chunks in streams. Each kind of chunk is known by its `object`."""
    for kind in sorted(_chunks_of(Output), key=lambda kind: str(kind.__struct_config__.tag)):
        schema, schemas = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
        yield from _fields(f"{kind.__struct_config__.tag} ", schema[0], schemas)


def _chunks_of(cls: type[Struct]) -> Iterator[type[Struct]]:
    for each in cls.__subclasses__():
        if str(each.__struct_config__.tag).endswith(".chunk"):
            yield each
        yield from _chunks_of(each)


def foreign_rows() -> Iterator[Row]:
    """Yield the fields of other servers: those of all bodies, then those that a route treats in its own way."""
    for name, declared in FOREIGN.items():
        yield name, _treatment(declared)
    for route in all_routes():
        own: Mapping[str, Foreign] = getattr(route.body, "foreign", {})
        for name, declared in own.items():
            if FOREIGN.get(name) != declared:
                yield f"{route.method} {route.path} {name}", _treatment(declared)


def _treatment(declared: Foreign) -> str:
    if declared.same_as:
        return f"means {' or '.join(declared.same_as)}"
    if declared.becomes is not None:
        return "converted"
    if declared.is_hint or declared.warning:
        return "accepted, with a warning" if declared.warning else "accepted"
    neutral = ", ".join(map(repr, declared.neutral))
    return f"accepted if {neutral}" if neutral else "refused with advice"


def metric_rows() -> Iterator[Row]:
    """Yield the families of `/metrics` with their labels, from a text with one sample of each family."""
    from prometheus_client.parser import text_string_to_metric_families

    metrics = Metrics()
    for family in vars(metrics).values():
        if labels := getattr(family, "_labelnames", ()):
            family.labels(*labels)
        elif label := getattr(family, "_label", ""):
            family.observe(1, label=label)
    text = metrics.text(_some_host(), _IDLE)
    for found in text_string_to_metric_families(text):
        if not found.name.startswith(_FAMILIES_OF_THE_SYSTEM):
            name = f"{found.name}_total" if found.type == "counter" else found.name
            yield name, f"{found.type}{_labels_of(sample.labels for sample in found.samples)}"


def _labels_of(samples: Iterable[Mapping[str, str]]) -> str:
    names = sorted({name for labels in samples for name in labels} - {"le"})
    return f", labels {', '.join(names)}" if names else ""


def _some_host() -> Any:
    cache = SimpleNamespace(page_tokens=64, kv_type="f16", eviction_policy="none", reuse_prefixes=False)
    return SimpleNamespace(
        model=SimpleNamespace(backend=SimpleNamespace(num_threads=lambda: 1)),
        engine_if_any=SimpleNamespace(prefixes=None),
        settings=SimpleNamespace(cache=cache),
        runner=SimpleNamespace(cache=SimpleNamespace(pool_pages=(1,))),
    )
