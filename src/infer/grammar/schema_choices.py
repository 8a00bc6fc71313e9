"""Words for which a grammar has no form, written out as choices.

A choice is a list of schemas, one of which must hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from math import comb, inf, perm
from typing import Any, final

from infer.errors import InvalidRequestError, SchemaError
from infer.grammar.schema_facts import key_of, values_of
from infer.grammar.schema_logic import Logic
from infer.grammar.schema_negation import Negation
from infer.grammar.schema_node import Node, all_of, false_node, refuse, true_node

TAKES_ANY = "x-oneOf"  # at the top, of value "anyOf"
MAX_ALTERNATIVES = 256
_MAX_ARRAYS = 2_000  # written out
_ALL = ("null", "boolean", "number", "string", "array", "object")
_EVERY_NAME = frozenset({"", "^", "$", ".*", "^.*", ".*$", "^.*$", "^(.*)$", "(.*)", "[\\s\\S]*", "^[\\s\\S]*$"})
COUNTED = {"minProperties": "leastProperties", "maxProperties": "mostProperties"}  # where a grammar can count them
Choice = list[Node]


@final
class Choices:
    """Choices of a schema's nodes. With `takes_any`, each `oneOf` counts as `anyOf`."""

    def __init__(self, logic: Logic, where: str, *, takes_any: bool = False) -> None:
        self._logic = logic
        self._negation = Negation(logic, where)
        self._where = where
        self._takes_any = takes_any

    def of(self, node: Node, whole: Node, context: Sequence[Node]) -> Iterator[Choice]:
        """Yield the choice of each such word of `node`. A choice with one schema must hold.

        The context includes `node`. `whole` is the node with its `allOf`.
        """
        at = node.pointer
        if "oneOf" in node:
            yield self._one_of(node["oneOf"], node, context)
        if "not" in node:
            yield self._negation.alternatives(node["not"], context, f"{at}/not")
        if "if" in node and ("then" in node or "else" in node):
            yield self._conditional(node, context)
        for name, needed in node.get("dependentRequired", {}).items():
            yield [_lacks(at, [name]), Node(at, {"required": list(dict.fromkeys([name, *needed]))})]
        for name, needed in node.get("dependentSchemas", {}).items():
            yield [_lacks(at, [name]), all_of(at, [Node(at, {"required": [name]}), needed])]
        kinds = self._logic.kinds(context)
        if "array" in kinds:
            yield from self._of_arrays(node, context, kinds)
        if "object" in kinds:
            yield from self._of_objects(node, context)
        for word in ("unevaluatedProperties", "unevaluatedItems"):
            if node.get(word):
                yield [self._unevaluated(word, whole)]

    def expanded(self, choices: Iterable[Choice], context: Sequence[Node], pointer: str) -> list[Node]:
        """Return the combinations of all choices that can hold together, each as one schema."""
        found: list[list[Node]] = [[]]
        for choice in choices:
            found = [
                [*known, branch]
                for known in found
                for branch in choice
                if len(choice) == 1 or not self._logic.are_disjoint([branch], [*known, *context])
            ]
            if len(found) > MAX_ALTERNATIVES:
                refuse(self._where, pointer, f"more than {MAX_ALTERNATIVES} alternatives when its choices are combined")
        return [all_of(pointer, parts) for parts in found]

    def _one_of(self, branches: list[Node], node: Node, context: Sequence[Node]) -> Choice:
        if self._takes_any or len(branches) == 1:
            return branches
        others = [part for part in context if part is not node]
        around = [node.without("oneOf"), *others]
        overlaps: dict[int, list[int]] = {index: [] for index in range(len(branches))}
        for i, j in combinations(range(len(branches)), 2):
            if not self._logic.are_disjoint([branches[i], *around], [branches[j]]):
                overlaps[i].append(j)
                overlaps[j].append(i)
        try:
            return self._held_apart(branches, overlaps, node.pointer, around)
        except InvalidRequestError as error:
            hint = f'"{TAKES_ANY}": "anyOf" at the top of the schema takes every oneOf as anyOf'
            problem = "the branches of 'oneOf' cannot be told apart"
            raise SchemaError(f"{error}; {hint}", node.pointer, problem) from None

    def _held_apart(
        self, branches: list[Node], overlaps: Mapping[int, list[int]], at: str, around: Sequence[Node]
    ) -> Choice:
        """Return each branch without the values of the branches that overlap with it."""
        if self._logic.steps_left < 0:
            refuse(self._where, at, "too large to tell the branches of 'oneOf' apart")
        found: Choice = []
        for i, others_of_i in overlaps.items():
            alternatives = [branches[i]]
            for j in others_of_i:
                place = f"{at}/oneOf: branches {i} and {j} can both hold"
                alternatives = [
                    all_of(branches[i].pointer, [known, excluded])
                    for known in alternatives
                    for excluded in self._negation.alternatives(branches[j], [known, *around], place)
                ]
                if len(alternatives) > MAX_ALTERNATIVES:
                    refuse(self._where, place, "too many ways to hold apart")
            found += alternatives
        return found

    def _conditional(self, node: Node, context: Sequence[Node]) -> Choice:
        at = node.pointer
        then, otherwise = node.get("then", true_node(at)), node.get("else", true_node(at))
        condition: Node = node["if"]
        around = [node.without("if", "then", "else"), *(part for part in context if part is not node)]
        found = [all_of(at, [condition, then])]
        if not otherwise.is_false:
            found += [
                all_of(at, [excluded, otherwise])
                for excluded in self._negation.alternatives(condition, around, f"{at}/if")
            ]
        return found

    def _of_arrays(self, node: Node, context: Sequence[Node], kinds: frozenset[str]) -> Iterator[Choice]:
        every = self._logic.flat(context)
        most = float(min(part.get("maxItems", inf) for part in every))
        if node.get("uniqueItems") and most > 1:
            arrays = self._unique_arrays(node, every)
            others = [name for name in _ALL if name != "array" and (name in kinds or name == "number")]
            yield [
                Node(node.pointer, {"enum": arrays}),
                *([Node(node.pointer, {"type": others})] if kinds > {"array"} else []),
            ]
            most = float(max(map(len, arrays), default=0))
        if "contains" in node:
            yield self._containing(node, most)

    def _unique_arrays(self, node: Node, every: Sequence[Node]) -> list[list[Any]]:
        items = [part["items"] for part in every if "items" in part]
        values = self._finite(items) if items and not any(part.get("prefixItems") for part in every) else None
        least = max(part.get("minItems", 0) for part in every)
        most = min(min(part.get("maxItems", inf) for part in every), inf if values is None else len(values))
        if values is None or sum(perm(len(values), size) for size in range(int(most) + 1)) > _MAX_ARRAYS:
            problem = "is built only where the items are a few constants or there is at most one"
            refuse(self._where, node.pointer, f"'uniqueItems' {problem}")
        return [list(array) for size in range(least, int(most) + 1) for array in permutations(values, size)]

    def _finite(self, nodes: Sequence[Node]) -> list[Any] | None:
        """Return all values that fulfil the nodes, or None if they are not a few known values."""
        parts = self._logic.flat(nodes)
        known = [values for part in parts if (values := values_of(part)) is not None]
        kinds = self._logic.kinds(nodes)
        candidates = min(known, key=len) if known else None
        if candidates is None and kinds <= {"null", "boolean"}:
            candidates = [value for value in (None, True, False) if ("null" if value is None else "boolean") in kinds]
        if candidates is None or any(set(part) - {"type", "enum", "const", "$ref", "allOf"} for part in parts):
            return None
        by_key = {key_of(value): value for value in candidates}
        return [value for value in by_key.values() if all(self._logic.may_hold(part, value) for part in parts)]

    def _containing(self, node: Node, most: float) -> Choice:
        at, contained = node.pointer, node["contains"]
        least, limit = node.get("minContains", 1), node.get("maxContains", inf)
        if not contained:
            return [Node(at, {"minItems": least} | ({} if limit == inf else {"maxItems": limit}))]
        if limit >= most:
            if not least:
                return [true_node(at)]
            if most <= 12 and comb(int(most), min(least, int(most))) <= MAX_ALTERNATIVES:
                places = combinations(range(int(most)), least)
                return [
                    _items(at, [contained if i in held else true_node(at) for i in range(held[-1] + 1)])
                    for held in places
                ]
        elif most <= 6:
            other = Node(contained.pointer, {"not": contained})
            return [
                Node(at, _items(at, [contained if holds else other for holds in row]) | {"items": false_node(at)})
                for size in range(int(most) + 1)
                for row in product((True, False), repeat=size)
                if least <= sum(row) <= limit
            ]
        elif least == 0 and limit == 0:
            return [Node(at, {"items": Node(contained.pointer, {"not": contained})})]
        return refuse(self._where, at, "'contains' is built only where there are few items ('maxItems')")

    def _of_objects(self, node: Node, context: Sequence[Node]) -> Iterator[Choice]:
        if "propertyNames" in node:
            yield [self._names_rule(node["propertyNames"], node.pointer)]
        if "minProperties" in node or "maxProperties" in node:
            yield self._counted(node, self._logic.flat(context))

    def _names_rule(self, rule: Node, at: str) -> Node:
        parts = self._logic.flat([rule])
        if "string" not in self._logic.kinds([rule]):
            return Node(at, {"additionalProperties": false_node(at)})
        patterns: list[str] = []
        names: list[list[str]] = []
        excluded: dict[str, Node] = {}
        no_names: dict[str, Node] = {}
        for part in parts:
            if (values := values_of(part)) is not None:
                names.append([value for value in values if isinstance(value, str)])
            if "pattern" in part:
                patterns.append(part["pattern"])
            if part.get("minLength"):
                excluded[f"^[\\s\\S]{{0,{part['minLength'] - 1}}}$"] = false_node(at)
            if "maxLength" in part:
                excluded[f"^[\\s\\S]{{{part['maxLength'] + 1},}}$"] = false_node(at)
            no_names |= dict.fromkeys(part.get("notEnum", ()), false_node(at))
            if "anyOf" in part:
                values_in = [values_of(branch) for branch in part["anyOf"]]
                patterns_in = [branch.get("pattern") for branch in part["anyOf"]]
                if all(values is not None for values in values_in):
                    names.append([v for values in values_in for v in values or () if isinstance(v, str)])
                elif all(pattern is not None for pattern in patterns_in):
                    patterns.append("|".join(f"(?:{pattern})" for pattern in patterns_in))
                else:
                    refuse(self._where, at, "'propertyNames' with this 'anyOf' is not supported")
            if "not" in part:
                self._read_excluded(part["not"], at, excluded, no_names)
            if set(part) & {"format", "oneOf", "if"}:
                refuse(self._where, at, "'propertyNames' is built of 'enum', 'pattern', lengths and their 'not' only")
        if names:
            known = [name for name in min(names, key=len) if all(self._logic.may_hold(part, name) for part in parts)]
            if excluded or patterns:
                refuse(self._where, at, "'propertyNames' with constants and patterns is not supported")
            words: dict[str, Any] = {"properties": {name: true_node(at) for name in known}}
            return Node(at, words | {"additionalProperties": false_node(at)})
        if len(patterns) + bool(excluded) > 1:
            refuse(self._where, at, "'propertyNames' with several patterns or lengths is not supported")
        words = {"properties": no_names} if no_names else {}
        if patterns:
            words |= {"patternProperties": {patterns[0]: true_node(at)}, "additionalProperties": false_node(at)}
        return Node(at, words | ({"patternProperties": excluded} if excluded else {}))

    def _read_excluded(self, rule: Node, at: str, excluded: dict[str, Node], no_names: dict[str, Node]) -> None:
        parts = [part for part in self._logic.flat([rule]) if set(part) - {"$ref", "allOf"}]
        if "string" not in self._logic.kinds([rule]):
            return
        asserting = [part for part in parts if set(part) != {"type"}]
        words = set(asserting[0]) - {"type"} if len(asserting) == 1 else set()
        if len(words) != 1 or not words <= {"pattern", "enum", "const"}:
            refuse(self._where, at, "'propertyNames' with this 'not' is not supported")
        if "pattern" in words:
            excluded[asserting[0]["pattern"]] = false_node(at)
        no_names |= {name: false_node(at) for name in values_of(asserting[0]) or () if isinstance(name, str)}

    def _counted(self, node: Node, every: Sequence[Node]) -> Choice:
        at = node.pointer
        required = {name for part in every for name in part.get("required", ())}
        named = {name: item for part in every for name, item in part.get("properties", {}).items()}
        optional = [name for name, item in named.items() if name not in required and not item.is_false]
        least, most = node.get("minProperties", 0), node.get("maxProperties", inf)
        words = {COUNTED[word]: node[word] for word in COUNTED if word in node}
        need = max(least - len(required), 0)
        if most == inf and not need:
            return [true_node(at)]
        if not optional:
            return [Node(at, words)]
        top = min(len(optional), most - len(required)) if most < inf else need
        if top < 0:
            return [false_node(at)]
        if sum(comb(len(optional), size) for size in range(int(top) + 1)) > MAX_ALTERNATIVES:
            refuse(
                self._where,
                at,
                f"{', '.join(map(repr, set(COUNTED) & set(node)))} beside so many optional properties is not supported",
            )
        found: Choice = []
        for size in range(int(top) + 1):
            for chosen in combinations(optional, size):
                rest = [name for name in optional if name not in chosen]
                is_enough = most == inf and size == need
                lacking = {} if is_enough else {**_lacks(at, rest), **words}
                found.append(Node(at, lacking | {"required": [*sorted(required), *chosen]}))
        return found

    def _unevaluated(self, word: str, node: Node) -> Node:
        at, every = node.pointer, self._logic.flat([node])
        inner = every[1:]
        if any(set(part) & {"anyOf", "oneOf", "if", "dependentSchemas", "not"} for part in every):
            refuse(self._where, at, f"{word!r} beside choices ('anyOf', 'if', …) is not supported")
        if word == "unevaluatedItems":
            if any("items" in part for part in every) or any(word in part for part in inner):
                return true_node(at)
            if any("contains" in part for part in every):
                refuse(self._where, at, f"{word!r} beside 'contains' is not supported")
            first = [true_node(at)] * max(len(part.get("prefixItems", ())) for part in every)
            return Node(at, {"prefixItems": first, "items": node[word]})
        if any("additionalProperties" in part for part in every) or any(word in part for part in inner):
            return true_node(at)
        words: dict[str, Any] = {
            of: {name: true_node(at) for part in every for name in part.get(of, ())}
            for of in ("properties", "patternProperties")
        }
        return Node(at, {of: names for of, names in words.items() if names} | {"additionalProperties": node[word]})


def merged_patterns(node: Node) -> Node:
    """Return the node with a pattern that every name fulfils as `additionalProperties`, because patterns must not
    overlap.
    """
    patterns: Mapping[str, Node] = node.get("patternProperties", {})
    everywhere = [item for pattern, item in patterns.items() if pattern in _EVERY_NAME]
    if not everywhere:
        return node
    words = dict(node.without("patternProperties"))
    rest = {pattern: item for pattern, item in patterns.items() if pattern not in _EVERY_NAME}
    for of, items in (("properties", node.get("properties", {})), ("patternProperties", rest)):
        if items:
            words[of] = {name: all_of(item.pointer, [item, *everywhere]) for name, item in items.items()}
    words["additionalProperties"] = all_of(everywhere[0].pointer, everywhere)
    return Node(node.pointer, words)


def _lacks(pointer: str, names: Sequence[str]) -> Node:
    return Node(pointer, {"properties": dict.fromkeys(names, false_node(pointer))} if names else {})


def _items(pointer: str, first: Sequence[Node]) -> Node:
    return Node(pointer, {"prefixItems": list(first), "minItems": len(first)})
