"""`infer estimate`: report the memory of a model and its cache, and if it fits here, as lines or as one JSON object."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import click

from infer.cli.options.command_options import EstimateOptions
from infer.compute.kvcache.groups import check_layers
from infer.errors import InvalidRequestError
from infer.files import open_checkpoint
from infer.models.catalog.model_forecast import tokens_per_second
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings, largest_types
from infer.models.tensors import check_tensors
from infer.system.cores.cores import check_num_threads, default_num_threads
from infer.system.memory.available_memory import available_memory_bytes, read_bandwidth


def run_estimate(options: EstimateOptions) -> None:
    checkpoint = open_checkpoint(options.model)
    architecture, tensors = make_architecture(checkpoint.config), checkpoint.tensors
    check_tensors(architecture, tensors)
    settings, cache = options.settings, options.settings.cache
    if settings.dtype != "auto" and settings.weights != "auto":
        raise InvalidRequestError("dtype and weights contradict each other: give one of them")
    check_layers(cache, architecture.mixers)
    num_tokens, own = context_length(options.max_seq_len, architecture, cache), architecture.most_positions
    threads = default_num_threads() if settings.threads is None else check_num_threads(settings.threads)
    load = LoadSettings.of(settings, threads, options.device)
    num_rows = None if options.batch == 1 else options.batch
    available = available_memory_bytes() if options.device == "cpu" else _free_on_gpu()
    budget = MemoryBudget.of(architecture, tensors, load, cache, num_tokens=num_tokens, pool_pages=options.pool_pages)
    found = replace(budget.with_step_that_fits(available), num_rows=num_rows)
    rest = 0 if available is None else available - found.process
    most = max(own, num_tokens)
    kv_type, generates = found.kv_type, not architecture.reads_whole_texts
    fits, option = None if available is None else found.total <= available, None
    if fits is False and options.batch == 1:
        option = found.option_that_fits(max(0, rest))
    on_host = load.device == "cpu"  # only the host's memory can be measured
    report = {
        "model": options.model,
        "max_seq_len": num_tokens,
        "batch": options.batch,
        "is_encoder": not generates,
        "device": options.device,
        "pool_pages": options.pool_pages,
        "kv_type": kv_type,
        "weight_bytes": found.weights,
        "weight_types": largest_types(architecture, found.types or {}, options.device),
        "cache_bytes": found.cache,
        "workspace_bytes": found.workspace,
        "step_tokens": found.load.step.tokens,
        "process_bytes": found.process,
        "total_bytes": found.total,
        "available_bytes": available,
        "tokens_per_second": tokens_per_second(architecture, tensors, load, kv_type) if on_host and generates else None,
        "read_bandwidth": read_bandwidth(threads) if on_host else None,
        "fits": fits,
        "option_that_fits": option,
        "largest_context": None if available is None else found.largest_context(rest, most),
    }
    click.echo(json.dumps(report, ensure_ascii=False) if options.as_json else "\n".join(lines(report)))


def _free_on_gpu() -> int | None:
    """Return the free memory of the first GPU in bytes, or None if there is no GPU.

    The size of a model can be estimated on a machine without a GPU.
    """
    import torch

    from infer.compute.ops import backend_of

    return backend_of(torch.device("cuda")).available_bytes() if torch.cuda.is_available() else None


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    rows = f"{report['batch']} row{'' if report['batch'] == 1 else 's'}"
    pool = "" if report["pool_pages"] is None else f" in {report['pool_pages']:,} pages"
    remarks = {
        "weights": f"as packed ({', '.join(report['weight_types'])}), with the tables of rotation",
        "cache": f"{rows} of {report['max_seq_len']:,} tokens{pool}, {report['kv_type']}",
        "workspace": f"of a step of {report['step_tokens']:,} tokens",
        "process": "Python, torch and the vocabulary",
    }
    if report["is_encoder"]:
        remarks["cache"] = f"two layers of a text of {report['max_seq_len']:,} tokens, {report['kv_type']}"
    if report["device"] == "cuda":
        del remarks["process"]  # it is in the host's memory, not in the GPU's
        remarks["workspace"] += ", twice, with kernels and the history of all rows"
    for name, remark in remarks.items():
        key = "weight_bytes" if name == "weights" else f"{name}_bytes"
        yield f"{name:<10}{report[key] / 1e6:>12,.1f} MB   {remark}"
    yield f"{'total':<10}{report['total_bytes'] / 1e6:>12,.1f} MB"
    if report["tokens_per_second"] is not None:
        remark = f"predicted for one answer, with memory read at {report['read_bandwidth'] / 1e9:.1f} GB/s"
        yield f"{'speed':<10}{report['tokens_per_second']:>12,.1f} tok/s   {remark}"
    if report["available_bytes"] is None:
        return
    verdict = "it fits" if report["fits"] else "it does not fit"
    most = report["largest_context"]
    longest = f"up to {most:,} tokens would" if most > 1 else "no context would fit: use a smaller quantisation"
    if (option := report["option_that_fits"]) is not None and not option.startswith("max_seq_len"):
        longest = option
    yield f"{'available':<10}{report['available_bytes'] / 1e6:>12,.1f} MB   {verdict}; {longest}"
