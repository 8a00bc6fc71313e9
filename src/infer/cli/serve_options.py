"""Options of `infer serve`."""

import click

from infer.cli.options import Function, apply_options
from infer.operands.limits import MAX_STEP_LOGITS


def serve_options(function: Function) -> Function:
    options = [
        click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at."),
        click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one."),
        click.option("--slots", type=click.IntRange(1, MAX_STEP_LOGITS), default=16, show_default=True,
                     help="Answers that are computed in one step."),
        click.option("--pool-pages", type=click.IntRange(min=1),
                     help="Pages of 64 tokens that all answers share.  [default: 8 full contexts']"),
    ]  # fmt: skip
    return apply_options(options, function)
