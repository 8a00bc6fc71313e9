"""Load the model that a command's options describe. Heavy modules are imported by the functions that need them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import infer
from infer.cli.options.command_options import BenchOptions, DiskOption, LoadOptions
from infer.cli.options.server_options import DeployOptions, ServeOptions
from infer.cli.terminal.signals import exit_on_signal, keeping_garbage
from infer.cli.terminal.terminal import Spinner
from infer.errors import InvalidRequestError
from infer.model_settings import ModelSettings
from infer.request_limits import DEFAULT_PREFIX_BYTES


def load_model(options: LoadOptions) -> "infer.LLM":
    """Return the LLM that the options describe."""
    spinner = Spinner(f"loading {options.model}", shown=not options.quiet)
    with exit_on_signal(), keeping_garbage(), spinner, kernels_ahead(options):
        from infer.llm import LLM

        return LLM(options.model, **vars(model_settings(options)), on_progress=spinner.progress)


def load_for_server(options: ServeOptions, on_progress: Callable[[int, int], None]) -> "infer.LLM":
    """Return the LLM of a server. May be called on any thread."""
    with keeping_garbage(), kernels_ahead(options):
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


def kernels_ahead(options: LoadOptions | ServeOptions | DeployOptions | BenchOptions) -> AbstractContextManager[None]:
    """Return a context in which torch and the model are loaded while kernels are compiled ahead."""
    from infer.models.compile_ahead import compiling_ahead

    return compiling_ahead(options.model, options.settings)
