"""The sampler as three commands, for a batch at once or behind the head of a recorded step."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.recording import scope
from infer.backends.cpu.records import SAMPLE
from infer.backends.cpu.sample_rows import Arguments, bind
from infer.backends.cpu.table import BARRIER, Command
from infer.sampling.columns import Rows
from infer.sampling.history import History


def choose_tokens(
    logits: Float[Tensor, "rows vocab"],
    rows: Rows,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Int[Tensor, "rows"]:
    """Rows that are edited are copied first: the caller's logits stay."""
    x = logits.float()
    if x.stride(-1) != 1 or ((rows.has_edits or allowed is not None) and x.data_ptr() == logits.data_ptr()):
        x = x.clone(memory_format=torch.contiguous_format)
    positions = positions.contiguous()
    allowed = None if allowed is None else allowed.contiguous()
    arguments, keeps = bind(x, rows, history, allowed, positions.data_ptr(), 0)
    with scope("sample", len(rows), wanted=positions) as run:
        run.table.append(commands(arguments, (keeps, positions)))
    return torch.from_numpy(keeps[-1])


def commands(arguments: Arguments, keeps: object) -> list[Command]:
    """Scan, narrow, choose: `sampled` holds a token or a negative code for each of the step's wanted logits."""
    makers = (".sample_scan:make_scan", ".sample_narrow:make_narrow", ".sample_choose:make_choose")
    return [
        Command(compiled_address(maker, SAMPLE), arguments, BARRIER, f"sample.{maker.rpartition('_')[2]}", (keeps,))
        for maker in makers
    ]
