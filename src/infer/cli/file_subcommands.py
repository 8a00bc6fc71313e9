"""The commands about files and servers: each reports on a model, changes its files, or asks a running server."""

from functools import partial

import click

from infer.cli.options.command_options import (
    CompileOptions,
    DoctorOptions,
    EstimateOptions,
    ExplainOptions,
    HubModelOptions,
    ModelsOptions,
    QuantizeOptions,
)
from infer.cli.options.option_fields import TolerantCommand, takes_options
from infer.cli.options.server_options import RunningServerOptions, StopOptions
from infer.cli.terminal.process_streams import exit_on_signal

command = partial(click.command, cls=TolerantCommand)


@command()
@takes_options(ExplainOptions)
def explain(context: click.Context, options: ExplainOptions) -> None:
    """Describe a model from its headers: its layers, tokenizer, defaults and memory."""
    from infer.cli.commands.explain_command import run_explain

    run_explain(options.model, as_json=options.as_json)


@command()
@takes_options(DoctorOptions)
def doctor(context: click.Context, options: DoctorOptions) -> int:
    """Search a model's files for faults: the tokenizer, the chat template, and the values of all tensors.

    Exit status: 0 without faults, 1 with faults, 2 or 3 if the files cannot be read.
    """
    from infer.cli.commands.quality_commands import run_doctor
    from infer.cli.commands.report_pages import check_page

    check_page(options.html)
    return run_doctor(options.model, as_json=options.as_json, html=options.html)


@command()
@takes_options(QuantizeOptions)
def quantize(context: click.Context, options: QuantizeOptions) -> None:
    """Write a MODEL as a GGUF file of another type, with llama.cpp's mixture of types.

    Only a few rows are in memory at a time. OUT.gguf appears when it is complete.
    """
    from infer.cli.commands.quantize_command import run_quantize

    run_quantize(options)


@command()
@takes_options(EstimateOptions)
def estimate(context: click.Context, options: EstimateOptions) -> None:
    """Estimate from headers how much memory a model and its cache need, whether they fit here, and the speed."""
    from infer.cli.commands.explain_command import run_estimate

    run_estimate(options)


@command(name="compile")
@takes_options(CompileOptions)
def compile_kernels(context: click.Context, options: CompileOptions) -> None:
    """Compile the CPU kernels that a model needs, so that its first use is fast: for images and Dockerfiles."""
    with exit_on_signal():
        from infer.cli.commands.machine_report import run_compile

        run_compile(options.model, is_all=options.is_all)


@command()
@takes_options(ModelsOptions)
def models(context: click.Context, options: ModelsOptions) -> None:
    """List the models on this machine: installed packages, the hub's local cache, and the folder $INFER_MODELS."""
    from infer.cli.commands.models_command import run_models, run_supported

    if options.supported:
        run_supported(as_json=options.as_json)
        return
    run_models(as_json=options.as_json, with_devices=options.verbose)


@command()
@takes_options(HubModelOptions)
def pull(context: click.Context, options: HubModelOptions) -> None:
    """Download a model, or its missing files, from the Hugging Face hub into the hub's local cache."""
    from infer.cli.commands.models_command import run_pull

    run_pull(options.model)


@command()
@takes_options(HubModelOptions)
def rm(context: click.Context, options: HubModelOptions) -> None:
    """Remove a model from the hub's local cache."""
    from infer.cli.commands.models_command import run_rm

    run_rm(options.model)


@command()
@takes_options(RunningServerOptions)
def ps(context: click.Context, options: RunningServerOptions) -> None:
    """List the models of a running server: their state and their memory."""
    from infer.cli.commands.models_command import run_ps

    run_ps(options)


@command()
@takes_options(StopOptions)
def stop(context: click.Context, options: StopOptions) -> None:
    """Unload a MODEL of a running server of several models, after its current answers have ended."""
    from infer.cli.commands.models_command import run_stop

    run_stop(options)


COMMANDS = [explain, doctor, quantize, estimate, compile_kernels, models, pull, rm, ps, stop]
