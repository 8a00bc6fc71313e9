"""Options for the input of a generation, its constraints, and its path; commands combine groups of options."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from infer.cli.option_files import MAX_GRAMMAR_BYTES, read_text
from infer.engine.model_settings import Overflow
from infer.kvcache.settings import EVICTION_POLICIES, KV_TYPES, CacheSettings
from infer.operands.limits import MAX_STEP_LOGITS, MAX_STEP_TOKENS
from infer.request_limits import MAX_DRAFT_TOKENS, NUM_DRAFT_TOKENS
from infer.sampling_params import CONSTRAINTS

Function = TypeVar("Function", bound=Callable[..., Any])
BATCH_SIZE = 8
CACHE_OPTIONS = (
    "kv_type",
    "eviction_policy",
    "eviction_window",
    "protected_prefix",
    "memory_threshold_mb",
    "reuse_prefixes",
)


def apply_options(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


def prompt_options(function: Function) -> Function:
    options = [
        click.argument("words", nargs=-1, metavar="[PROMPT]"),
        click.option("-p", "--prompt", metavar="TEXT", help="The prompt; unlike PROMPT it leaves stdin unread."),
        click.option("--prompt-file", type=click.Path(path_type=Path), metavar="FILE",
                     help="Read the prompt from a file; - is stdin."),
        click.option("--chat", is_flag=True, help="Send the prompt as a user's message, in the model's chat template."),
        click.option("--system", metavar="TEXT", help="With --chat: a system message before it."),
    ]  # fmt: skip
    return apply_options(options, function)


def template_options(function: Function) -> Function:
    options = [
        click.option("--chat-template", type=click.Path(path_type=Path), metavar="FILE", callback=_read_file,
                     help="A Jinja template for conversations, in place of the model's own."),
        click.option("--allow-special", is_flag=True,
                     help="Control tokens written in a message are control; otherwise they are text."),
    ]  # fmt: skip
    return apply_options(options, function)


def prompts_options(function: Function) -> Function:
    options = [
        click.option("--prompts-file", type=click.Path(path_type=Path), metavar="FILE",
                     help="Many prompts at once: one a line, or JSON lines where the name ends in .jsonl, each a "
                     "string or an object of prompt and its own sampling parameters; - is stdin. Answers come in their "
                     "order, an empty line between them, or one JSON object a line with --json."),
        click.option("--batch-size", type=click.IntRange(1, MAX_STEP_LOGITS), default=BATCH_SIZE, show_default=True,
                     help="With --prompts-file: how many are answered at a time."),
        click.option("--overflow", type=click.Choice(get_args(Overflow)), default="error", show_default=True,
                     help="truncate_left: a prompt that is too long loses its beginning."),
    ]  # fmt: skip
    return apply_options(options, function)


def batch_options(function: Function) -> Function:
    options = [
        click.argument("source", type=click.Path(path_type=Path), metavar="IN.jsonl"),
        click.argument("output", type=click.Path(path_type=Path), metavar="OUT.jsonl"),
        click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True,
                     help="Processes, each with the model."),
        click.option("--batch-size", type=click.IntRange(1, MAX_STEP_LOGITS), default=16, show_default=True,
                     help="Rows that a process answers at a time."),
        click.option("--retry-errors", is_flag=True, help="Answer rows again whose line is an error."),
    ]  # fmt: skip
    return apply_options(options, function)


def constraint_options(function: Function) -> Function:
    """Add the constraints, of which at most one may be given."""
    options = [
        click.option("--json-schema", metavar="FILE", callback=_read_schema,
                     help="The answer must be JSON that this schema describes: a file, or the schema itself, {…}."),
        click.option("--regex", metavar="PATTERN", help="The answer must match this pattern as a whole."),
        click.option("--grammar", type=click.Path(path_type=Path), metavar="FILE", callback=_read_file,
                     help="The answer must follow this grammar in Lark's notation."),
        click.option("--choice", multiple=True, metavar="TEXT", callback=_or_none,
                     help="The answer must be one of these. Repeatable, or --choice yes no."),
    ]  # fmt: skip
    return apply_options(options, function)


def path_options(function: Function) -> Function:
    """Add the options that change how fast an answer is generated, but never its tokens."""
    options = [
        click.option("--speculation", type=click.Choice(["ngram"]),
                     help="Verify guesses several at a time: faster where the text repeats, with the same tokens."),
        click.option("--num-draft-tokens", "--draft-tokens", "draft_tokens", type=click.IntRange(1, MAX_DRAFT_TOKENS),
                     default=NUM_DRAFT_TOKENS, show_default=True,
                     help="With --speculation: guesses in one step, at most."),
        click.option("--prefill-chunk", type=click.IntRange(1, MAX_STEP_TOKENS), default=MAX_STEP_TOKENS,
                     show_default=True, help="Tokens of a prompt in one step."),
        click.option("--stats", is_flag=True, help="Which path ran, and what it did, on stderr."),
    ]  # fmt: skip
    return apply_options(options, function)


def cache_options(function: Function) -> Function:
    """Add the options that are fields of `CacheSettings`."""
    options = [
        eviction_options,
        click.option("--reuse-prefixes", is_flag=True,
                     help="What prompts begin with in common is read once; not with a policy."),
    ]  # fmt: skip
    return apply_options(options, function)


def eviction_options(function: Function) -> Function:
    """Add the options for how keys and values are stored, and which of them are evicted."""
    default = CacheSettings()
    options = [
        click.option("--kv-type", type=click.Choice(KV_TYPES), default=default.kv_type, show_default=True,
                     help="How keys and values are stored; auto: as suits the device and the weights."),
        click.option("--eviction-policy", type=click.Choice(EVICTION_POLICIES), default=default.eviction_policy,
                     show_default=True,
                     help="What is forgotten of a long text; sliding: all but its first and last tokens; "
                     "snapkv: of the prompt what its end does not look at, then as sliding."),
        click.option("--eviction-window", type=int, default=default.eviction_window, show_default=True,
                     help="With a policy: tokens that are kept, the protected ones among them."),
        click.option("--protected-prefix", type=int, default=default.protected_prefix, show_default=True,
                     help="With a policy: first tokens that are never forgotten."),
        click.option("--memory-threshold-mb", type=int, metavar="MB",
                     help="With a policy: forget only once the system has less memory than this available."),
    ]  # fmt: skip
    return apply_options(options, function)


def cache_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache options that a command has, as arguments of `LLM`."""
    return {name: options[name] for name in CACHE_OPTIONS if name in options}


def check_constraints(context: click.Context) -> None:
    """Raise UsageError for two constraints, with the names under which they were given."""
    given = [f"--{name.replace('_', '-')}" for name in CONSTRAINTS if context.params.get(name) is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} are both given: give one")


def _read_file(context: click.Context, option: click.Parameter, path: Path | None) -> str | None:
    what = f"the file of --{str(option.name).replace('_', '-')}"
    return None if path is None else read_text(path, what, MAX_GRAMMAR_BYTES)


def _read_schema(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Return the schema. A value that begins with a brace is the schema itself, any other names a file."""
    if value is None or value.lstrip().startswith("{"):
        return value
    return _read_file(context, option, Path(value))


def _or_none(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...] | None:
    return values or None
