"""The prompts that a command answers, and the sampling options, which have the names of fields in `SamplingParams`.

A prompt is that of an option, a pipe or the terminal, or one of many in a file. The order of precedence of parameters
is: the command line, a `--preset`, the model's own values, neutral values.
"""

import fcntl
import os
import select
import stat
import struct
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

import infer
from infer.cli.option_fields import Declared, Function, apply_options, argument, option
from infer.cli.option_files import MAX_PROMPT_BYTES, MAX_PROMPTS_BYTES, is_stdin_taken, read_row, read_stdin, read_text
from infer.cli.terminal import ask_line
from infer.compute.sampling.keywords import CHAT_DEFAULTS, PRESETS, SamplingDefaults, beside, default_params
from infer.errors import InvalidRequestError
from infer.parameters import Bias, Count, Flag, Kind, Number, OneOf, Texts, TokenIds
from infer.sampling_params import ALIASES, CONSTRAINTS, FILTER_NAMES, PARAMETERS, SamplingParams, values_from
from infer.system.status_line import write_notice

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, ids, or messages for the chat template
HINT_SECONDS = 2.0  # without input, after which a message says that stdin is read
_PRESET_HELP = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in PRESETS["seed"].items())
_NOT_HERE = (*CONSTRAINTS, "logprobs", "logprobs_mode")  # options of other groups
_LENGTHS = ("max_new_tokens", "min_new_tokens")
_END_OF_HELP = {
    "logprobs": "",
    "seed": "  [default: random, shown with -v]",
    "max_new_tokens": f"  [default: {CHAT_DEFAULTS['max_new_tokens']}]",
    "min_new_tokens": "  [default: 0]",
    **dict.fromkeys(("stop", "logit_bias"), " Repeatable."),
}
_OFF_BY_NAME = {name: PARAMETERS[name].none[0] for name in ("top_k", "repetition_window")}  # the numbers that mean None


class PromptOptions(Declared):
    """The options for one prompt. `chat` and `system` also apply to a file of many prompts."""

    words: tuple[str, ...] = argument(metavar="[PROMPT]")
    prompt: str | None = option(
        "-p", "--prompt", metavar="TEXT", help="The prompt. Unlike with PROMPT, stdin is not read."
    )
    prompt_file: Path | None = option(metavar="FILE", help="Read the prompt from a file; - is stdin.")
    chat: bool = option(help="Send the prompt as a user's message, in the model's chat template.")
    system: str | None = option(metavar="TEXT", help="With --chat: system message before the prompt.")


class FilePrompt(NamedTuple):
    """One prompt of many, and its own sampling parameters."""

    where: str
    prompt: Prompt
    values: dict[str, Any]


def one_prompt(options: PromptOptions, *, prompts_file: Path | None = None) -> Prompt:
    """Return the prompt from its argument, option or file, else from stdin or the terminal.

    Text from a pipe is appended to a PROMPT after an empty line. With --prompt, stdin is not read, for scripts whose
    stdin is something else.
    """
    sources = {"PROMPT": options.words or None, "--prompt": options.prompt, "--prompt-file": options.prompt_file,
               "--prompts-file": prompts_file}  # fmt: skip
    refuse_several([name for name, value in sources.items() if value is not None])
    if len(options.words) > 1:
        count = len(options.words)
        raise click.UsageError(f"the prompt must be one argument, got {count}: put it in quotes (-m names a model)")
    if options.system is not None and not options.chat:
        raise click.UsageError("--system needs --chat")
    return "" if prompts_file is not None else _framed(_prompt_text(options), options)


def _prompt_text(options: PromptOptions) -> str:
    if options.prompt_file is not None:
        return read_text(options.prompt_file, "the prompt file")
    if options.prompt is not None:
        _warn_of_unread_stdin()
        return options.prompt
    piped = _piped_text(is_needed=not options.words)
    if options.words:
        return f"{options.words[0]}\n\n{piped}" if piped else options.words[0]
    text = ask_line("prompt: ").removesuffix("\n") if piped is None else piped
    if not text.strip():
        where = "" if piped is None else "stdin is empty; "
        raise InvalidRequestError(f'no prompt: {where}give one, as in infer generate "Once upon a time"')
    return text


