"""Render chat templates in a process that a malicious template cannot harm. `chat_template` runs it as a program.

It has Hugging Face's Jinja environment, in Jinja's sandbox. It reads lines of JSON, [template, variables, most
characters]. It answers each with a line of JSON: {"text": …}, or {"kind": …, "problem": …, "line": …}. It imports
nothing from infer, so that it starts in a tenth of a second.
"""

import json
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_COMPILED, MAX_COMPILED_CHARACTERS = 8, 1 << 20  # limits of the kept templates
_STACK_BYTES = 4 << 20


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training. Here it is only its body."""

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
    """`namespace` that accepts no attribute with an underscore, because these lead to Python's internals."""

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
        raise jinja2.exceptions.SecurityError(f"a namespace must not have attributes with an underscore, got {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Complaint(jinja2.exceptions.TemplateError):
    """The message with which a template refuses a conversation, by `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Complaint(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class Renderer:
    """Renderer that keeps the templates used most recently, compiled."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._compiled: OrderedDict[str, jinja2.Template] = OrderedDict()

    def answer(self, source: str, variables: dict[str, Any], most_characters: int) -> dict[str, Any]:
        """Return {"text": …}, or the problem of the template and its line in the template."""
        kind, line = "", None
        try:
            template = self._compile(source)
            return {"text": "".join(_limited(template.generate(variables), most_characters))}
        except MemoryError:
            most_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0]
            kind, problem = "limit", f"takes more than {most_bytes >> 20} MiB: it cannot be used"
        except _TooLongError:
            kind, problem = "limit", f"writes more than {most_characters:,} characters"
        except _Complaint as error:
            kind, problem, line = "refusal", f"rejects the conversation: {error.message}", _line_of(error)
        except jinja2.exceptions.TemplateSyntaxError as error:
            problem, line = f"is not valid: {error.message}", error.lineno
        except Exception as error:  # a template can make Python raise anything
            name = "" if isinstance(error, jinja2.exceptions.TemplateError) else f"{type(error).__name__}: "
            problem, line = f"fails on the conversation: {name}{error}", _line_of(error)
        return {"kind": kind, "problem": problem, "line": line}

    def _compile(self, source: str) -> jinja2.Template:
        template = self._compiled.pop(source, None) or self._environment.from_string(source)
        self._compiled[source] = template
        while len(self._compiled) > MAX_COMPILED or sum(map(len, self._compiled)) > MAX_COMPILED_CHARACTERS:
            self._compiled.popitem(last=False)
        return template


class _TooLongError(Exception):
    pass


def _limited(parts: Iterator[str], most: int) -> Iterator[str]:
    for part in parts:
        most -= len(part)
        if most < 0:
            raise _TooLongError
        yield part


def _line_of(error: BaseException) -> int | None:
    """Return the template's line. Jinja rewrites the traceback so that its frames are the template's own lines."""
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<template>":
            line = step.tb_lineno
        step = step.tb_next
    return line


def _limit(what: int, count: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (count if hard < 0 else min(count, hard), hard))


def main(seconds: float, memory_bytes: int) -> None:
    """Answer the questions on stdin.

    The limit is processor time, so that a template does not fail on a busy machine. The timer's signal ends the
    process.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, memory_bytes)
    renderer = Renderer()
    print('""', flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(renderer.answer(*question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
