"""Convert nodes to the words that llguidance enforces exactly: choices are written out, references renamed."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, final

from infer.grammar.schema_choices import COUNTED, Choices, merged_patterns
from infer.grammar.schema_excluded import pattern_without
from infer.grammar.schema_formats import FORMAT_LENGTHS, FORMAT_PATTERNS
from infer.grammar.schema_logic import KINDS, Logic
from infer.grammar.schema_merging import Merging
from infer.grammar.schema_node import NOTHING, Node, all_of, any_of, refuse
from infer.grammar.schema_pattern import translated

MAX_NODES = 100_000
MAX_OPTIONAL = 256
STEPS = 30_000
_CHOICES = frozenset(
    {
        *("oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "uniqueItems", "contains"),
        *("minContains", "maxContains", "propertyNames", "minProperties", "maxProperties"),
        *("unevaluatedProperties", "unevaluatedItems"),
    }
)
_NAMES = {ours: word for word, ours in COUNTED.items()}
_KIND_WORDS = frozenset({"type", "const", "enum", "$ref", "anyOf", "allOf"})


@final
class Builder:
    """Builder of a schema. `built` are the definitions that the root needs, by the pointers of the user's schema."""

    def __init__(self, definitions: Mapping[str, Node], where: str, *, takes_any: bool = False) -> None:
        self._logic = Logic(definitions, STEPS)
        self._choices = Choices(self._logic, where, takes_any=takes_any)
        self._merging = Merging(self._logic)
        self._where = where
        self._num_nodes = 0
        self.built: dict[str, Node] = {}
        self._pending: list[str] = []

    def build(self, root: Node) -> Node:
        found = self._build(root, ())
        while self._pending:
            pointer = self._pending.pop()
            if pointer not in self.built:
                self.built[pointer] = self._build(self._logic.target(pointer), ())
        return found

    def _build(self, node: Node, context: Sequence[Node]) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            refuse(self._where, node.pointer, f"more than {MAX_NODES:,} parts when its choices are written out")
        if node.is_false or not node or (len(node) == 1 and "type" in node):
            return node
        node = self._merging.merged(node)
        around = (node, *context)
        parts = self._parts(node)
        choices = [
            choice
            for part, whole in parts
            if _CHOICES.intersection(part)
            for choice in self._choices.of(part, whole, (part, *around))
        ]
        built = [self._static(part, around) for part, _ in parts]
        if choices:
            built += self._chosen(node, choices, around)
        whole = all_of(node.pointer, built)
        if context and not _KIND_WORDS.intersection(whole) and not whole.is_false:
            whole = self._typed(whole, around)
        return self._merging.without_implied_types(whole)

    @staticmethod
    def _parts(node: Node) -> list[tuple[Node, Node]]:
        """Return the parts of a node and of its `allOf`, in written order, so that their choices are combined.

        Each pair is a part without and with its own `allOf`.
        """
        found: list[tuple[Node, Node]] = []
        pending = [(node, node)]
        while pending:
            part, whole = pending.pop()
            if "allOf" not in part:
                found.append((part, whole))
                continue
            own = (part.without("allOf"), part)
            inner = [(each, each) for each in part["allOf"]]
            comes_first = next(iter(part)) == "allOf" and len(part) > 1
            listed = [*inner, own] if comes_first else [own, *inner]
            pending += reversed([pair for pair in listed if pair[0]])
        return found

    def _chosen(self, node: Node, choices: list[list[Node]], around: Sequence[Node]) -> list[Node]:
        certain = [choice[0] for choice in choices if len(choice) == 1]
        context = (*around, *certain)
        open_choices = [choice for choice in choices if len(choice) != 1]
        found = [self._build(each, around) for each in certain]
        if open_choices:
            options = self._choices.expanded(open_choices, context, node.pointer)
            found.append(any_of(node.pointer, [self._build(option, context) for option in options]))
        return found

    def _typed(self, node: Node, around: Sequence[Node]) -> Node:
        kinds = self._logic.kinds(around)
        if kinds == KINDS or not kinds:
            return node
        names = sorted(kinds - {"integer", "fraction"})
        if "fraction" in kinds:
            names.append("number")
        elif "integer" in kinds:
            names.append("integer")
        return Node(node.pointer, {"type": names, **node})

    def _static(self, node: Node, around: Sequence[Node]) -> Node:
        """Return a node of the words that need no choice."""
        node = merged_patterns(node)
        words: dict[str, Any] = {}
        more: list[Node] = []
        for word, value in node.items():
            if word in _CHOICES:
                continue
            if word == "$ref":
                self._pending.append(value)
                words[word] = value
            elif word in ("properties", "patternProperties"):
                words[word] = {name: self._build(item, ()) for name, item in value.items()}
            elif word in ("items", "additionalProperties"):
                if value:  # true is what it is without the word
                    words[word] = self._build(value, ())
            elif word == "prefixItems":
                words[word] = [self._build(item, ()) for item in value]
            elif word == "anyOf":
                branches = any_of(node.pointer, [self._build(branch, around) for branch in value])
                if set(branches) == {"anyOf"}:
                    words[word] = branches["anyOf"]
                else:
                    more.append(branches)
            elif word == "format" and value in FORMAT_PATTERNS:
                lengths = {"maxLength": FORMAT_LENGTHS[value]} if value in FORMAT_LENGTHS else {}
                more.append(Node(node.pointer, {"pattern": FORMAT_PATTERNS[value], **lengths}))
            elif word == "notEnum":
                more.append(self._without(node.pointer, value))
            else:
                words[word] = value
        self._check_optional(node)
        return all_of(node.pointer, [Node(node.pointer, words), *more])

    def _check_optional(self, node: Node) -> None:
        properties = node.get("properties", ())
        if len(properties) <= MAX_OPTIONAL:
            return
        optional = len(set(properties) - set(node.get("required", ())))
        if optional > MAX_OPTIONAL:
            refuse(self._where, node.pointer, f"{MAX_OPTIONAL} properties may be optional, got {optional}")

    def _without(self, pointer: str, texts: Sequence[str]) -> Node:
        pattern = pattern_without(texts)
        if pattern is None:
            refuse(self._where, pointer, "the strings that are excluded are too many or too long")
        return Node(pointer, {"type": ["string"], "pattern": pattern})


def written_name(word: str) -> str:
    """Return the word of JSON schemas for one of our own words. Other words stay unchanged."""
    return _NAMES.get(word, word)


def rendered(root: Node, built: Mapping[str, Node], empty: Set[str]) -> Any:
    """Return the schema as JSON that llguidance reads.

    `empty` are the definitions that no value fulfils. References to these become false.
    """
    names = {pointer: str(index) for index, pointer in enumerate(built)}

    def render(node: Node) -> Any:
        if NOTHING in node or node.get("$ref") in empty:
            return False
        return {written_name(word): render_word(word, value) for word, value in node.items()} or True

    def render_word(word: str, value: Any) -> Any:
        if word == "$ref":
            return f"#/$defs/{names[value]}"
        if word == "type":
            return value[0] if len(value) == 1 else value
        if word in ("anyOf", "allOf", "prefixItems"):
            return [render(item) for item in value]
        if word == "properties":
            return {name: render(item) for name, item in value.items()}
        if word == "patternProperties":
            return {translated(name): render(item) for name, item in value.items()}
        if word == "pattern":
            return translated(value)
        return render(value) if isinstance(value, Node) else value

    found = render(root)
    if built:
        found = {"allOf": [found]} if isinstance(found, bool) else found
        found["$defs"] = {names[pointer]: render(node) for pointer, node in built.items() if pointer not in empty}
    return found
