"""Check how many of a folder's JSON schemas are compiled, and that their valid and invalid texts are distinguished.

    python benchmarks/check_schemas.py --folder SCHEMAS --every 10 --report

Reads files of `{"schema": …, "tests": [{"data": …, "valid": …}]}` or lists of such, as public collections have them.
Plain schemas have their texts in folders of the schema's name, one for valid and one for invalid ones (SchemaStore).

A value is accepted if one of its texts is: with the spaces of `json.dumps`, its properties in any order, whole numbers
with a point or without one. What is valid and not accepted cannot be generated; what is invalid and accepted is a
fault. Milliseconds are CPU time in this process, from the schema's text to a matcher; the trial in another process,
which compiles it once more, is made here after the clock has stopped.
"""

import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import llguidance

from harness import make_parser, write_report
from infer.errors import InvalidRequestError
from infer.text.grammar.grammar import Grammar, Source, not_strict
from infer.text.grammar.libraries import llguidance_follow, llguidance_limits, llguidance_source, read_grammar
from infer.text.grammar.schema_values import draft_of

_MAX_TRIES = 6_000
_CAUTIOUS_TRIES = 1_000


class Writer:
    """Writes values into a matcher, and goes back if an order of properties leads nowhere.

    After `_CAUTIOUS_TRIES`, an object is not continued if an earlier try failed with the same remaining names and the
    same possible next names. So an object that can be written may be missed, but none is accepted wrongly.
    """

    def __init__(self, matcher: Any, orders: list[dict[str, int]], *, is_free: bool, is_patient: bool) -> None:
        self._is_free = is_free
        self._is_patient = is_patient
        self._matcher = matcher
        self._orders = orders
        self._all_names = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(orders)))}
        self._order_of: Callable[[dict[str, Any]], dict[str, int]] = self._best_order
        self._others = 0
        self._tries = 0
        self._dead_ends: set[Any] = set()

    def write(self, value: Any) -> bool:
        """Return True if the value can be written.

        An object is first written in the order of the `properties` that have most of its names, followed by its other
        names. A patient writer then tries the other names first, and then all names in the document's order.
        """
        orders = [(self._best_order, 1 << 30), (self._best_order, -1), (self._every_name, 0)]
        for order_of, others in orders if self._is_patient else orders[:1]:
            self._order_of, self._others, self._tries = order_of, others, 0
            self._dead_ends.clear()
            if any(self._matcher.is_accepting() for _ in self._written(value, "", ())):
                return True
        return False

    def _best_order(self, value: dict[str, Any]) -> dict[str, int]:
        return max(self._orders, key=lambda order: len(order.keys() & value.keys()), default={})

    def _every_name(self, _value: dict[str, Any]) -> dict[str, int]:
        return self._all_names

    def _written(self, value: Any, before: str, place: tuple[Any, ...]) -> Iterator[None]:
        """Yield once for each way to write the value. After the last one, the matcher is in its first state."""
        if isinstance(value, dict) and value:
            order = self._order_of(value)
            names = sorted(value, key=lambda name: order.get(name, self._others))
            yield from self._object(names, value, before + "{", place)
        elif isinstance(value, list) and value:
            yield from self._list(value, 0, before + "[", place)
        else:
            for spelling in spellings(value, is_free=self._is_free):
                yield from self._text(before + spelling)

    def _text(self, text: str) -> Iterator[None]:
        self._tries += 1
        tokens = list(text.encode(errors="surrogatepass"))
        is_over = self._tries >= (_MAX_TRIES if self._is_patient else _CAUTIOUS_TRIES)
        count = 0 if is_over else self._matcher.try_consume_tokens(tokens)
        if count == len(tokens):
            yield
        if count:
            self._matcher.rollback(count)

    def _object(self, names: list[str], value: dict[str, Any], before: str, place: tuple[Any, ...]) -> Iterator[None]:
        if not names:
            yield from self._text("}")
            return
        texts = {name: f"{before}{json.dumps(name, ensure_ascii=False)}: " for name in names}
        state = None
        if self._tries > _CAUTIOUS_TRIES:
            names = [name for name in names if list(self._text(texts[name]))]
            state = (place, frozenset(texts), tuple(names))
            if state in self._dead_ends:
                return
        is_written = False
        for name in names:
            rest = [other for other in texts if other != name]
            for _ in self._text(texts[name]):
                for _ in self._written(value[name], "", (*place, name)):
                    for _ in self._object(rest, value, ", ", place):
                        is_written = True
                        yield
        if state is not None and not is_written:
            self._dead_ends.add(state)

    def _list(self, value: list[Any], index: int, before: str, place: tuple[Any, ...]) -> Iterator[None]:
        if index == len(value):
            yield from self._text("]")
            return
        for _ in self._written(value[index], before, (*place, index)):
            yield from self._list(value, index + 1, ", ", place)


def spellings(value: Any, *, is_free: bool) -> list[str]:
    """Return the spellings of a value. If `is_free`, a whole number may have a decimal point or none."""
    if is_free and isinstance(value, float) and value.is_integer():
        return list(dict.fromkeys([str(int(value)), json.dumps(value)]))
    return [json.dumps(value, ensure_ascii=False)]


def compile_schema(text: str, tokenizer: Any) -> tuple[Any, Source]:
    """Return a matcher and its source. Raises InvalidRequestError."""

    def problem_of(source: Source) -> str:
        matcher = matcher_of(source, tokenizer)
        matcher.compute_bitmask()
        return str(matcher.get_error()) if matcher.is_error() else ""

    read = read_grammar(Grammar("json_schema", text), None, partial(llguidance_source, llguidance), problem_of)
    return matcher_of(read.source, tokenizer), read.source


