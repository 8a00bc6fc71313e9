"""Load the weights of a model on the thread that steps its engine, and give the engine to that thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.requests.host import Host, HostSettings
from infer.engine.requests.loop import Loop
from infer.engine.requests.model_settings import DeviceName, DtypeName, PrecisionName, RerankerName, WeightsType
from infer.engine.requests.text_heads import make_text_heads
from infer.engine.tensor_parallel.ranks import start_ranks
from infer.files import Checkpoint
from infer.files.generation_config import defaults_of
from infer.models.from_checkpoint import dtype_name, load_checked
from infer.text.templates.template_process import start_rendering
from infer.text.tokenizer import Tokenizer


@final
@dataclass(frozen=True, kw_only=True)
class HostArguments:
    """The arguments of `LLM` that define how its model is loaded and run."""

    device: DeviceName | str | torch.device
    dtype: DtypeName | torch.dtype
    weights: WeightsType
    precision: PrecisionName
    max_seq_len: int | None
    cache: CacheSettings
    pool_pages: int | None
    grammar_backend: str
    tensor_parallel: int
    capture: bool
    reranker: RerankerName
    prefix_bytes: int


def load_host(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    given: HostArguments,
    on_progress: Callable[[int, int], None] | None = None,
) -> Host:
    """Return the loaded model. Raises ModelError if it is not usable or does not fit in memory."""
    kept_dtype, cache = dtype_name(given.dtype), given.cache
    heads = make_text_heads(checkpoint, tokenizer, given.reranker)
    if tokenizer.chat_template is not None:
        start_rendering()
    defaults, forms = defaults_of(checkpoint), (kept_dtype, given.weights, given.precision)
    ranks = start_ranks(checkpoint, forms, str(given.device), cache, given.tensor_parallel)
    loop, group = Loop(), None if ranks is None else ranks.group
    device = given.device if ranks is None else ranks.source.device_of(0)
    asked = checkpoint, tokenizer, device, given.dtype, given.weights, given.precision, given.max_seq_len
    # Rows of weights are allocated on the memory node of the thread that packs them.
    network = loop.load(
        lambda show: load_checked(*asked, show, cache, group=group, pool_pages=given.pool_pages), on_progress
    )
    fingerprint = f"{checkpoint.fingerprint()} {given.weights} {given.precision} {kept_dtype}"
    kept = fingerprint, cache, given.pool_pages, given.capture, given.grammar_backend, defaults
    times = tuple(file.modified_ns for file in checkpoint.files)
    heads = heads.of_network(network.architecture)
    return Host(loop, network, tokenizer, HostSettings(*kept, heads, given.prefix_bytes, times), ranks)
