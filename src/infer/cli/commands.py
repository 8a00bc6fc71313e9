"""The commands and their options. Every sampling option bears the name of its field in `SamplingParams`.

A value given on the command line goes before one from the model, which goes before the default shown in the help.
"""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from infer import __version__
from infer.cli.model import Model
from infer.cli.options import (
    apply_options,
    cache_options,
    cache_values,
    check_constraints,
    constraint_options,
    path_options,
    prompt_options,
    prompts_option,
    template_options,
)
from infer.cli.prompts import Asked, many_prompts, one_prompt
from infer.cli.terminal import Spinner, exit_on_signal, keeping_garbage
from infer.errors import InvalidRequestError
from infer.params import CONSTRAINTS, PARAMETER_NAMES, SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])
DEFAULT_MAX_SEQ_LEN = 2048
AT_LEAST_1 = click.IntRange(min=1)


@dataclass
class Invocation:
    """What a command tells `main`."""

    verbose: bool = False
    exit_status: int = 0


class Commands(click.Group):
    """A group that says what was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(self.commands))}"
            raise click.UsageError(f"no such command {args[0]!r}: {known}", ctx)
        return super().resolve_command(ctx, args)


def parse_bias(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    bias_by_id = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            bias_by_id[int(token_id)] = float(bias)
        except ValueError:
            message = f"{value!r} is not ID=VALUE, as in 1234=-5 or 1234=-inf"
            raise click.BadParameter(message, context, option) from None
    return bias_by_id


def weight_options(function: Function) -> Function:
    """What a model is and in which numbers it runs."""
    options = [
        click.option("--model", default="smollm2", show_default=True, metavar="NAME|PATH",
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
        click.option("--threads", type=int, help="Threads to compute with.  [default: all cores]"),
        click.option("--precision", type=click.Choice(["exact", "fast"]), default="exact", show_default=True,
                     help="Of activations beside quantised weights, on a CPU: 16 bits or 8."),
        click.option("--weights", type=weights, default="auto", show_default=True,
                     help="Quantise float weights at load; auto: as the file stores them."),
        click.option("--dtype", type=dtypes, default="auto", show_default=True,
                     help="Dequantise at load; auto: as the file stores it."),
    ]  # fmt: skip
    return apply_options(options, function)


def model_options(function: Function) -> Function:
    options = [
        weight_options,
        cache_options,
        click.option("--max-seq-len", type=int, default=DEFAULT_MAX_SEQ_LEN, show_default=True,
                     help="Prompt and answer together, in tokens; the default is cut to what the model can do."),
        click.option("--backend", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
        click.option("--no-capture", is_flag=True, help="Run each operation by itself: slower, with the same tokens."),
        template_options,
        click.option("--no-generation-config", is_flag=True, help="Ignore the sampling values that the model brings."),
        click.option("-q", "--quiet", is_flag=True, help="Nothing but the text."),
        click.option("-v", "--verbose", is_flag=True, help="Counts, seed and reason; a traceback with an error."),
    ]  # fmt: skip
    return apply_options(options, function)


def sampling_options(num_tokens: int | None) -> Callable[[Function], Function]:
    """All of document 003's table; only the number of tokens differs between commands, None for those that fix it."""
    length = [
        click.option("-n", "--num-tokens", "max_new_tokens", type=int, default=num_tokens, show_default=True,
                     help="Tokens to generate at most."),
    ]  # fmt: skip
    options = [
        *(() if num_tokens is None else length),
        click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy."),
        click.option("--top-p", type=float, default=0.9, show_default=True, help="1 is off."),
        click.option("--top-k", type=int, default=40, show_default=True, help="0 is off."),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="0 is off."),
        click.option("--repetition-penalty", type=float, default=1.1, show_default=True, help="1 is off."),
        click.option("--repetition-window", type=int, default=64, show_default=True,
                     help="The last N tokens; -1 is all, 0 none."),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True),
        click.option("--logit-bias", callback=parse_bias, multiple=True, metavar="ID=VALUE",
                     help="Added to a token's logit; -inf bans, inf forces. Repeatable."),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text. Repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the end of text."),
        click.option("--seed", type=int, help="Repeat a run.  [default: drawn, shown with -v]"),
    ]  # fmt: skip
    return lambda function: apply_options(options, function)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="infer", message="%(prog)s %(version)s")