def matcher_of(source: Source, tokenizer: Any) -> Any:
    limits = llguidance_limits(llguidance, source.text)
    return llguidance.LLMatcher(tokenizer, source.text, log_level=0, limits=limits)


def orders_in(schema: Any) -> list[dict[str, int]]:
    """Return the names of each `properties`, with their indices."""
    found: list[dict[str, int]] = []
    pending = [schema]
    while pending:
        part = pending.pop(0)
        if isinstance(part, dict):
            if isinstance(part.get("properties"), dict):
                found.append({name: index for index, name in enumerate(part["properties"])})
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return found


def cases(folder: Path, every: int, texts: list[tuple[Path, bool]]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the cases. `texts` are the folders of valid and invalid texts of plain schemas."""
    for path in sorted(folder.rglob("*.json"))[::every]:
        content = read_json(path)
        if texts:
            inner = [(text, is_valid) for of, is_valid in texts for text in sorted((of / path.stem).glob("*.json"))]
            tests = [{"data": read_json(text), "valid": is_valid} for text, is_valid in inner]
            yield path.name, content, [test for test in tests if test["data"] is not None]
            continue
        for case in content if isinstance(content, list) else [content]:
            if isinstance(case, dict) and "schema" in case:
                yield path.name, case["schema"], case.get("tests", [])


def read_json(path: Path) -> Any:
    """Return the content, or None if it is not JSON: some files have comments."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None


class Tally:
    def __init__(self, *, is_strict: bool, is_verbose: bool) -> None:
        self._is_strict, self._is_verbose = is_strict, is_verbose
        self._tokenizer = llguidance.LLTokenizer("byte")
        self._trial = llguidance_follow(llguidance)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._seconds: list[float] = []

    def count(self, name: str, schema: Any, tests: list[Any]) -> None:
        self.counts["schemas"] += 1
        start = time.process_time()
        try:
            asked = schema if self._is_strict or not isinstance(schema, dict) else not_strict(schema)
            matcher, source = compile_schema(json.dumps(asked), self._tokenizer)
        except InvalidRequestError as error:
            self._count_refusal(name, str(error), tests)
            return
        finally:
            self._seconds.append(time.process_time() - start)
        if problem := self._trial(source):
            self._count_refusal(name, problem, tests)
            return
        self.counts["compiled"] += 1
        orders = orders_in(schema)
        for test in tests:
            is_free = test["valid"] or draft_of(schema) > 4  # in draft 4, 1.0 is not an integer
            writer = Writer(matcher.deep_copy(), orders, is_free=is_free, is_patient=test["valid"])
            is_accepted = writer.write(test["data"])
            kind = "valid" if test["valid"] else "invalid"
            self.counts[f"{kind} texts"] += 1
            self.counts[f"{kind} accepted"] += is_accepted
            if self._is_verbose and is_accepted != test["valid"]:
                what = "WRONG" if is_accepted else "NOT WRITTEN"
                print(what, name, json.dumps(test["data"])[:150], "SCHEMA", json.dumps(schema)[:400])

    def _count_refusal(self, name: str, problem: str, tests: list[Any]) -> None:
        is_empty = tests and not any(test["valid"] for test in tests)
        if is_empty and re.search("can fulfil|Unsatisfiable", problem):
            self.counts["refused: nothing fulfils them"] += 1
            return
        self.reasons[re.sub(r"at \S+:?|[0-9]{3,}|'[^']*'|\"[^\"]*\"", "…", problem)[:90]] += 1
        if self._is_verbose:
            print("REFUSED", name, problem[:200])

    def report(self) -> dict[str, float]:
        found: dict[str, float] = dict(self.counts)
        seconds = sorted(self._seconds)
        for percent in (50, 99, 100):
            at = min(len(seconds) * percent // 100, len(seconds) - 1)
            found[f"compile p{percent} ms"] = round(1000 * seconds[at], 1)
        num_fulfillable = self.counts["schemas"] - self.counts["refused: nothing fulfils them"]
        found["compiled %"] = round(100 * self.counts["compiled"] / num_fulfillable, 2)
        found["valid accepted %"] = round(100 * self.counts["valid accepted"] / max(self.counts["valid texts"], 1), 2)
        return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="read one file of so many")
    parser.add_argument("--valid-texts", type=Path, help="of plain schemas: a folder for each")
    parser.add_argument("--invalid-texts", type=Path, help="of plain schemas: a folder for each")
    parser.add_argument("--draft", help="what a schema without $schema is read as")
    parser.add_argument("--not-strict", action="store_true", help="leave out what cannot be enforced")
    parser.add_argument("-v", action="store_true", help="print what is refused and what is wrong")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tally = Tally(is_strict=not arguments.not_strict, is_verbose=arguments.v)
    folders = [(arguments.valid_texts, True), (arguments.invalid_texts, False)]
    texts = [(folder, is_valid) for folder, is_valid in folders if folder is not None]
    for name, schema, tests in cases(arguments.folder, arguments.every, texts):
        has_draft = isinstance(schema, dict) and "$schema" not in schema and arguments.draft
        tally.count(name, {"$schema": arguments.draft, **schema} if has_draft else schema, tests)
    report = tally.report()
    for key, value in report.items():
        print(f"{key:32} {value}")
    reasons = dict(tally.reasons.most_common(40))
    for reason, count in reasons.items():
        print(f"{count:6}  {reason}")
    write_report(arguments, **report, refused=reasons)


if __name__ == "__main__":
    main()