def many_prompts(path: Path, options: PromptOptions) -> list[FilePrompt]:
    """Return the prompts of a file, one per line. Empty lines are skipped.

    Lines are JSON if the file's name ends in .jsonl.
    """
    lines = read_text(path, "the prompts file", MAX_PROMPTS_BYTES).splitlines()
    asked = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        text, values = read_row(line, where, "prompt") if path.suffix == ".jsonl" else (line, {})
        named = {ALIASES.get(name, name): value for name, value in values.items()}
        asked.append(FilePrompt(where, _framed(text, options), named))
    if not asked:
        raise InvalidRequestError(f"the prompts file {path} has no prompt: write one per line")
    return asked


def _framed(text: str, options: PromptOptions) -> Prompt:
    if not options.chat:
        return text
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def _piped_text(*, is_needed: bool) -> str | None:
    """Return all of stdin without its last line break, or None for a terminal.

    With a prompt, only a pipe or a file is also read: a socket that a parent left open would never end.
    """
    descriptor = _descriptor()
    if descriptor is None or is_stdin_taken():
        return ""
    if os.isatty(descriptor):
        return None
    mode = os.fstat(descriptor).st_mode
    if not (is_needed or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    if stat.S_ISFIFO(mode) and not select.select([descriptor], [], [], HINT_SECONDS)[0]:
        write_notice("infer: reading the prompt from stdin, a pipe (add < /dev/null to ignore it)")
    return read_stdin("the text on stdin", MAX_PROMPT_BYTES).removesuffix("\n").removesuffix("\r")


def _warn_of_unread_stdin() -> None:
    """Warn if a pipe has unread text: otherwise it would seem to be read."""
    descriptor = _descriptor()
    if descriptor is None or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    if waiting:
        write_notice('infer: stdin is not read with --prompt; use "… | infer generate TEXT" to read it')


def _descriptor() -> int | None:
    """Return stdin's descriptor, or None if stdin is closed or is not a file of the system."""
    try:
        descriptor = sys.stdin.fileno() if sys.stdin is not None else None
        if descriptor is not None:
            os.fstat(descriptor)
    except (OSError, ValueError):
        return None
    return descriptor


def sampling_options(*, has_length: bool) -> Callable[[Function], Function]:
    """Add all sampling options except those for log-probabilities.

    `has_length` is False for commands that fix the number of tokens themselves.
    """
    names = [name for name in PARAMETERS if name not in _NOT_HERE and (has_length or name not in _LENGTHS)]
    options = [
        *(_option(name) for name in names),
        click.option("--preset", type=click.Choice(list(PRESETS)), help=f"seed: {_PRESET_HELP}."),
        click.option("--no-generation-config", is_flag=True,
                     help="Ignore the sampling values of the model's files and of its card."),
    ]  # fmt: skip
    return lambda function: apply_options(options, function)


def logprobs_options(function: Function) -> Function:
    return apply_options([_option("logprobs", before="With --json: "), _option("logprobs_mode")], function)


def _option(name: str, before: str = "") -> Callable[[Function], Function]:
    """Return the option of a parameter, made from its declaration."""
    kind, flags = PARAMETERS[name].kind, ["-n"] * (name == "max_new_tokens") + [f"--{name.replace('_', '-')}"]
    metavar = "N" if name == "logprobs" else None
    settings: Mapping[str, Any] = _SETTINGS_BY_KIND.get(type(kind)) or {"type": int, "metavar": metavar}
    if isinstance(kind, OneOf):
        settings = {"type": click.Choice(kind.values), "default": kind.values[0], "show_default": True}
    return click.option(*flags, help=before + PARAMETERS[name].help + _end_of_help(name), **settings)


def _end_of_help(name: str) -> str:
    """Return the end of an option's help: if it is repeatable, or the value that applies without the option."""
    if name in _END_OF_HELP or not isinstance(PARAMETERS[name].kind, Number | Count):
        return _END_OF_HELP.get(name, "")
    neutral = _OFF_BY_NAME.get(name, getattr(SamplingParams(), name))
    in_chats = f", in a chat {CHAT_DEFAULTS[name]:g}" if name in CHAT_DEFAULTS else ""
    return f"  [default: the model's, else {neutral:g}{in_chats}]"


def is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)