@click.pass_context
def infer(context: click.Context, /) -> None:
    """Run open-weight language models: exact, fast, readable."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@infer.command()
@prompt_options
@prompts_option
@constraint_options
@sampling_options(num_tokens=20)
@path_options
@model_options
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout instead of text: one object an answer.")
@click.pass_context
def generate(context: click.Context, /, **options: Any) -> None:
    """Continue a prompt. The text goes to stdout as it comes, times to stderr."""
    invocation = _invocation(context, options)
    check_constraints(context)
    table, given = _sampling_values(context, options)
    check_grammar(SamplingParams.from_mapping(table | given))
    prompt = one_prompt(options)
    asked = [] if options["prompts_file"] is None else many_prompts(options["prompts_file"], options)
    for each in own_params(asked, table, given):
        check_grammar(each)
    from infer.cli.answers import answer_many, answer_one

    model = load_model(context, options)
    defaults = model_defaults(model, options)
    params = merge_params(table, defaults, given, quiet=options["quiet"])
    if asked:
        own = own_params(asked, {**table, **defaults}, given)
        invocation.exit_status = answer_many(model, [each.prompt for each in asked], own, options)
    else:
        invocation.exit_status = answer_one(model, prompt, params, options)


@infer.command()
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@sampling_options(num_tokens=512)
@model_options
@click.pass_context
def chat(context: click.Context, /, **options: Any) -> None:
    """Talk to a model. /help lists what can be said besides; lines may also come from a pipe."""
    invocation = _invocation(context, options)
    table, given = _sampling_values(context, options)
    SamplingParams.from_mapping(table | given)
    from infer.cli.chat import ChatSession, converse

    model = load_model(context, options)
    if not model.can_chat:
        raise InvalidRequestError(
            f"the model {options['model']} has no chat template: continue plain text with infer generate, or take an "
            "instruct version of the model"
        )
    params = merge_params(table, model_defaults(model, options), given, quiet=options["quiet"])
    session = ChatSession(model, options["model"], params, system=options["system"])
    invocation.exit_status = converse(session, quiet=options["quiet"])


@infer.command()
@click.argument("text", metavar="[PROMPT]", required=False)
@prompt_options
@click.option("--step", type=AT_LEAST_1, default=1, show_default=True, help="Which token; 1 follows the prompt.")
@click.option("--num-candidates", type=click.IntRange(1, 50), default=10, show_default=True, help="Tokens to show.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw it as well.")
@sampling_options(num_tokens=None)
@model_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table.")
@click.pass_context
def sample_trace(context: click.Context, /, **options: Any) -> None:
    """Show how one token is sampled: the candidates after each stage, and the probability that it removed."""
    _invocation(context, options)
    table, given = _sampling_values(context, options)
    SamplingParams.from_mapping(table | given)
    prompt = one_prompt(options)
    from infer.cli.trace import check_plot, run_trace

    check_plot(options["plot"])
    model = load_model(context, options)
    params = merge_params(table, model_defaults(model, options), given, quiet=options["quiet"])
    run_trace(model, prompt, params, options)


@infer.command()
@weight_options
@cache_options
@click.option("-p", "--prompt-tokens", type=AT_LEAST_1, default=512, show_default=True, help="Tokens to prefill.")
@click.option("-n", "--num-tokens", type=AT_LEAST_1, default=128, show_default=True, help="Tokens to decode.")
@click.option("--context", type=AT_LEAST_1, help="Tokens before the decoded ones.  [default: as --prompt-tokens]")
@click.option("--repeats", type=AT_LEAST_1, default=3, show_default=True, help="Measured runs, after a warm-up.")
@click.option("--profile", is_flag=True, help="The time of each operation and layer instead, as a table and bars.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with an error.")
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> None:
    """Measure a model here: prefill, decode, latency, memory, and the share of the memory's speed."""
    _invocation(context, options)
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
    default=DEFAULT_MAX_SEQ_LEN,
    show_default=True,
    help="Tokens of a row; the default is cut to what the model can do.",
)
@click.option("--batch", type=AT_LEAST_1, default=1, show_default=True, help="Rows of the cache.")
@cache_options
@number_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of lines.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with an error.")
@click.pass_context
def estimate(context: click.Context, /, **options: Any) -> None:
    """Say what a model and its cache take in memory, and whether they fit here, from headers alone."""
    _invocation(context, options)
    from infer.cli.estimate import run_estimate

    run_estimate(options, is_default_context=not _is_given(context, "max_seq_len"))


