"""Options for the model that is loaded, its number formats, and how it runs."""

from typing import get_args

import click

from infer.cli.options import Function, apply_options, cache_options, template_options
from infer.cli.spelling import Device
from infer.engine.model_settings import GrammarBackend

AT_LEAST_1 = click.IntRange(min=1)


def weight_options(function: Function) -> Function:
    """Add the options for the model and its number formats."""
    options = [
        click.option("-m", "--model", default="smollm2", show_default=True, metavar="NAME|PATH",
                     help="An installed model, a folder, a .gguf file, or org/repo[@revision][:Q4_K_M] on the hub."),
        number_options,
    ]  # fmt: skip
    return apply_options(options, function)


def number_options(function: Function) -> Function:
    dtypes, weights = (
        click.Choice(["auto", "float32", "float16", "bfloat16"]),
        click.Choice(["auto", "bf16", "q8", "q4"]),
    )
    options = [
        click.option("--threads", type=AT_LEAST_1, help="Threads to compute with.  [default: all cores]"),
        click.option("--precision", type=click.Choice(["exact", "fast"]), default="exact", show_default=True,
                     help="Of activations beside quantised weights, on a CPU: 16 bits or 8."),
        click.option("--weights", type=weights, default="auto", show_default=True,
                     help="Quantise float weights at load; auto: as the file stores them."),
        click.option("--dtype", type=dtypes, default="auto", show_default=True,
                     help="Dequantise at load; auto: as the file stores it."),
    ]  # fmt: skip
    return apply_options(options, function)


def model_options(function: Function) -> Function:
    return apply_options([weight_options, cache_options, running_options], function)


def device_option(function: Function) -> Function:
    return click.option("--device", "--backend", "device", type=Device(), default="cpu", show_default=True)(function)


def running_options(function: Function) -> Function:
    """Add the options for how a model runs, and for what is reported about it."""
    options = [
        click.option("--max-seq-len", type=int,
                     help="Prompt and answer together, in tokens.  [default: the model's own, at most 8192]"),
        device_option,
        click.option("--grammar-backend", type=click.Choice(get_args(GrammarBackend)), default="llguidance",
                     show_default=True, help="What holds an answer to a schema, a pattern or a grammar."),
        click.option("--tensor-parallel", type=AT_LEAST_1, default=1, show_default=True,
                     help="Processes that share the model out, each with --threads: the same tokens."),
        click.option("--no-capture", is_flag=True, help="Run each operation by itself: slower, with the same tokens."),
        template_options,
        click.option("-q", "--quiet", is_flag=True, help="Nothing but the text."),
        click.option("-v", "--verbose", is_flag=True, help="Counts, seed and reason; a traceback with an error."),
    ]  # fmt: skip
    return apply_options(options, function)