def refuse_several(given: Sequence[str]) -> None:
    """Raise UsageError if several options are given of which a command takes one."""
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} are both given: give one")


def given_values(context: click.Context) -> dict[str, Any]:
    """Return the values that the command line gives, by the names of SamplingParams."""
    given = {name: context.params[name] for name in PARAMETERS if is_given(context, name)}
    return {**PRESETS.get(context.params["preset"] or "", {}), **values_from(given)}


def json_value(value: Any) -> Any:
    """Return a parameter's value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(token_id): bias for token_id, bias in value.items()}
    return sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value


def model_defaults(model: "infer.LLM", options: Mapping[str, Any]) -> SamplingDefaults:
    return SamplingDefaults({}) if options["no_generation_config"] else model.sampling_defaults


def merge_params(
    from_model: SamplingDefaults, given: Mapping[str, Any], *, is_chat: bool, quiet: bool
) -> SamplingParams:
    """Return the parameters, and print one line on stderr that names the model's own values among them."""
    params, kept = default_params(from_model, given, is_chat=is_chat), beside(from_model, given)
    skipped = FILTER_NAMES if params.is_greedy else ()
    sources = {"from the model": from_model.from_files, "from the model's card": from_model.from_card}
    told = [
        f"{source}: {', '.join(f'{name} {value}' for name, value in used.items())}"
        for source, values in sources.items()
        if (used := {name: value for name, value in values.items() if name in kept and name not in skipped})
    ]
    if told and not quiet:
        print(f"{'; '.join(told)} (--no-generation-config ignores them)", file=sys.stderr)
    return params


def own_params(
    asked: Sequence[FilePrompt], given: Mapping[str, Any], from_model: Mapping[str, Any], *, is_chat: bool
) -> list[SamplingParams]:
    """Return the parameters of each prompt. Its own values take precedence over `given`, which all prompts share."""
    own = []
    for each in asked:
        constraints = CONSTRAINTS if any(name in CONSTRAINTS for name in each.values) else ()
        named = {name: value for name, value in given.items() if name not in constraints} | dict(each.values)
        try:
            own.append(default_params(from_model, named, is_chat=is_chat))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{each.where}: {error}") from error
    return own


def _parse_bias(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    bias_by_id = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            bias_by_id[int(token_id)] = float(bias)
        except ValueError:
            message = f"{value!r} is not ID=VALUE, as in 1234=-5 or 1234=-inf"
            raise click.BadParameter(message, context, option) from None
    return bias_by_id


def _parse_ids(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[int] | None:
    try:
        return [int(token_id) for value in values for token_id in value.replace(",", " ").split()] or None
    except ValueError:
        raise click.BadParameter(f"{' '.join(values)!r} is not a list of ids, as in 2,1234", context, option) from None


_SETTINGS_BY_KIND: Mapping[type[Kind], dict[str, Any]] = {
    Flag: {"is_flag": True},
    Number: {"type": float},
    Texts: {"multiple": True, "metavar": "TEXT"},
    TokenIds: {"multiple": True, "metavar": "ID,ID…", "callback": _parse_ids},
    Bias: {"multiple": True, "metavar": "ID=VALUE", "callback": _parse_bias},
}
