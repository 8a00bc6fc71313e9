"""`infer explain` and `infer estimate`: a model and the memory that it needs, as lines for a terminal or as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from infer.cli.command_options import EstimateOptions, ExplainOptions
from infer.cli.terminal import columns_of_rows, counted, megabytes, print_report, q8_remark
from infer.compute.backends.before_load import kernel_kind
from infer.compute.kvcache.groups import ROW_STATES, check_layers
from infer.models.catalog.explanation import Explanation, explain
from infer.models.catalog.header_facts import tokens_per_second
from infer.models.compile_ahead import make_outline
from infer.models.draft_plan import plan_draft_bytes
from infer.models.families import open_network
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings, largest_types
from infer.system.available_memory import available_memory_bytes, read_bandwidth
from infer.system.cores import check_num_threads, default_num_threads

_WORDS = {
    "mixer": "{}",
    "feed_forward": "{}",
    "num_heads": "heads {:,}",
    "num_kv_heads": "kv heads {:,}",
    "head_dim": "head size {:,}",
    "intermediate_size": "mlp {:,}",
    "scale": "scale {:.5g}",
    "window": "window {:,}",
    "chunk": "chunks of {:,} tokens",
    "softcap": "softcap {:g}",
    "activation": "{}",
    "qk_norm": "q and k norms ({})",
    "per_layer_input": "per-layer inputs of {:,}",
}
_FLAGS = {"has_bias": "mlp bias", "has_sinks": "attention sinks", "has_gate": "output gates"}
_FLAGS |= {"has_v_norm": "norm of values", "are_values_keys": "keys as values", "has_norms": "experts beside the mlp"}
_FLAGS |= {"per_layer_input": "per-layer inputs"}
_FLAGS |= {"are_gates_of_heads": "one gate per head", "norms_of_sum": "norms of sums", "norms_are_centred": "LayerNorm"}
_FLAGS |= {"norms_have_bias": "norms with bias", "norms_skip_mixer": "no norm before attention"}
_USUAL = {  # the usual value, and words for any other
    "shared_from": (None, "keys and values of layer {}"),
    "is_causal": (True, "no mask"),
    "is_gated": (True, "no gate in the mlp"),
    "norms_parallel": (None, "mlp beside attention"),
    "norms_have_weight": (True, "norms without weights"),
    "beta_scale": (1.0, "beta up to {:g}"),
    "gate_curve": ("sigmoid", "gates of {}"),
}
# Differences in a file's layout, which do not change the computation.
_IN_FILES = ("is_decay_log", "are_heads_tiled", "are_parts_apart")
_MAX_ENDS = 8


def run_explain(options: ExplainOptions) -> None:
    found = explain(options.model)
    print_report(found.to_json(), lines(found), as_json=options.as_json)


def lines(found: Explanation) -> Iterator[str]:
    return columns_of_rows(list(_rows(found)), "<<")


def _rows(found: Explanation) -> Iterator[tuple[str, str]]:
    network, tokenizer, uses = found.architecture, found.tokenizer, " and ".join(found.uses)
    count = f"{found.num_parameters / 1e6:,.1f} M values in {megabytes(found.file_bytes)} of {found.file_format}"
    yield "model", f"{found.name}: {network['family']}, {count}"
    yield "file", found.path
    num_layers = sum(len(group.layers) for group in found.layer_groups)
    yield "network", f"{num_layers} layers, {', '.join(_network(network))}"
    yield "every layer", ", ".join(_layer(found.common, is_common=True))
    for group in found.layer_groups if len(found.layer_groups) > 1 else ():
        word = "layer" if len(group.layers) == 1 else "layers"
        yield f"{word} {ranges(group.layers)}", ", ".join(_layer(group.values, is_common=False))
    begin = f"begins with {tokenizer.bos}" if tokenizer.adds_bos else "adds no first token"
    tokens = f"{tokenizer.vocab_size:,} tokens, {tokenizer.num_special_tokens:,} of them special"
    yield "tokenizer", f"{tokenizer.kind} ({tokenizer.pre_tokenizer}), {tokens}, {begin}"
    if uses:
        yield "use", f"an encoder: it {uses}, and generates no text" if found.is_encoder else uses
    if not found.is_encoder:
        yield "template", ", ".join(tokenizer.templates) or "none: no chat"
        yield "ends", ", ".join(f"{text} ({token_id})" for token_id, text in list(tokenizer.ends.items())[:_MAX_ENDS])
        defaults = found.sampling_defaults.items()
        yield "sampling", ", ".join(f"{name} {value}" for name, value in defaults) or "no defaults"
    for each in found.weights:
        method = f" as {each.method}" if each.method else ""
        size = f"{each.num_values / 1e6:,.1f} M values, {megabytes(each.num_bytes)}{method}"
        yield each.type, f"{counted(each.num_tensors, 'tensor')}, {size}"
    share = f", {found.expert_bytes / 1e6:,.1f} of them in experts (--experts-memory needs less)"
    yield "in memory", f"{megabytes(found.weight_bytes)} of weights{share if found.expert_bytes else ''}"
    if found.f16_on_opencl:
        yield "on OpenCL", f"{', '.join(found.f16_on_opencl)} as F16"
    if not found.is_encoder:
        yield "1000 tokens", ", ".join(_cache(found))
    if found.q8_pays_from:
        yield "q8", q8_remark(found.q8_pays_from)
    if state := found.state_bytes:
        whole = f"{megabytes(ROW_STATES * state)} for a sequence"
        yield "state", f"{whole}, and {megabytes(state)} where another may go on from"


def _network(network: Mapping[str, Any]) -> Iterator[str]:
    yield f"hidden {network['hidden_size']:,}"
    yield f"vocabulary {network['vocab_size']:,}"
    yield f"context {network['text_limit'] or network['max_positions']:,}"
    yield f"eps {network['norm_eps']:g}"
    for name in ("embedding_scale", "logit_scale"):
        if network[name] != 1.0:
            yield f"{name.replace('_', ' ')} {network[name]:g}"
    if network["has_embedding_norm"]:
        yield "a norm of the embedding"
    if network["logit_softcap"] is not None:
        yield f"logit softcap {network['logit_softcap']:g}"
    yield "tied embeddings" if network["tied_embeddings"] else "a head of its own"


def _layer(values: Mapping[str, Any], *, is_common: bool) -> Iterator[str]:
    """Yield the features of layers in words. A missing feature is named only if other layers have it."""
    for name, value in values.items():
        if name in _IN_FILES:
            continue
        plain = _FLAGS.get(name, name.removeprefix("has_").replace("_", " "))
        if name in _USUAL:
            usual, words = _USUAL[name]
            if value != usual:
                yield words.format(value)
        elif name == "rope" and value is not None:
            yield _rope(value)
        elif name == "query_scale" and value is not None:
            yield f"queries that grow every {value['period']:,} tokens"
        elif name == "router" and value is not None:
            yield f"{value['num_chosen']:,} of {value['num_experts']:,} chosen by {value['scores'].replace('_', ' ')}"
            if value["weighs_inputs"]:
                yield "weighted inputs of experts"
        elif value is None or value == 0:  # False, too
            if not is_common:
                yield plain.removeprefix("no ") if plain.startswith("no ") else f"no {plain}"
        else:
            text = value.replace("_", " ") if name in ("mixer", "feed_forward", "qk_norm") else value
            yield plain if value is True else _WORDS.get(name, plain + " {}").format(text)


def _rope(rope: Mapping[str, Any]) -> str:
    text = f"rope of {rope['dim']} at {rope['theta']:,.10g}"
    if "frequency_factors" in rope:
        low, high = rope["frequency_factors"]
        if (low, high) != (1, 1):
            text += f" slowed {low:g}×" if low == high else f" slowed {low:.4g} to {high:.4g}×"
    if "pairs_that_do_not_turn" in rope:
        text += f" but {rope['pairs_that_do_not_turn']} pairs"
    if "attention_factor" in rope:
        text += f" times {rope['attention_factor']:.4g}"
    return text + (f", another beyond {rope['other_beyond']:,} tokens" if "other_beyond" in rope else "")


def _cache(found: Explanation) -> Iterator[str]:
    for size in found.cache:
        whole, beyond = size.bytes_per_1000_tokens, size.bytes_per_1000_tokens_beyond_windows
        beyond_text = "" if whole == beyond else f" ({beyond / 1e6:,.1f} beyond the windows)"
        yield f"{size.kv_type} {megabytes(whole)}{beyond_text}"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, with ranges: 0–4, 6–10, 12."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda indexed: indexed[1] - indexed[0])
    ]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def run_estimate(options: EstimateOptions) -> None:
    checkpoint, architecture = open_network(options.model)
    tensors = checkpoint.tensors
    settings, cache = options.settings, options.settings.cache
    check_layers(cache, architecture.mixers)
    num_tokens, own = context_length(options.max_seq_len, architecture, cache), architecture.most_positions
    threads = default_num_threads() if settings.threads is None else check_num_threads(settings.threads)
    load = LoadSettings.of(settings, threads, options.device)
    available = available_memory_bytes() if options.device == "cpu" else _free_on_gpu()
    budget = MemoryBudget.of(architecture, tensors, load, cache, num_tokens=num_tokens, pool_pages=options.pool_pages)
    found = replace(budget.with_step_that_fits(available), num_rows=None if options.batch == 1 else options.batch)
    draft_bytes = plan_draft_bytes(replace(settings, device=options.device), checkpoint, num_tokens, load)
    rest = 0 if available is None else max(0, available - found.process - draft_bytes)
    if settings.tensor_parallel == 1 and available is not None:
        found = found.with_experts_that_fit(rest)
    kv_type, generates = found.kv_type, not architecture.reads_whole_texts
    fits = None if available is None else found.total + draft_bytes <= available
    option = found.option_that_fits(rest) if fits is False and options.batch == 1 else None
    on_host = load.device == "cpu"  # only the host's memory can be measured
    is_known = on_host and generates and found.load.experts_memory is None  # no file's share of the time is known
    report = {
        "model": options.model,
        "max_seq_len": num_tokens,
        "batch": options.batch,
        "is_encoder": not generates,
        "device": options.device,
        "pool_pages": options.pool_pages,
        "kv_type": kv_type,
        "weight_bytes": found.weights,
        "experts_memory": found.load.experts_memory,
        "weight_types": largest_types(architecture, found.types or {}, options.device),
        "kernels": kernel_kind(options.device, make_outline(architecture, tensors, settings)),
        "cache_bytes": found.cache,
        "workspace_bytes": found.workspace,
        "step_tokens": found.load.step.tokens,
        "process_bytes": found.process,
        "draft_bytes": draft_bytes,
        "total_bytes": found.total + draft_bytes,
        "available_bytes": available,
        "q8_pays_from": found.q8_pays_from if on_host else None,
        "tokens_per_second": tokens_per_second(architecture, tensors, load, kv_type) if is_known else None,
        "read_bandwidth": read_bandwidth(threads) if on_host else None,
        "fits": fits,
        "option_that_fits": option,
        "largest_context": None if available is None else found.largest_context(rest, max(own, num_tokens)),
    }
    print_report(report, estimate_lines(report), as_json=options.as_json)


def _free_on_gpu() -> int | None:
    """Return the free memory of the first GPU in bytes, or None if there is no GPU.

    The size of a model can be estimated on a machine without a GPU.
    """
    import torch

    from infer.compute.ops import backend_of

    return backend_of(torch.device("cuda")).available_bytes() if torch.cuda.is_available() else None


def estimate_lines(report: Mapping[str, Any]) -> Iterator[str]:
    rows = counted(report["batch"], "row")
    pool = "" if report["pool_pages"] is None else f" in {report['pool_pages']:,} pages"
    kernels = "" if report["kernels"] == report["device"] else f" for {report['kernels']}"
    remarks = {
        "weights": f"as packed ({', '.join(report['weight_types'])}){kernels}, with the tables of rotation",
        "cache": f"{rows} of {report['max_seq_len']:,} tokens{pool}, {report['kv_type']}",
        "workspace": f"of a step of {report['step_tokens']:,} tokens",
        "process": "Python, torch and the vocabulary",
    }
    if report["experts_memory"] is not None:
        remarks["weights"] += f", experts in {megabytes(report['experts_memory'])} at most and in a file"
    if report["is_encoder"]:
        remarks["cache"] = f"two layers of a text of {report['max_seq_len']:,} tokens, {report['kv_type']}"
    if report["draft_bytes"]:
        remarks["draft"] = "weights, cache and workspace of the draft model, or of the model's own head that drafts"
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
    if report["q8_pays_from"] is not None:
        yield f"{'q8':<10}{'':>12}      {q8_remark(report['q8_pays_from'])}"
    if report["available_bytes"] is None:
        return
    verdict = "it fits" if report["fits"] else "it does not fit"
    most = report["largest_context"]
    longest = f"up to {most:,} tokens would" if most > 1 else "no context would fit: use a smaller quantisation"
    if (option := report["option_that_fits"]) is not None and not option.startswith("max_seq_len"):
        longest = option
    yield f"{'available':<10}{report['available_bytes'] / 1e6:>12,.1f} MB   {verdict}; {longest}"
