"""Options of `infer serve`, which become the fields of `ServerSettings`."""

from pathlib import Path

import click

from infer.cli.options import Function, apply_options
from infer.operands.limits import MAX_STEP_LOGITS

_SECONDS = click.FloatRange(min=0.1)
_COUNT = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)
MOST_REPLICAS = 64


def serve_options(function: Function) -> Function:
    options = [
        client_options,
        click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
                     help="A name served beside local ones, without keys on a loopback address. Repeatable; * is all."),
        click.option("--tls-cert", type=_FILE, metavar="FILE", help="A certificate: https."),
        click.option("--tls-key", type=_FILE, metavar="FILE", help="Its private key."),
        click.option("--isolate", is_flag=True,
                     help="The model in a process of its own, which is started again when it dies."),
        click.option("--replicas", type=click.IntRange(1, MOST_REPLICAS), default=1, show_default=True,
                     help="Processes with the model, each on cores of its own: when one dies, others go on."),
        click.option("--listen-fd", type=click.IntRange(min=0), hidden=True),  # of a replica: its socket
        engine_options,
        limit_options,
        click.option("--no-access-log", is_flag=True, help="No JSON line a request on stdout."),
    ]  # fmt: skip
    return apply_options(options, function)


def deploy_options(function: Function) -> Function:
    """Add the options of `infer ray deploy`."""
    options = [
        click.option("--replicas", type=_COUNT, default=1, show_default=True, help="Engines, each with the model."),
        click.option("--fronts", type=_COUNT, default=2, show_default=True,
                     help="Processes without a model that pass requests on: while one is started again, others serve."),
        click.option("--max-replicas", type=_COUNT,
                     help="Engines are added up to so many while more requests go on than they have slots."),
        click.option("--upscale-seconds", type=_SECONDS, default=10.0, show_default=True, metavar="SECONDS",
                     help="Of too many requests, before an engine is added."),
        click.option("--downscale-seconds", type=_SECONDS, default=300.0, show_default=True, metavar="SECONDS",
                     help="Of too few, before one is taken away."),
        client_options,
        engine_options,
        click.option("--drain-seconds", type=click.FloatRange(min=0), default=600.0, show_default=True,
                     help="At most, for answers under way of an engine or a front that is taken away."),
    ]  # fmt: skip
    return apply_options(options, function)


def client_options(function: Function) -> Function:
    """Add the options for who may send requests, to which address, and under which model name."""
    options = [
        click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at."),
        click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one."),
        click.option("--served-model-name", "served_names", multiple=True, metavar="NAME",
                     help="What clients call the model. Repeatable: others are aliases.  [default: that of --model]"),
        click.option("--embeddings", "allow_embeddings", is_flag=True,
                     help="Answer /v1/embeddings with a model that is not made for it."),
        click.option("--api-key-file", type=_FILE, metavar="FILE",
                     help="A key a line, or a name and a key: only who has one may ask."),
        click.option("--unknown-fields", type=click.Choice(["warn", "refuse", "ignore"]), default="warn",
                     show_default=True, help="Fields of a request that are not known here, and near none that is."),
        click.option("--agent-prompts", type=click.Choice(["adapt", "keep"]), default="adapt", show_default=True,
                     help="Claude Code's prompts: adapt moves what changes in each to the end, for prefix reuse."),
        click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN",
                     help="A page of this origin may call, such as https://example.org. Repeatable; * is all."),
    ]  # fmt: skip
    return apply_options(options, function)


def engine_options(function: Function) -> Function:
    """Add the options for how much is computed in one step, and for who has to wait."""
    options = [
        click.option("--slots", type=click.IntRange(1, MAX_STEP_LOGITS), default=16, show_default=True,
                     help="Answers that are computed in one step."),
        click.option("--pool-pages", type=_COUNT,
                     help="Pages of 64 tokens that all answers share.  [default: 8 full contexts']"),
        click.option("--step-ms", type=click.FloatRange(min=1), default=38.0, show_default=True, metavar="MILLISECONDS",
                     help="Of a step with prompts while answers are streamed: 98 of 100 take no longer."),
        click.option("--max-queue", type=_COUNT, default=512, show_default=True,
                     help="Answers of one key that may wait for a slot; more are refused."),
        click.option("--max-ttft", type=_SECONDS, default=30.0, show_default=True, metavar="SECONDS",
                     help="A request with more seconds of work ahead is refused."),
    ]  # fmt: skip
    return apply_options(options, function)


def limit_options(function: Function) -> Function:
    """Add the limits of what a client may send, and of the time that it may take."""
    options = [
        click.option("--max-body-bytes", type=_COUNT, default=2 * 2**20, show_default=True, help="Of a request."),
        click.option("--max-connections", type=_COUNT, default=1024, show_default=True, help="Open at once."),
        click.option("--header-seconds", type=_SECONDS, default=10.0, show_default=True, help="For a request's head."),
        click.option("--body-seconds", type=_SECONDS, default=30.0, show_default=True, help="For a request's body."),
        click.option("--keep-alive-seconds", type=_COUNT, default=75, show_default=True, help="Of an idle connection."),
        click.option("--reader-seconds", type=_SECONDS, default=60.0, show_default=True,
                     help="For a slow reader to take what was sent."),
        click.option("--drain-seconds", type=click.FloatRange(min=0), default=30.0, show_default=True,
                     help="For answers under way, after SIGTERM."),
        click.option("--watchdog-seconds", type=_SECONDS, default=120.0, show_default=True,
                     help="For a step: one that takes longer hangs, and the process ends with status 3."),
    ]  # fmt: skip
    return apply_options(options, function)
