"""Sampling options, each with the name of its field in `SamplingParams`, and the parameters that they give.

The order of precedence is: the command line, a `--preset`, the model's own values, neutral values.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

import infer
from infer.cli.option_fields import Function, apply_options
from infer.cli.prompts import Asked
from infer.errors import InvalidRequestError
from infer.sampling.defaults import (
    MAX_NEW_TOKENS,
    NEUTRAL_CHAT,
    PRESETS,
    SamplingDefaults,
    beside,
    neutral_values,
)
from infer.sampling_params import CONSTRAINTS, PARAMETER_NAMES, SamplingParams

_FILTERS = ("top_k", "top_p", "min_p")  # without an effect on a greedy answer
_PRESET_HELP = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in PRESETS["seed"].items())


def sampling_options(*, has_length: bool) -> Callable[[Function], Function]:
    """Add all sampling options except those for log-probabilities.

    `has_length` is False for commands that fix the number of tokens themselves.
    """
    chat = f"in a chat {NEUTRAL_CHAT['temperature']:g}"
    length = [
        click.option("-n", "--max-new-tokens", type=int, default=MAX_NEW_TOKENS, show_default=True,
                     help="Tokens to generate at most; -1: to the end of the context."),
        click.option("--min-new-tokens", type=int, default=0, help="No end before so many tokens."),
    ]  # fmt: skip
    options = [
        *(length if has_length else ()),
        click.option("--temperature", type=float, help=f"0 is greedy.  [default: the model's, else 1, {chat}]"),
        click.option("--top-p", type=float,
                     help=f"1 is off.  [default: the model's, else 1, in a chat {NEUTRAL_CHAT['top_p']:g}]"),
        click.option("--top-k", type=int, help="0 is off.  [default: the model's, else 0]"),
        click.option("--min-p", type=float, help="0 is off.  [default: the model's, else 0]"),
        click.option("--repetition-penalty", type=float, help="1 is off.  [default: the model's, else 1]"),
        click.option("--repetition-window", type=int,
                     help="The last N tokens; -1 is all, 0 none.  [default: the model's, else -1]"),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True),
        click.option("--logit-bias", callback=_parse_bias, multiple=True, metavar="ID=VALUE",
                     help="Added to a token's logit; -inf bans, inf forces. Repeatable."),
        click.option("--allowed-token-ids", callback=_parse_ids, multiple=True, metavar="ID,ID…",
                     help="All other tokens are impossible."),
        click.option("--temperature-last", is_flag=True, help="Temperature after the filters, as llama.cpp has it."),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text. Repeatable."),
        click.option("--stop-token-ids", callback=_parse_ids, multiple=True, metavar="ID,ID…",
                     help="Tokens that end the answer, as the model's own do."),
        click.option("--include-stop-str-in-output", is_flag=True, help="Keep the text that --stop stopped at."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the end of text."),
        click.option("--seed", type=int, help="Repeat a run.  [default: random, shown with -v]"),
        click.option("--preset", type=click.Choice(list(PRESETS)), help=f"seed: {_PRESET_HELP}."),
        click.option("--no-generation-config", is_flag=True,
                     help="Ignore the sampling values that the model or its card brings."),
    ]  # fmt: skip
    return lambda function: apply_options(options, function)


def logprobs_options(function: Function) -> Function:
    options = [
        click.option("--logprobs", type=int, metavar="N",
                     help="With --json: each token's log-probability, beside the N likeliest."),
        click.option("--logprobs-mode", type=click.Choice(["raw", "processed"]), default="raw", show_default=True,
                     help="processed: after mask, bias, penalties and filters."),
    ]  # fmt: skip
    return apply_options(options, function)


def is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)


def given_values(context: click.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the command line gives, by the names of SamplingParams."""
    given = {name: options[name] for name in PARAMETER_NAMES if name in options and is_given(context, name)}
    for name in ("repetition_window", "max_new_tokens"):
        if given.get(name) == -1:
            given[name] = None
    return {**PRESETS.get(options["preset"] or "", {}), **given}


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
    asked: Sequence[Asked], given: Mapping[str, Any], neutral: Mapping[str, Any], from_model: Mapping[str, Any]
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
