"""The group of all commands.

Every sampling option has the name of its field in `SamplingParams`. The command line takes precedence over the model's
values, and these over the defaults shown in the help.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import Any

import click

import infer as package
from infer.cli import command_options, model_loading, prompts, server_options
from infer.cli.option_fields import TolerantCommand, takes_options, what_to_type
from infer.cli.option_files import MAX_PROMPTS_BYTES, check_writable, read_text, read_texts
from infer.cli.process_streams import exit_on_signal
from infer.cli.terminal import Spinner
from infer.compute.sampling.keywords import default_params
from infer.sampling_params import CONSTRAINTS, SamplingParams


class Commands(click.Group):
    """A group of commands that suggests one for an unknown word."""

    command_class = TolerantCommand

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is None and not cmd_name.startswith("-"):
            raise click.UsageError(what_to_type(cmd_name, self.commands), ctx)
        return command


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
        click.echo(f"infer {package.__version__}")  # read only here, because that takes a fifth of the time of --help
        if verbose:
            from infer.cli.commands.models_command import version_lines

            click.echo("\n".join(version_lines()))
        context.exit()
    if verbose and context.invoked_subcommand is not None:
        raise click.UsageError(f"-v belongs after the command: infer {context.invoked_subcommand} -v", context)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _command(run: Callable[[click.Context, Any], int | None]) -> click.Command:
    """Add the command that a function runs. Its options are those of the class that the function takes."""
    return infer.command()(takes_options(get_annotations(run)["options"])(run))


def _add(
    name: str, kind: type, path: str, arguments: Callable[[Any], tuple[Any, ...]] = lambda options: (options,)
) -> None:
    """Add a command that calls the function at a path in `commands`. Ctrl-C ends the imports immediately.

    `arguments` returns the arguments of the function, before the imports.
    """

    def run(context: click.Context, options: Any) -> int | None:
        given = arguments(options)
        module, _, function = path.partition(".")
        with exit_on_signal():
            imported = import_module(f"infer.cli.commands.{module}")
        status: int | None = getattr(imported, function)(*given)
        return status

    infer.command(name)(takes_options(kind)(run))


@_command
def generate(context: click.Context, options: command_options.GenerateOptions) -> int:
    """Continue a PROMPT, or a text on stdin. The text goes to stdout while it is generated, the times to stderr."""
    prompts.refuse_several([f"--{name.replace('_', '-')}" for name in CONSTRAINTS if prompts.is_given(context, name)])
    if options.logprobs is not None and not (options.as_json or options.as_lines):
        raise click.UsageError("--logprobs needs --json or --json-lines")
    if options.permalink and (options.prompts_file is not None or options.overflow != "error"):
        raise click.UsageError("--permalink needs one whole prompt: leave out --prompts-file and --overflow")
    given = prompts.given_values(context)
    model_loading.check_options(options, [default_params({}, given, is_chat=options.chat)])
    prompt = prompts.one_prompt(options, prompts_file=options.prompts_file)
    asked = [] if options.prompts_file is None else prompts.many_prompts(options.prompts_file, options)
    own = prompts.own_params(asked, given, {}, is_chat=options.chat)
    if own:
        model_loading.check_options(options, own)
    from infer.cli.commands.generate_command import answer_many, answer_one

    model = model_loading.load_model(options)
    defaults = prompts.model_defaults(model, context.params)
    params = prompts.merge_params(defaults, given, is_chat=options.chat, quiet=options.quiet)
    if not asked:
        return answer_one(model, prompt, params, options)
    own = prompts.own_params(asked, given, defaults, is_chat=options.chat)
    return answer_many(model, [each.prompt for each in asked], own, options)


@_command
def batch(context: click.Context, options: command_options.BatchOptions) -> int:
    """Answer a file of rows, {"id": …, "prompt": …} or OpenAI's batch format, into a file of lines.

    Each line is written when its answer ends. If the command was stopped or killed, run it again: it answers the rows
    that have no line. A row without a seed gets one made from --seed and its id, so the same row always gets the same
    line, with any number of workers.
    """
    given = {name: value for name, value in prompts.given_values(context).items() if name != "seed"}
    model_loading.check_options(options, [SamplingParams.from_mapping(given)])
    from infer.cli.commands.text_commands import run_batch

    return run_batch(options, given, partial(model_loading.load_model, options))


@_command
def perplexity(context: click.Context, options: command_options.PerplexityOptions) -> None:
    """Measure how well a MODEL predicts a text, as llama.cpp does."""
    options = model_loading.take_named(context, options)
    model_loading.check_options(options, [])
    from infer.cli.commands.quality_commands import run_perplexity

    text = read_text(options.text, "the text", MAX_PROMPTS_BYTES)
    run_perplexity(model_loading.load_model(options), text, options)


@_command
def compare(context: click.Context, options: command_options.CompareOptions) -> None:
    """Measure how far the predictions of a MODEL are from those of a REFERENCE, over a text.

    Without MODEL, it is the reference with the given options. The options do not apply to the reference itself.
    """
    options = model_loading.take_named(context, options)
    if not (options.named or prompts.is_given(context, "model")):
        options = replace(options, model=options.reference)
    from infer.cli.commands.quality_commands import reference_options, run_compare

    check_writable(options.html, "the page ")
    plain = reference_options(context, options)
    model_loading.check_options(plain, [])
    model_loading.check_options(options, [])
    text = read_text(options.text, "the text", MAX_PROMPTS_BYTES)
    run_compare(model_loading.load_model(plain), model_loading.load_model(options), text, options)


@_command
def chat(context: click.Context, options: command_options.ChatOptions) -> int:
    """Talk to a MODEL. /help lists the commands; messages may also come from a pipe.

    Without a MODEL, a terminal shows the models to choose from; otherwise the default answers.
    """
    options = model_loading.choose_model(context, options)
    from infer.cli.chat_loop import run_chat

    return run_chat(options, prompts.given_values(context), model_loading.load_model)


@_command
def replay(context: click.Context, options: command_options.ReplayOptions) -> int:
    """Answer a PERMALINK again, from generate --permalink, /link in a chat, or the server's page; - is stdin.

    Exit status: 0 if the answer is the same, 1 if it differs. Without -m the link's own model answers, if it is on this
    machine.
    """
    from infer.cli.commands.replay_command import model_of, read_permalink, read_request, run_replay

    is_stdin = options.permalink == "-"
    link = read_permalink(read_text(Path("-"), "the permalink") if is_stdin else options.permalink)
    body = read_request(link)
    if not prompts.is_given(context, "model"):
        options = replace(options, model=model_of(link, options.model))
    model_loading.check_options(options, [])
    return run_replay(model_loading.load_model(options), link, body)


@_command
def serve(context: click.Context, options: server_options.ServeOptions) -> int:
    """Serve one MODEL or several over HTTP, with OpenAI's API. SIGTERM and Ctrl-C drain; a second one ends it now.

    Without a MODEL, a terminal shows the models to choose from; otherwise the default is served. Several models share
    the memory of --memory: each is loaded at the start or for its first request.
    """
    options = model_loading.choose_models(context, options)
    is_shelf = options.listen_fd is None and options.serves_several
    if not is_shelf:
        model_loading.check_options(options, [])
    with model_loading.needs_extra():
        from infer.cli.commands.serve_command import run_models, run_serve

    return run_models(options) if is_shelf else run_serve(options)


@infer.group(name="ray", cls=click.Group)
def ray_group() -> None:
    """Run several replicas on one machine or many, placed and watched by Ray."""


@ray_group.command(cls=TolerantCommand)
@takes_options(server_options.DeployOptions)
def deploy(context: click.Context, options: server_options.DeployOptions) -> int:
    """Serve a MODEL as a Ray Serve application, on the cluster of $RAY_ADDRESS or on the running one here.

    If no cluster runs, one is started on this machine only. It ends with Ctrl-C or SIGTERM.
    """
    options = model_loading.take_named(context, options)
    model_loading.check_options(options, [])
    with model_loading.needs_extra():
        from infer.cli.commands.serve_command import run_deploy

        return run_deploy(options)


class PassingCommand(TolerantCommand):
    """A command that passes the words after `--` on, in its argument `arguments`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        ctx.params["arguments"] += tuple(args[end + 1 :])
        return rest


