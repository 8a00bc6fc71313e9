"""Checks of a command's options before torch is loaded.

They refuse settings that break a rule, names without a model, and ids and lengths that the model's headers do not
allow.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import click

from infer.cli.options.command_options import BenchOptions, LoadOptions
from infer.cli.options.sampling_options import is_given
from infer.cli.options.server_options import DeployOptions, ServeOptions
from infer.compute.backends.before_load import step_limits
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.errors import InvalidRequestError
from infer.model_settings import ModelSettings
from infer.sampling_params import CONSTRAINTS, SamplingParams
from infer.system.cores.cores import check_num_threads
from infer.system.spellings import install_extra

_BENCH_SIZES = ("prompt_tokens", "num_tokens", "context")
_OF_EXTRA = {"serve": ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn"), "ray": ("ray", "fastapi")}


_Loading = LoadOptions | ServeOptions | DeployOptions | BenchOptions


def check_options(options: _Loading, params: Collection[SamplingParams]) -> None:
    """Raise InvalidRequestError or ModelError for bad options.

    The model's headers are opened only if an option depends on them.
    """
    check_loading(options)
    settings, named = options.settings, _named_ids(params)
    if settings.max_seq_len is None and settings.cache == CacheSettings() and not named:
        from infer.files import resolve

        resolve(options.model)
    else:
        _check_headers(options.model, settings, named)


def check_loading(options: _Loading) -> None:
    """Raise InvalidRequestError for options that no model on this machine can have."""
    settings = options.settings
    if settings.threads is not None:
        check_num_threads(settings.threads)
    _check_step(options)
    if settings.dtype != "auto" and settings.weights != "auto":
        raise InvalidRequestError("--dtype and --weights contradict each other: give one of them")


def _check_step(options: _Loading) -> None:
    """Raise InvalidRequestError for an option that is above the limits of a step on the device."""
    device = options.settings.device
    limits = step_limits(device)
    given = vars(options) | (vars(options.server) if isinstance(options, ServeOptions | DeployOptions) else {})
    for name, most in (("slots", limits.logits), ("batch_size", limits.logits), ("prefill_chunk", limits.tokens)):
        value = given.get(name)
        if value is not None and value > most:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidRequestError(f"{flag} must be at most {most} with --device {device}, got {value}")


def check_suite(context: click.Context) -> None:
    """Raise UsageError if options of `infer bench` contradict each other."""
    given = [f"--{name.replace('_', '-')}" for name in _BENCH_SIZES if is_given(context, name)]
    kinds = [f"--{name}" for name in ("suite", "profile") if context.params[name]]
    if "--suite" in kinds and given:
        raise click.UsageError(f"--suite and {given[0]} are both given: a suite has sizes of its own")
    others = [*kinds, *(f"--{name}" for name in ("report", "compare") if context.params[name])]
    if context.params["profile"] and len(others) > 1:
        raise click.UsageError(f"--profile and {others[0 if others[0] != '--profile' else 1]} are both given: give one")


def check_constraints(context: click.Context) -> None:
    """Raise UsageError if two constraints are given, with the names under which they were given."""
    given = [f"--{name.replace('_', '-')}" for name in CONSTRAINTS if context.params.get(name) is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} are both given: give one")


@contextmanager
def needs_extra() -> Iterator[None]:
    """Wrap imports of an extra's packages. Raises InvalidRequestError if a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        for extra, modules in _OF_EXTRA.items():
            if error.name in modules:
                raise InvalidRequestError(f"{error.name} is not installed: {install_extra(extra)}") from error
        raise


def check_grammar(params: SamplingParams) -> None:
    """Raise InvalidRequestError if the text of a schema, pattern or grammar is wrong."""
    if all(getattr(params, name) is None for name in CONSTRAINTS):
        return
    from infer.text.grammar.grammar import grammar_of
    from infer.text.grammar.reading import check

    grammar = grammar_of(params)
    if grammar is not None:
        check(grammar)


def _named_ids(params: Collection[SamplingParams]) -> list[tuple[str, int]]:
    names = ("logit_bias", "allowed_token_ids", "stop_token_ids")
    return [(name, token_id) for each in params for name in names for token_id in getattr(each, name) or ()]


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
