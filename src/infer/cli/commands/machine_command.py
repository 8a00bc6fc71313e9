"""`infer doctor --machine`: the processor, the memory, the kernels, the extras, and the models that fit."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infer.cli.command_options import DoctorOptions
from infer.cli.model_loading import ModelOffer, offer_at_hand
from infer.cli.process_streams import exit_on_signal
from infer.cli.terminal import Spinner, columns_of_rows, print_report
from infer.models.catalog.models_at_hand import models_at_hand
from infer.system.available_memory import available_memory_bytes, read_bandwidth, total_memory_bytes
from infer.system.cores import default_num_threads, num_processors, processor_name
from infer.system.spellings import install_extra

_MODULES_BY_EXTRA = {
    "chat": "prompt_toolkit",
    "serve": "starlette",
    "hub": "huggingface_hub",
    "opencl": "pyopencl",
    "triton": "triton",
    "ray": "ray",
    "xgrammar": "xgrammar",
}
_HEADS = ("model", "needs", "fits", "tokens per second")


def run_machine(options: DoctorOptions) -> None:
    """Write what this machine is, and what it can run."""
    with exit_on_signal(), Spinner("measuring"):
        facts = machine_record()
    print_report(facts, machine_lines(facts), as_json=options.as_json)


def machine_record() -> dict[str, Any]:
    """Return the facts that the command prints, with sizes in bytes and rates per second.

    The memory's speed is measured in a fraction of a second. Speeds of models are predicted from it.
    """
    import torch

    from infer.compute import ops

    backend, threads = ops.backend_of(torch.device("cpu")), default_num_threads()
    available = available_memory_bytes()
    at_hand = [each for each in models_at_hand() if each.problem is None]
    offers = [offer_at_hand(each.name, each.num_bytes, Path(each.path)) for each in at_hand]
    return {
        "processor": processor_name(),
        "threads": threads,
        "processors": num_processors(),
        "instruction_set": backend.instruction_set(),
        "memory_bytes": total_memory_bytes(),
        "available_bytes": available,
        "bytes_per_second": round(read_bandwidth(threads)),
        "kernels": backend.kernel_source(),
        "missing_extras": [extra for extra, module in _MODULES_BY_EXTRA.items() if find_spec(module) is None],
        "models": [_model_record(offer, available) for offer in offers],
    }


def _model_record(offer: ModelOffer, available: int | None) -> dict[str, Any]:
    fits = None if None in (offer.memory_bytes, available) else (offer.memory_bytes or 0) <= (available or 0)
    rate = None if offer.tokens_per_second is None else round(offer.tokens_per_second, 1)
    return {"name": offer.name, "memory_bytes": offer.memory_bytes, "fits": fits, "tokens_per_second": rate}


def machine_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the facts as lines of two columns, and then a table of models."""
    threads = f"{facts['threads']} threads on {facts['processors']} processors, {facts['instruction_set']}"
    memory = f"{_gigabytes(facts['available_bytes'])} of {_gigabytes(facts['memory_bytes'])} available"
    missing = facts["missing_extras"]
    fix = f"missing: {', '.join(missing)} ({install_extra(','.join(missing))})"
    rows = [
        ("processor", f"{facts['processor']}, {threads}"),
        ("memory", f"{memory}, read at {facts['bytes_per_second'] / 1e9:.1f} GB/s"),
        ("kernels", facts["kernels"]),
        ("extras", fix if missing else "all are installed"),
    ]
    yield from columns_of_rows(rows, "<<")
    yield ""
    yield from _model_lines(facts["models"])


def _model_lines(models: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not models:
        yield "no model is on this machine: infer models says how to get one"
        return
    answers = {True: "yes", False: "no", None: "unknown"}
    rows = [_HEADS]
    for each in models:
        rate = "" if each["tokens_per_second"] is None else f"{each['tokens_per_second']:,.0f}"
        needs = "" if each["memory_bytes"] is None else _gigabytes(each["memory_bytes"])
        rows.append((each["name"], needs, answers[each["fits"]], rate))
    yield from columns_of_rows(rows, "<><>")


def _gigabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"
