"""The commands and their options. Every sampling option has the name of its field in `SamplingParams`.

A value on the command line takes precedence over one from the model, and that over the default shown in the help.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

import infer as package
from infer.cli.checks import check_grammar, check_options, needs_extra
from infer.cli.model_choice import choose_model, model_argument, take_named
from infer.cli.model_load import kernels_ahead, load_arguments, load_for_server, load_model, served_arguments
from infer.cli.model_options import (
    AT_LEAST_1,
    device_option,
    model_options,
    number_options,
    running_options,
    weight_options,
)
from infer.cli.options import (
    batch_options,
    cache_options,
    check_constraints,
    constraint_options,
    eviction_options,
    path_options,
    prompt_options,
    prompts_options,
)
from infer.cli.prompts import many_prompts, one_prompt
from infer.cli.sampling_options import (
    given_values,
    is_given,
    logprobs_options,
    merge_params,
    model_defaults,
    own_params,
    sampling_options,
)
from infer.cli.serve_options import deploy_options, serve_options
from infer.cli.spelling import Command, what_to_type
from infer.cli.terminal import Spinner, exit_on_signal
from infer.sampling.defaults import neutral_values
from infer.sampling_params import SamplingParams
from infer.system.status_line import silence


@dataclass
class Invocation:
    """The values that a command passes to `main`."""

    verbose: bool = False
    exit_status: int = 0


class Commands(click.Group):
    """A group of commands that suggests one for an unknown word."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(what_to_type(args[0], self.commands), ctx)
        return super().resolve_command(ctx, args)


def _show_version(*, with_machine: bool) -> None:
    """Print the version, and with `with_machine` also the machine.

    The package's version is read only on demand, because that takes a fifth of the time of --help.
    """
    if not with_machine:
        click.echo(f"infer {package.__version__}")
        return
    from infer.cli.version import version_lines

    for line in version_lines():
        click.echo(line)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--version", "is_version", is_flag=True, help="Show the version; with -v also the machine, for reports.")
@click.option("-v", "--verbose", is_flag=True, hidden=True)
@click.pass_context
def infer(context: click.Context, /, is_version: bool, verbose: bool) -> None:
    """Run open-weight language models: exact, fast, readable."""
    if is_version:
        _show_version(with_machine=verbose)
        context.exit()
    if verbose and context.invoked_subcommand is not None:
        raise click.UsageError(f"-v belongs after the command: infer {context.invoked_subcommand} -v", context)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@infer.command()
@prompt_options
@prompts_options
@constraint_options
@sampling_options(has_length=True)
@logprobs_options
@path_options
@model_options
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout instead of text: one object an answer.")
@click.option(
    "--json-lines",
    "as_lines",
    is_flag=True,
    help="One JSON object a token as it comes, then the result; of many prompts each result as it ends.",
)
@click.option(
    "--permalink", is_flag=True, help="On stderr a link to this answer, for infer replay and the server's page."
)
@click.pass_context
def generate(context: click.Context, /, **options: Any) -> None:
    """Continue a PROMPT, or a text on stdin. The text goes to stdout as it comes, times to stderr."""
    invocation = _invocation(context, options)
    check_constraints(context)
    if options["logprobs"] is not None and not (options["as_json"] or options["as_lines"]):
        raise click.UsageError("--logprobs needs --json or --json-lines")
    if options["permalink"] and (options["prompts_file"] is not None or options["overflow"] != "error"):
        raise click.UsageError(
            "--permalink is of one prompt, and of the whole of it: leave out --prompts-file, --overflow"
        )
    given, neutral = given_values(context, options), neutral_values(is_chat=options["chat"])
    params = SamplingParams.from_mapping({**neutral, **given})
    check_options(options, [params])
    check_grammar(params)
    prompt = one_prompt(options)
    asked = [] if options["prompts_file"] is None else many_prompts(options["prompts_file"], options)
    own = own_params(asked, given, neutral, {})
    if own:
        check_options(options, own)
    for each in own:
        check_grammar(each)
    from infer.cli.answers import answer_many, answer_one

    model = load_model(context, options)
    defaults = model_defaults(model, options)
    params = merge_params(defaults, given, is_chat=options["chat"], quiet=options["quiet"])
    if asked:
        own = own_params(asked, given, neutral, defaults)
        invocation.exit_status = answer_many(model, [each.prompt for each in asked], own, options)
    else:
        invocation.exit_status = answer_one(model, prompt, params, options)


