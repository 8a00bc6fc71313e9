"""The sampler as three commands, for a single batch or after the head of a recorded step."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.recording import scope
from infer.compute.backends.cpu.sample_records import SAMPLE
from infer.compute.backends.cpu.sampling.rows import SampleArguments
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Command
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History


def choose_tokens(
    logits: Float[Tensor, "rows vocab"],
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Int[Tensor, "rows"]:
    """Return the token of each row, or a negative code. Logits to be edited are copied first: the caller's stay
    unchanged.
    """
    x = logits.float()
    if x.stride(-1) != 1 or ((columns.has_edits or allowed is not None) and x.data_ptr() == logits.data_ptr()):
        x = x.clone(memory_format=torch.contiguous_format)
    positions = positions.contiguous()
    allowed = None if allowed is None else allowed.contiguous()
    arguments = SampleArguments(x, positions.data_ptr(), position_offset=0)
    arguments.bind(columns, history)
    arguments.set(allowed=0 if allowed is None else allowed.data_ptr())
    with scope("sample", len(columns), logit_indices=positions) as run:
        run.commands += commands(arguments, keeps=(positions, allowed))
    return torch.tensor(arguments.sampled[: len(columns)], dtype=torch.int64)


def commands(arguments: SampleArguments, keeps: object = None) -> list[Command]:
    """Return scan, narrow and choose: `sampled` then holds a token or a negative code for each of the step's logits."""
    makers = ("stage_1_edit:scan", "stage_2_candidates:narrow", "stage_3_filter_and_draw:choose")
    return [command(f".sampling.{maker}", arguments, keeps) for maker in makers]


def scoring(arguments: SampleArguments) -> list[Command]:
    """Return score and merge: `logprobs` then holds the log-probabilities that rows requested of the sampled tokens."""
    return [command(f".sampling.stage_4_logprobs:{name}", arguments) for name in ("score", "merge")]


def command(maker: str, arguments: SampleArguments, keeps: object = None) -> Command:
    label = f"sample.{maker.partition(':')[2]}"
    return Command(compiled_address(maker, SAMPLE), arguments.record, BARRIER, label, (arguments, keeps))
