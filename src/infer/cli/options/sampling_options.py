"""Sampling options, each with the name of its field in `SamplingParams`, and the parameters that they set.

The order of precedence is: the command line, a `--preset`, the model's own values, neutral values.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

import infer
from infer.cli.options.option_fields import Function, apply_options
from infer.cli.options.prompts import FilePrompt
from infer.compute.sampling.defaults import NEUTRAL, NEUTRAL_CHAT, PRESETS, SamplingDefaults, beside, neutral_values
from infer.errors import InvalidRequestError
from infer.parameters import Bias, Flag, Number, OneOf, Texts, TokenIds
from infer.sampling_params import CONSTRAINTS, PARAMETER_NAMES, PARAMETERS, SamplingParams, values_from

_FILTERS = tuple(name for name, declared in PARAMETERS.items() if declared.is_filter)
_PRESET_HELP = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in PRESETS["seed"].items())
_NOT_HERE = (*CONSTRAINTS, "logprobs", "logprobs_mode")  # options of other groups
_LENGTHS = ("max_new_tokens", "min_new_tokens")
_OFF_BY_NAME = {name: PARAMETERS[name].none[0] for name in ("top_k", "repetition_window")}  # the numbers that mean None


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
    declared, flag = PARAMETERS[name], f"--{name.replace('_', '-')}"
    help = before + declared.help
    match declared.kind:
        case Flag():
            return click.option(flag, is_flag=True, help=help)
        case OneOf(values=values):
            return click.option(flag, type=click.Choice(values), default=values[0], show_default=True, help=help)
        case Texts():
            return click.option(flag, multiple=True, metavar="TEXT", help=f"{help} Repeatable.")
        case TokenIds():
            return click.option(flag, callback=_parse_ids, multiple=True, metavar="ID,ID…", help=help)
        case Bias():
            return click.option(
                flag, callback=_parse_bias, multiple=True, metavar="ID=VALUE", help=f"{help} Repeatable."
            )
    flags = ["-n", flag] if name == "max_new_tokens" else [flag]
    kind, metavar = (float if isinstance(declared.kind, Number) else int), "N" if name == "logprobs" else None
    return click.option(*flags, type=kind, metavar=metavar, help=help + _default_of(name))


def _default_of(name: str) -> str:
    """Return the end of an option's help: the value that applies without the option."""
    match name:
        case "logprobs":
            return ""
        case "seed":
            return "  [default: random, shown with -v]"
        case "max_new_tokens":
            return f"  [default: {NEUTRAL[name]}]"
        case "min_new_tokens":
            return "  [default: 0]"
    neutral = _OFF_BY_NAME.get(name, getattr(SamplingParams(), name))
    in_chats = f", in a chat {NEUTRAL_CHAT[name]:g}" if name in NEUTRAL_CHAT else ""
    return f"  [default: the model's, else {neutral:g}{in_chats}]"


def is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)


def given_values(context: click.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the command line gives, by the names of SamplingParams."""
    given = {name: options[name] for name in PARAMETER_NAMES if name in options and is_given(context, name)}
    return {**PRESETS.get(options["preset"] or "", {}), **values_from(given)}


def model_defaults(model: "infer.LLM", options: Mapping[str, Any]) -> SamplingDefaults:
    return SamplingDefaults({}) if options["no_generation_config"] else model.sampling_defaults


def merge_params(
    from_model: SamplingDefaults, given: Mapping[str, Any], *, is_chat: bool, quiet: bool
) -> SamplingParams:
    """Return the parameters, and print one line on stderr that names the model's own values among them."""
    kept = beside(from_model, given)
    params = SamplingParams.from_mapping({**neutral_values(is_chat=is_chat), **kept, **given})
    skipped = _FILTERS if params.is_greedy else ()
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
    asked: Sequence[FilePrompt], given: Mapping[str, Any], neutral: Mapping[str, Any], from_model: Mapping[str, Any]
) -> list[SamplingParams]:
    """Return the parameters of each prompt. Its own values take precedence over `given`, which all prompts share."""
    own = []
    for each in asked:
        constraints = CONSTRAINTS if any(name in CONSTRAINTS for name in each.values) else ()
        named = {name: value for name, value in given.items() if name not in constraints} | dict(each.values)
        try:
            own.append(SamplingParams.from_mapping({**neutral, **beside(from_model, named), **named}))
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
