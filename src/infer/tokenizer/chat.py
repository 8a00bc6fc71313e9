"""Chat templates: conversations to text, rendered as Hugging Face does, in Jinja's sandbox.

`ChatTemplate.render` gives the text of `transformers`' `apply_chat_template`. `ChatTemplate.render_marked` gives the
same text cut where a special token's text came from a message: that text must not become a control id.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from infer.errors import InvalidRequestError, UnsupportedModelError

# Hugging Face's names of a message's reasoning; the first is the one that templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PRIVATE_USE_CHARACTERS = range(0xE000, 0xF8FF)
_MAX_SPECIAL_LENGTH = 256


class Piece(NamedTuple):
    text: str
    is_control: bool
    """Whether special tokens in the text are the template's own."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _TemplateDict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` that takes no underscored attribute, the road to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja2, `namespace(self=…)` is allowed
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_name(name)
        super().__setitem__(name, value)


def _check_attribute_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no underscored attribute, got {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class ChatTemplate:
    """A template compiled once, with the variables of its tokenizer (`bos_token`, …)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise InvalidRequestError(f"the model's chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        return self._render(_context(messages, add_generation_prompt, tools, variables))

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_texts: "SpecialTexts",
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[Piece]:
        """The rendered text in pieces; special-token text that a message wrote lies in pieces that are not control.

        Each string that holds such text, or a fragment that could be completed by its neighbour, gets a mark inside it
        and the template is rendered again: marks say where the text went. If they change what the template writes,
        the origin cannot be told and the request is an `InvalidRequestError`.
        """
        context = _context(messages, add_generation_prompt, tools, variables)
        text = self._render(context)
        if not any(special_texts.are_hinted_in(string) for string in _strings(context)):
            return [Piece(text, is_control=True)]
        mark = _unused_character(text + self.source + "".join(_strings(context)))
        marked = self._render(_map_strings(context, lambda string: special_texts.mark(string, mark)))
        if marked.replace(mark, "") != text:
            raise InvalidRequestError(
                "a message holds the text of a special token where the chat template takes it apart; remove it"
            )
        return special_texts.cut(marked, mark)

    def _render(self, context: Mapping[str, Any]) -> str:
        try:
            return self._template.render({**self._variables, **context})
        except jinja2.exceptions.TemplateError as error:
            raise InvalidRequestError(f"the chat template rejects the conversation: {error.message}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise InvalidRequestError(f"the chat template fails on the conversation: {problem}") from error


class SpecialTexts:
    """The texts of the special tokens: finds them in strings and tells a message's from the template's."""

    def __init__(self, texts: Sequence[str]) -> None:
        texts = sorted({text for text in texts if len(text) > 1})
        longest = max(map(len, texts), default=0)
        if longest > _MAX_SPECIAL_LENGTH:
            raise UnsupportedModelError(
                f"a special token has {longest} characters; a chat allows {_MAX_SPECIAL_LENGTH} at most"
            )
        self._whole = re.compile(_trie_pattern(texts) if texts else r"(?!)")
        self._heads = frozenset(text[:length] for text in texts for length in range(2, len(text)))
        self._tails = frozenset(text[-length:] for text in texts for length in range(2, len(text)))
        self._max_fragment = max(0, longest - 1)

    def are_hinted_in(self, string: str) -> bool:
        """Whether a special token's text is in the string, or two characters or more of one at its border."""
        return bool(self._whole.search(string)) or bool(self._head_length(string)) or bool(self._tail_length(string))

    def mark(self, string: str, mark: str) -> str:
        """One mark inside every hint: after the first character of it, or before the last at the string's start."""
        cuts = {found.start() + 1 for found in self._whole.finditer(string)}
        if length := self._head_length(string):
            cuts.add(len(string.rstrip()) - length + 1)
        if length := self._tail_length(string):
            cuts.add(len(string) - len(string.lstrip()) + length - 1)
        borders = [0, *sorted(cuts), len(string)]
        return mark.join(string[start:end] for start, end in pairwise(borders))

    def cut(self, marked: str, mark: str) -> list[Piece]:
        """Pieces of the text without its marks, cut at the template's special tokens around a message's own."""
        parts = marked.split(mark)
        text = "".join(parts)
        marks: set[int] = set()
        position = 0
        for part in parts[:-1]:
            position += len(part)
            marks.add(position)
        own_spans: list[tuple[int, int]] = []
        foreign_spans: list[tuple[int, int]] = []
        for found in self._whole.finditer(text):
            inside = range(found.start() + 1, found.end())
            is_foreign = any(index in marks for index in inside)
            (foreign_spans if is_foreign else own_spans).append(found.span())
        return list(_pieces(text, own_spans, foreign_spans))

    def _head_length(self, string: str) -> int:
        """Of the longest beginning of a special token that ends the string."""
        tail = string.rstrip()[-self._max_fragment :]
        return next((length for length in range(len(tail), 1, -1) if tail[-length:] in self._heads), 0)

    def _tail_length(self, string: str) -> int:
        head = string.lstrip()[: self._max_fragment]
        return next((length for length in range(len(head), 1, -1) if head[:length] in self._tails), 0)


def _trie_pattern(texts: Sequence[str]) -> str:
    """Matches the longest of these sorted texts, in time that does not grow with their number."""
    first, last = texts[0], texts[-1]
    same = next((index for index, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
    prefix = first[:same]
    ends_here = len(texts[0]) == len(prefix)
    longer = (text[len(prefix) :] for text in (texts[1:] if ends_here else texts))
    branches = [_trie_pattern(list(group)) for _, group in groupby(longer, key=lambda text: text[0])]
    if not branches:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{'|'.join(branches)}){'?' if ends_here else ''}"


def _pieces(text: str, own_spans: list[tuple[int, int]], foreign_spans: list[tuple[int, int]]) -> Iterator[Piece]:
    """Text around a foreign span, from the template's special token before it to the one after, is not control."""
    start = 0
    own_borders = [(0, 0), *own_spans, (len(text), len(text))]
    foreign_starts = [begin for begin, _ in foreign_spans]
    for (_, region_start), (region_end, _) in pairwise(own_borders):
        if bisect_left(foreign_starts, region_start) < bisect_left(foreign_starts, region_end):
            if start < region_start:
                yield Piece(text[start:region_start], is_control=True)
            yield Piece(text[region_start:region_end], is_control=False)
            start = region_end
    if start < len(text):
        yield Piece(text[start:], is_control=True)


def _context(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """What the template sees: plain JSON values, as Hugging Face prepares them."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{index}] must be a mapping with a role, got {type(message).__name__}")
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return {
        "documents": None,
        **{name: _plain(value) for name, value in variables.items()},
        "messages": [_with_reasoning_aliases(_plain(message)) for message in present],
        "tools": None if tools is None else [_plain(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }


def _with_reasoning_aliases(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """JSON types only: a template must not reach the methods of any other object."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Keys too: a template that looks a changed one up finds nothing, and the rendered text says so."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_strings(item, change) for item in value)
    return value


def _unused_character(text: str) -> str:
    used = set(text)
    for code in _PRIVATE_USE_CHARACTERS:
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("the conversation uses every private-use character")