@infer.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout instead of a table.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with an error.")
@click.pass_context
def models(context: click.Context, /, **options: Any) -> None:
    """List the models at hand: installed packages, the hub's local cache, and the folder $INFER_MODELS."""
    _invocation(context, options)
    from infer.cli.models import run_models

    run_models(as_json=options["as_json"])


def load_model(context: click.Context, options: Mapping[str, Any]) -> Model:
    """The LLM that the options ask for. A default context longer than the model's own is cut to it."""
    spinner = Spinner(f"loading {options['model']}", shown=not options["quiet"])
    with exit_on_signal(), keeping_garbage(), spinner:
        from infer.llm import LLM

        def load(max_seq_len: int | None) -> LLM:
            return LLM(
                options["model"],
                device=options["backend"],
                dtype=options["dtype"],
                weights=options["weights"],
                precision=options["precision"],
                **cache_values(options),
                capture=not options["no_capture"],
                max_seq_len=max_seq_len,
                threads=options["threads"],
                chat_template=options["chat_template"],
                allow_special=options["allow_special"],
                on_progress=spinner.progress,
            )

        try:
            return load(options["max_seq_len"])
        except InvalidRequestError as error:
            if _is_given(context, "max_seq_len") or "max_seq_len" not in str(error):
                raise
            return load(None)


def model_defaults(model: Model, options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {} if options["no_generation_config"] else model.sampling_defaults


def merge_params(
    table: Mapping[str, Any], from_model: Mapping[str, Any], given: Mapping[str, Any], *, quiet: bool
) -> SamplingParams:
    """The parameters, and one line on stderr that says which of them the model brought."""
    used = {name: value for name, value in from_model.items() if name not in given}
    try:
        params = SamplingParams.from_mapping({**table, **used, **given})
    except InvalidRequestError as error:
        raise InvalidRequestError(f"from the model's own defaults: {error} (--no-generation-config)") from error
    if used and not quiet:
        shown = ", ".join(f"{name} {value}" for name, value in used.items())
        print(f"from the model: {shown} (--no-generation-config ignores them)", file=sys.stderr)
    return params


def own_params(asked: Sequence[Asked], table: Mapping[str, Any], given: Mapping[str, Any]) -> list[SamplingParams]:
    """For each of many prompts: what stands beside it goes before the command line."""
    own = []
    for each in asked:
        try:
            own.append(SamplingParams.from_mapping({**table, **given, **each.values}))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{each.where}: {error}") from error
    return own


def check_grammar(params: SamplingParams) -> None:
    """What is wrong with a schema, pattern or grammar as a text is told before a model is loaded."""
    if all(getattr(params, name) is None for name in CONSTRAINTS):
        return
    from infer.constraint import grammar_of
    from infer.constraint.compiler import check

    grammar = grammar_of(params)
    if grammar is not None:
        check(grammar)


def _invocation(context: click.Context, options: Mapping[str, Any]) -> Invocation:
    invocation = context.ensure_object(Invocation)
    invocation.verbose = options["verbose"]
    return invocation


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)


def _sampling_values(context: click.Context, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the table of defaults says, and what the command line says, in the names of SamplingParams."""
    values = {name: options[name] for name in PARAMETER_NAMES if name in options}
    if values["repetition_window"] == -1:
        values["repetition_window"] = None
    given = {name: value for name, value in values.items() if _is_given(context, name)}
    return values, given
