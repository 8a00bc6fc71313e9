"""Checks of a grammar in Lark's notation before compilation: its size, its depth, and that every rule can end.

Parts of llguidance's notation that are not about text (token ids, control tokens, sampling, other grammars) are
refused.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Set
from itertools import pairwise, takewhile
from typing import NamedTuple

from infer.errors import InvalidRequestError
from infer.text.grammar.json_schema import build_schema
from infer.text.grammar.patterns import check_pattern, check_size
from infer.text.grammar.shortest import MAX_SHORTEST, Clause, shortest

MAX_BYTES = 65_536
MAX_DEPTH = 28  # the limit of llguidance
MAX_RULES = 1_000

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|//[^\n]*|\#[^\n]*|\\[ \t]*\n)
      | (?P<newline>\n)
      | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
      | (?P<name>[!?]?[A-Za-z_][\w\-]*)
      | (?P<directive>%[a-z]+)
      | (?P<operator>->|\.\.|[:|()\[\]{}?*+~,.=&]|\d+)
      | (?P<refused><[^<>\n]*>|@[\w\-]*)""",
    re.VERBOSE,
)
_JSON_SIGN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)  # a string is one
_OPTIONS = frozenset({"lazy", "capture", "suffix"})
_COUNTS = frozenset({"?", "*", "{", "~"})
_PATTERN_SIGNS = frozenset("\\^$.|?*+()[]{}&~")


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Rule(NamedTuple):
    name: str
    at: int
    body: list[_Token]