@infer.command()
@batch_options
@sampling_options(has_length=True)
@model_options
@click.pass_context
def batch(context: click.Context, /, **options: Any) -> None:
    """Answer a file of rows, {"id": …, "prompt": …} or OpenAI's batch format, into a file of lines.

    Lines come as answers end. Run again after it was stopped or killed, it answers what has no line yet. A row without
    a seed has one made of --seed and its id: the same row gets the same line, however often and with how many workers.
    """
    invocation = _invocation(context, options)
    given = {name: value for name, value in given_values(context, options).items() if name != "seed"}
    check_options(options, [SamplingParams.from_mapping(given)])
    from infer.cli.batch import run_batch

    invocation.exit_status = run_batch(options, given, partial(load_model, context, options), load_arguments(options))


@infer.command()
@model_argument
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--plain", is_flag=True, help="Answers without styles for their Markdown.")
@sampling_options(has_length=True)
@model_options
@click.pass_context
def chat(context: click.Context, /, **options: Any) -> None:
    """Talk to a MODEL. /help lists the commands; lines may also come from a pipe.

    Without a model a terminal shows the choice; elsewhere the default answers.
    """
    invocation = _invocation(context, options)
    choose_model(context, options)
    from infer.cli.chat import run_chat

    invocation.exit_status = run_chat(options, given_values(context, options), partial(load_model, context))


@infer.command()
@click.argument("permalink")
@model_options
@click.pass_context
def replay(context: click.Context, /, **options: Any) -> None:
    """Answer a PERMALINK again: of generate --permalink, /link in a chat, or the server's page; - is stdin.

    Exit status 0: the answer is the same, 1: it is another one. Without -m its own model answers, if it is at hand.
    """
    invocation = _invocation(context, options)
    from infer.cli.option_files import read_text
    from infer.cli.permalink import read_permalink

    is_stdin = options["permalink"] == "-"
    link = read_permalink(read_text(Path("-"), "the permalink") if is_stdin else options["permalink"])
    with needs_extra():
        from infer.cli.replay import model_of, read_request, run_replay

    body = read_request(link)
    if not is_given(context, "model"):
        options["model"] = model_of(link, options["model"], quiet=options["quiet"])
    check_options(options, [])
    invocation.exit_status = run_replay(load_model(context, options), link, body, quiet=options["quiet"])


@infer.command()
@model_argument
@serve_options
@weight_options
@eviction_options
@running_options
@click.pass_context
def serve(context: click.Context, /, **options: Any) -> None:
    """Serve a MODEL over HTTP, as OpenAI's API. SIGTERM and Ctrl-C drain: a second one ends at once.

    Without a model a terminal shows the choice; elsewhere the default is served.
    """
    invocation = _invocation(context, options)
    choose_model(context, options)
    check_options(options, [])
    with needs_extra():
        from infer.cli.serve import run_serve

    invocation.exit_status = run_serve(options, partial(load_for_server, options))


@infer.group(name="ray", cls=click.Group)
def ray_group() -> None:
    """Several replicas on one machine or many, placed and watched by Ray."""


@ray_group.command(cls=Command)
@model_argument
@deploy_options
@weight_options
@eviction_options
@running_options
@click.pass_context
def deploy(context: click.Context, /, **options: Any) -> None:
    """Serve a MODEL as a Ray Serve application, on the cluster of $RAY_ADDRESS, or the one that runs here.

    Where none runs, one of this machine alone is started, and ends with Ctrl-C or SIGTERM.
    """
    invocation = _invocation(context, options)
    take_named(context, options)
    check_options(options, [])
    with needs_extra():
        from infer.cli.ray import run_deploy

    invocation.exit_status = run_deploy(options, served_arguments(options))


