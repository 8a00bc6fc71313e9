"""The exceptions that `infer` raises. Each message is one line that names the value, the rule and the fix.

`exit_status` is the exit status of the command line: 2 for an invalid request, 3 for a bad model, 1 for other errors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_WINDOWS = "infer does not run on Windows itself: install it in WSL 2, as docs/how-to/windows.md shows"
# Characters of a file's name or contents that would end a line or control a terminal.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


class InferError(Exception):
    """Base of the exceptions that `infer` raises on purpose.

    Its text is one line: characters that control a terminal are escaped.

    Examples:
        >>> try:
        ...     llm.generate("x", top_p=2)
        ... except InferError as error:
        ...     print(error)
        top_p must be in (0, 1], got 2
    """

    exit_status = 1

    def __str__(self) -> str:
        return super().__str__().translate(_ESCAPES)


class InvalidRequestError(InferError, ValueError):
    """A parameter, a prompt or a file named by the user breaks a rule. `param` is the parameter's name, if known.

    Examples:
        >>> try:
        ...     llm.generate("x", top_p=2)
        ... except InvalidRequestError as error:
        ...     print(error.param, error.exit_status)
        top_p 2
    """

    exit_status = 2

    def __init__(self, *message: object, param: str | None = None) -> None:
        self.param = param
        super().__init__(*message)


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the context. Agents search the message for words, and then shorten their prompt."""


class ClosedError(InvalidRequestError):
    """A model or a session is used after `close()`."""


def closed(what: str = "model") -> ClosedError:
    """Return the error for any use of a closed model or session. It names what to do instead."""
    instead = "load it again, with LLM(...)" if what == "model" else "begin another one"
    return ClosedError(f"the {what} is closed: {instead}")


class OutOfPagesError(InferError):
    """The cache has too few free pages for the next tokens of a sequence. It can continue after others have ended."""


class EngineFailedError(InferError):
    """The engine has failed, and the model must be loaded again."""


class ModelError(InferError):
    """The model cannot be used as it is.

    Examples:
        >>> num_bytes = Path("broken.gguf").write_bytes(b"not a model")
        >>> try:
        ...     LLM("broken.gguf")
        ... except ModelError as error:
        ...     print(error)
        broken.gguf: file size: expected at least 24 bytes, got 11: copy or download the file again
    """

    exit_status = 3


class UnsupportedModelError(ModelError):
    """A well-formed model has an architecture, tensor type or tokenizer that is not supported."""


class ModelFormatError(ModelError):
    """A file breaks its own format. `field` names the part; `offset` is its place in bytes from the start, if known."""

    def __init__(self, path: Path | str, field: str, problem: str, offset: int | None = None) -> None:
        self.path, self.field, self.problem, self.offset = Path(path), field, problem, offset
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{Path(path).name}: {field}{where}: {problem}")


class SchemaError(InvalidRequestError):
    """A part of a JSON schema cannot be enforced.

    `pointer` is the JSON pointer of that part, or None if it is unknown. `problem` is the reason without the place.
    """

    def __init__(
        self, message: str, pointer: str | None = None, problem: str | None = None, *, param: str | None = None
    ) -> None:
        self.pointer, self.problem = pointer, message if problem is None else problem
        super().__init__(message, param=param)


def problem_of(error: InvalidRequestError) -> str:
    """Return the reason of a schema's error, without the place if that is known."""
    return error.problem if isinstance(error, SchemaError) else str(error)


class PropertyNameError(SchemaError):
    """A format of tool calls cannot write the name of the property at `pointer`."""


class AnswerGrammarError(InvalidRequestError):
    """The tools and the format of an answer can be compiled separately, but not together."""


class RequestWarning(UserWarning):
    """A part of a request was left out or changed, and the answer is made without it."""


class SchemaWarning(RequestWarning):
    """Parts of a schema are not enforced: unknown keywords, or parts of a tool that no grammar can enforce."""


class MessageWarning(RequestWarning):
    """A message of the history is given to the model in another form."""


class TruncationWarning(RequestWarning):
    """Texts were longer than the context, and were cut at their end."""


class ConstraintError(InvalidRequestError):
    """A compiled grammar cannot be followed further, because it has become too complex."""


@contextmanager
def about(param: str) -> Iterator[None]:
    """Name the parameter of an InvalidRequestError in this block, unless the error already names one."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param or param
        raise