@infer.command(cls=PassingCommand)
@takes_options(server_options.LaunchOptions)
def launch(context: click.Context, options: server_options.LaunchOptions) -> int:
    """Run a coding agent with a model of the server at --url, or of a server that runs as long as the agent.

    The words after -- are arguments of the agent. The exit status is the agent's.
    """
    from infer.cli.commands.server_commands import run_launch

    return run_launch(options, lambda: model_loading.chosen_or_default(context, server_options.DEFAULT_MODEL))


@_command
def sample_trace(context: click.Context, options: command_options.TraceOptions) -> None:
    """Show how one token is sampled: the candidates after each stage, and the probability that the stage removed."""
    given = prompts.given_values(context)
    model_loading.check_options(options, [default_params({}, given, is_chat=options.chat)])
    from infer.cli.commands.generate_command import run_trace

    prompt = prompts.one_prompt(options)
    model = model_loading.load_model(options)
    defaults, quiet = prompts.model_defaults(model, context.params), options.quiet or options.as_json
    run_trace(model, prompt, prompts.merge_params(defaults, given, is_chat=options.chat, quiet=quiet), options)


@_command
def bench(context: click.Context, options: command_options.BenchOptions) -> None:
    """Measure a MODEL here: prefill, decode, latency, memory, and the share of the memory's speed."""
    model_loading.check_suite(context)
    options = model_loading.take_named(context, options)
    model_loading.check_options(options, [])
    from infer.models.compile_ahead import compiling_ahead

    with compiling_ahead(options.model, options.settings):
        with exit_on_signal(), Spinner("loading"):
            from infer.cli.commands.bench_command import run_bench

        run_bench(options)


def _with_texts(options: Any) -> tuple[Any, ...]:
    model_loading.check_options(options, [])
    texts = read_texts(options.source)
    return model_loading.load_model(options), texts, options


# The commands that only call one function, which is imported when it is called. Most are about files and servers.
_add("embed", command_options.EmbedOptions, "text_commands.run_embed", _with_texts)
_add("rerank", command_options.RerankOptions, "text_commands.run_rerank", _with_texts)
_add("classify", command_options.ClassifyOptions, "text_commands.run_classify", _with_texts)
_add("explain", command_options.ExplainOptions, "explain_command.run_explain")
_add("doctor", command_options.DoctorOptions, "quality_commands.run_doctor")
_add("quantize", command_options.QuantizeOptions, "quantize_command.run_quantize")
_add("imatrix", command_options.ImatrixOptions, "quantize_command.run_imatrix")
_add("estimate", command_options.EstimateOptions, "explain_command.run_estimate")
_add("compile", command_options.CompileOptions, "models_command.run_compile")
_add("models", command_options.ListOptions, "models_command.run_models")
_add("list", command_options.ListOptions, "models_command.run_models")
_add("pull", command_options.PullOptions, "models_command.run_pull")
_add("rm", command_options.RemovalOptions, "models_command.run_rm")
_add("ps", server_options.RunningServerOptions, "server_commands.run_ps")
_add("stop", server_options.StopOptions, "server_commands.run_stop")