def check_grammar(text: str, keywords: Set[str] | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the grammar with schemas after %json in the compiler's form, and warnings of keywords not enforced.

    Raises InvalidRequestError that gives line and column, from 1.
    """
    check_size(text, "grammar", "grammar", MAX_BYTES)
    checker = _Checker(text, keywords)
    checker.check()
    parts, at = [], 0
    for start, end, schema in checker.schemas:
        parts += [text[at:start], " ", schema]
        at = end
    return "".join([*parts, text[at:]]), tuple(checker.warnings)


class _Checker:
    def __init__(self, text: str, keywords: Set[str] | None) -> None:
        self._text = text
        self._keywords = keywords
        self.schemas: list[tuple[int, int, str]] = []  # start, end and new text of each
        self.warnings: list[str] = []
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]

    def check(self) -> None:
        rules: dict[str, _Rule] = {}
        imported: set[str] = set()
        for rule in self._rules(list(self._tokens())):
            if rule.name == "%import":
                names = [token.text for token in rule.body if token.kind == "name"]
                imported.update(names[-1:])
            elif rule.name in rules and rule.name != "%ignore":
                raise self._error(rule.at, f"the rule {rule.name!r:.40} is defined twice")
            else:
                rules[rule.name] = rule
        if "start" not in rules:
            raise InvalidRequestError("grammar: there is no rule 'start'")
        if len(rules) > MAX_RULES:
            raise InvalidRequestError(f"grammar: a grammar must have at most {MAX_RULES} rules, got {len(rules)}")
        self._check_ends(rules, imported)

    def _tokens(self) -> Iterator[_Token]:
        at, depth = 0, 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None or match.lastgroup is None:
                raise self._error(at, f"{self._text[at]!r} is not valid here in a grammar")
            kind, text, start, at = match.lastgroup, match[0], at, match.end()
            if kind == "refused":
                raise self._error(start, f"{text!r:.40}: a grammar must describe text, not tokens or other grammars")
            if kind == "directive" and text in ("%json", "%regex"):
                at = self._json_end(at)
                if text == "%json":
                    built = build_schema(self._text[start + 5 : at], self._keywords, f"{self._place(start)}: %json")
                    self.schemas.append((start + 5, at, built.text))
                    self.warnings += built.warnings
                kind = "string"
            elif kind == "directive" and text not in ("%import", "%ignore"):
                raise self._error(start, f"{text} is not supported")
            elif kind == "regex":
                check_pattern(text[1 : text.rindex("/")], f"{self._place(start)}: pattern")
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text, 0)
            if depth > MAX_DEPTH:
                raise self._error(start, f"groups must be nested at most {MAX_DEPTH} deep")
            if depth < 0:
                raise self._error(start, f"{text!r} closes no group")
            if kind != "space":
                yield _Token(kind, text, start)

    def _json_end(self, at: int) -> int:
        """Return the index after the brackets that follow, or the end of the text."""
        depth = 0
        for sign in _JSON_SIGN.finditer(self._text, at):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(sign[0], 0)
            if sign[0] in ("]", "}") and depth <= 0:
                return sign.end()
        return len(self._text)

    def _rules(self, tokens: list[_Token]) -> Iterator[_Rule]:
        """Yield rules and directives with their bodies.

        A body continues over lines until the next name with a colon.
        """
        starts = [index for index in range(len(tokens)) if self._begins_rule(tokens, index)]
        if any(token.kind != "newline" for token in tokens[: starts[0] if starts else None]):
            raise self._error(tokens[0].at, 'a grammar must have rules such as start: "yes" | "no"')
        for begin, end in pairwise([*starts, len(tokens)] if starts else []):
            head = tokens[begin]
            if head.kind == "directive":
                yield _Rule(head.text, head.at, tokens[begin + 1 : end])
                continue
            colon = next(index for index in range(begin, end) if tokens[index].text == ":")
            for token in tokens[begin + 1 : colon]:
                if token.kind == "name" and token.text not in _OPTIONS:
                    raise self._error(token.at, f"the option {token.text!r:.40} is not supported")
            body = [token for token in tokens[colon + 1 : end] if token.kind != "newline"]
            yield _Rule(head.text.lstrip("!?"), head.at, body)

    @staticmethod
    def _begins_rule(tokens: list[_Token], index: int) -> bool:
        if index and tokens[index - 1].kind != "newline":
            return False
        if tokens[index].kind == "directive":
            return tokens[index].text in ("%import", "%ignore")
        if tokens[index].kind != "name":
            return False
        head = takewhile(
            lambda token: token.kind in ("name", "string", "operator") and token.text not in ("|", "("),
            tokens[index + 1 : index + 20],
        )
        return any(token.text == ":" for token in head)

    def _check_ends(self, rules: dict[str, _Rule], imported: set[str]) -> None:
        clauses = [Clause(name) for name in imported]
        for rule in rules.values():
            clauses += self._clauses(rule, rules.keys() | imported)
        lengths = shortest(clauses)
        for name in _reachable(rules):
            if name not in lengths and name != "%ignore":
                raise self._error(rules[name].at, f"the rule {name!r:.40} needs itself and can never end")
            if lengths.get(name, 0) > MAX_SHORTEST:
                problem = f"the rule {name!r:.40} has no text shorter than {MAX_SHORTEST} bytes"
                raise self._error(rules[name].at, problem)

    def _clauses(self, rule: _Rule, known: Set[str]) -> Iterator[Clause]:
        """Yield one clause per alternative.

        A group has its own name, and so has an item with a count or a star.
        """
        if rule.name == "%import":
            return
        open_groups: list[tuple[str, list[str]]] = [(rule.name, [])]
        in_count = False
        for index, token in enumerate(rule.body):
            group, needed = open_groups[-1]
            place = f"{rule.name} {token.at}"
            if in_count:
                in_count = token.text != "}"
            elif token.text in _COUNTS and needed:
                least = _least(rule.body[index : index + 2])
                yield Clause(place, needed[-1:] if least else (), times=least)
                needed[-1] = place
                in_count = token.text == "{"
            elif token.text in ("(", "["):
                needed.append(place)
                if token.text == "[":
                    yield Clause(place)
                open_groups.append((place, []))
            elif token.text in (")", "]", "|"):
                yield Clause(group, tuple(needed))
                needed.clear()
                if token.text != "|":
                    open_groups.pop()
            elif token.kind == "name" and not (index and rule.body[index - 1].text == "->"):
                if token.text not in known:
                    raise self._error(token.at, f"there is no rule {token.text!r:.40}")
                needed.append(token.text)
            elif token.kind in ("string", "regex"):
                needed.append(place)
                is_plain = token.kind == "string" or not _PATTERN_SIGNS.intersection(token.text)
                yield Clause(place, length=max(len(token.text) - 2, 0) if is_plain else 0)
        if len(open_groups) > 1:
            raise self._error(rule.body[-1].at, f"a group of the rule {rule.name!r:.40} is never closed")
        yield Clause(rule.name, tuple(open_groups[0][1]))

    def _place(self, at: int) -> str:
        line = bisect_right(self._lines, at)
        return f"grammar, line {line}, column {at - self._lines[line - 1] + 1}"

    def _error(self, at: int, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._place(at)}: {problem}")


def _least(count: list[_Token]) -> int:
    """Return the smallest number of repetitions of `?`, `*`, `{2`, `{,` or `~2`."""
    digits = count[-1].text if count[0].text in "{~" else ""
    return min(int(digits[:9]), 10**9) if digits.isdecimal() else 0


def _reachable(rules: dict[str, _Rule]) -> list[str]:
    seen: dict[str, None] = {}
    pending = ["start"]
    while pending:
        name = pending.pop()
        if name in rules and name not in seen:
            seen[name] = None
            pending += [token.text for token in rules[name].body if token.kind == "name"]
    return list(seen)