@infer.command()
@prompt_options
@click.option("--step", type=AT_LEAST_1, default=1, show_default=True, help="Which token; 1 follows the prompt.")
@click.option("--num-candidates", type=click.IntRange(1, 50), default=10, show_default=True, help="Tokens to show.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw it as well.")
@sampling_options(has_length=False)
@model_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table.")
@click.pass_context
def sample_trace(context: click.Context, /, **options: Any) -> None:
    """Show how one token is sampled: the candidates after each stage, and the probability that it removed."""
    _invocation(context, options)
    given = given_values(context, options)
    check_options(options, [SamplingParams.from_mapping({**neutral_values(is_chat=options["chat"]), **given})])
    from infer.cli.trace import check_plot, run_trace

    check_plot(options["plot"])
    prompt = one_prompt(options)
    model = load_model(context, options)
    params = merge_params(
        model_defaults(model, options), given, is_chat=options["chat"], quiet=options["quiet"] or options["as_json"]
    )
    run_trace(model, prompt, params, options)


@infer.command()
@model_argument
@weight_options
@cache_options
@device_option
@click.option("-p", "--prompt-tokens", type=AT_LEAST_1, default=512, show_default=True, help="Tokens to prefill.")
@click.option("-n", "--num-tokens", type=AT_LEAST_1, default=128, show_default=True, help="Tokens to decode.")
@click.option("--context", type=AT_LEAST_1, help="Tokens before the decoded ones.  [default: as --prompt-tokens]")
@click.option("--repeats", type=AT_LEAST_1, default=3, show_default=True, help="Measured runs, after a warm-up.")
@click.option("--profile", is_flag=True, help="The time of each operation and layer instead, as a table and bars.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with an error.")
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> None:
    """Measure a MODEL here: prefill, decode, latency, memory, and the share of the memory's speed."""
    _invocation(context, options)
    take_named(context, options)
    check_options(options, [])
    with kernels_ahead(options, options["device"]):
        with exit_on_signal(), Spinner("loading"):
            from infer.cli.bench import run_bench

        run_bench(options)


@infer.command()
@click.argument("model", default="smollm2")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of lines.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with an error.")
@click.pass_context
def explain(context: click.Context, /, **options: Any) -> None:
    """Say what a model is: its layers, tokenizer, defaults and memory, from its headers alone."""
    _invocation(context, options)
    from infer.cli.explain import run_explain

    run_explain(options["model"], as_json=options["as_json"])


@infer.command()
@click.argument("model", default="smollm2")
@click.option(
    "--max-seq-len",
    type=AT_LEAST_1,
    help="Tokens of a row.  [default: the model's own, at most 8192]",
)
@click.option("--batch", type=AT_LEAST_1, default=1, show_default=True, help="Rows of the cache.")
@click.option("--pool-pages", type=AT_LEAST_1, help="Pages of 64 tokens that the rows share.  [default: all rows full]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@cache_options
@number_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of lines.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with an error.")
@click.pass_context
def estimate(context: click.Context, /, **options: Any) -> None:
    """Say what a model and its cache take in memory, whether they fit here, and how fast it will be, from headers."""
    _invocation(context, options)
    from infer.cli.estimate import run_estimate

    run_estimate(options)


@infer.command(name="compile")
@click.argument("model", default="smollm2")
@click.option("--all", "is_all", is_flag=True, help="For every kv type and precision, not just the usual ones.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with an error.")
@click.pass_context
def compile_kernels(context: click.Context, /, **options: Any) -> None:
    """Compile the CPU kernels that a model needs, so that its first use does not: for images and Dockerfiles."""
    _invocation(context, options)
    with exit_on_signal():
        from infer.cli.compile import run_compile

        run_compile(options["model"], is_all=options["is_all"])


@infer.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout instead of a table.")
@click.option("-v", "--verbose", is_flag=True, help="What --device may name besides; a traceback with an error.")
@click.pass_context
def models(context: click.Context, /, **options: Any) -> None:
    """List the models at hand: installed packages, the hub's local cache, and the folder $INFER_MODELS."""
    _invocation(context, options)
    from infer.cli.models import run_models

    run_models(as_json=options["as_json"], with_devices=options["verbose"])


def _invocation(context: click.Context, options: Mapping[str, Any]) -> Invocation:
    invocation = context.ensure_object(Invocation)
    invocation.verbose = options["verbose"]
    silence(options.get("quiet", False))
    context.call_on_close(partial(silence, False))  # of this command alone
    return invocation
