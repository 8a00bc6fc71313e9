"""Load the model that a command's options describe. Heavy modules are imported by the functions that need them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import click

from infer.cli.options import cache_values
from infer.cli.terminal import Spinner, exit_on_signal, keeping_garbage
from infer.kvcache.cache_settings import CacheSettings


def load_model(context: click.Context, options: Mapping[str, Any]) -> Any:
    """Return the LLM that the options describe."""
    spinner = Spinner(f"loading {options['model']}", shown=not options["quiet"])
    with exit_on_signal(), keeping_garbage(), spinner, kernels_ahead(options, options["device"]):
        from infer.llm import LLM

        return LLM(**load_arguments(options), on_progress=spinner.progress)


def load_for_server(options: Mapping[str, Any], on_progress: Callable[[int, int], None]) -> Any:
    """Return the LLM of a server. May be called on any thread."""
    with keeping_garbage(), kernels_ahead(options, options["device"]):
        from infer.llm import LLM

        return LLM(**served_arguments(options), on_progress=on_progress)


def served_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a server's `LLM`.

    Common prefixes of prompts are read once, unless a policy evicts.
    """
    reuse_prefixes = options["eviction_policy"] == "none"
    return load_arguments(options) | {"reuse_prefixes": reuse_prefixes, "pool_pages": options["pool_pages"]}


def load_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM` that the options give."""
    names = ("model", "device", "dtype", "weights", "precision", "grammar_backend", "max_seq_len", "threads")
    given = {name: options[name] for name in (*names, "chat_template", "allow_special")}
    how = {"capture": not options["no_capture"], "tensor_parallel": options["tensor_parallel"]}
    return given | cache_values(options) | how


def kernels_ahead(options: Mapping[str, Any], device: str = "cpu") -> AbstractContextManager[None]:
    """Return a context in which torch and the model are loaded while kernels are compiled ahead."""
    from infer.model.compile_ahead import compiling_ahead
    from infer.model.memory_estimate import LoadSettings

    load = LoadSettings(options["dtype"], options["weights"], options["precision"])
    return compiling_ahead(options["model"], device, load, CacheSettings(**cache_values(options)))
