"""Load the model that a command's options describe. Heavy modules are imported by the functions that need them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import infer
from infer.cli.options.command_options import (
    BenchOptions,
    CacheOptions,
    ChatOptions,
    EvictionOptions,
    LoadOptions,
    PrefixOption,
    RerankerOption,
)
from infer.cli.options.server_options import DeployOptions, ServeOptions
from infer.cli.terminal.signals import exit_on_signal, keeping_garbage
from infer.cli.terminal.terminal import Spinner
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.errors import InvalidRequestError
from infer.request_limits import DEFAULT_PREFIX_BYTES

_SAME_NAMES = (
    *("model", "device", "dtype", "weights", "precision", "grammar_backend", "max_seq_len", "threads"),
    *("chat_template", "allow_special", "tensor_parallel"),
)


def load_model(options: LoadOptions) -> "infer.LLM":
    """Return the LLM that the options describe."""
    spinner = Spinner(f"loading {options.model}", shown=not options.quiet)
    with exit_on_signal(), keeping_garbage(), spinner, kernels_ahead(options):
        from infer.llm import LLM

        return LLM(**load_arguments(options), on_progress=spinner.progress)


def load_for_server(options: ServeOptions, on_progress: Callable[[int, int], None]) -> "infer.LLM":
    """Return the LLM of a server. May be called on any thread."""
    with keeping_garbage(), kernels_ahead(options):
        from infer.llm import LLM

        return LLM(**served_arguments(options), on_progress=on_progress)


def served_arguments(options: ServeOptions | DeployOptions) -> dict[str, Any]:
    """Return the arguments of a server's `LLM`.

    Common prefixes of prompts are read once, unless a policy evicts.
    """
    reuse_prefixes = options.eviction_policy == "none"
    own = {"reuse_prefixes": reuse_prefixes, "pool_pages": options.pool_pages}
    return load_arguments(options) | own | {"prefix_disk": bytes_for_prefixes(options)}


def bytes_for_prefixes(options: LoadOptions | ServeOptions | DeployOptions) -> int:
    """Return the bytes of files for prefixes of prompts. It is 0 with keys, because users with keys share no folder.

    Raises InvalidRequestError if such files are requested together with keys.
    """
    if not isinstance(options, PrefixOption):
        return 0
    given, has_keys = options.prefix_disk, isinstance(options, ServeOptions) and options.api_key_file is not None
    if has_keys and given:
        raise InvalidRequestError(
            "--prefix-disk stores the prompts of all users in one folder: leave out --prefix-disk or --api-key-file"
        )
    return 0 if has_keys else DEFAULT_PREFIX_BYTES if given is None else given


def load_arguments(options: LoadOptions | ServeOptions | DeployOptions) -> dict[str, Any]:
    """Return the arguments of `LLM` that the options set."""
    same = {name: getattr(options, name) for name in _SAME_NAMES}
    if isinstance(options, RerankerOption):
        same["reranker"] = options.reranker
    if isinstance(options, ChatOptions):
        same["prefix_disk"] = bytes_for_prefixes(options)
    return same | cache_values(options) | {"capture": not options.no_capture}


def cache_values(options: EvictionOptions) -> dict[str, Any]:
    """Return the options that are fields of `CacheSettings`, which are also arguments of `LLM`."""
    group = CacheOptions if isinstance(options, CacheOptions) else EvictionOptions
    return {each.name: getattr(options, each.name) for each in fields(group)}


def kernels_ahead(options: LoadOptions | ServeOptions | DeployOptions | BenchOptions) -> AbstractContextManager[None]:
    """Return a context in which torch and the model are loaded while kernels are compiled ahead."""
    from infer.models.compile_ahead import compiling_ahead
    from infer.models.memory.memory_estimate import LoadSettings

    load = LoadSettings(options.dtype, options.weights, options.precision)
    return compiling_ahead(options.model, options.device, load, CacheSettings(**cache_values(options)))
