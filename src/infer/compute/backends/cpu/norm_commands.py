"""The commands of norms whose results are stored as floats: `sum_norm` has the kernel."""

from jaxtyping import Int
from torch import Tensor

from infer.compute.backends.cpu.recording import Run
from infer.compute.backends.cpu.records import SUM_NORM
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Arguments
from infer.compute.operands.weights import Norm, TextInputWeights


def append_sum_norm(run: Run, x: Tensor, y: Tensor | None, norm: Norm, out: Tensor) -> Arguments:
    """Append out = norm(x + y) for each row, and return the command's arguments. out may be x."""
    arguments = Arguments(SUM_NORM, x=x, out=out, features=x.shape[1], eps=norm.eps, is_centred=norm.is_centred)
    arguments.set(weight=norm.weight.float().contiguous())
    if norm.bias is not None:
        arguments.set(bias=norm.bias.float().contiguous())
    if y is not None:
        arguments.set(y=y)
    run.append("sum_norm", arguments, BARRIER, ".sum_norm:sum_norm")
    return arguments


def centred(run: Run, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
    """Return norm(x) and None if the norm subtracts the mean or adds a bias, which no product does for itself."""
    if norm is None or not (norm.is_centred or norm.bias is not None):
        return x, norm
    out = run.tensor("normed", run.capacity, x.shape[1])
    append_sum_norm(run, x, None, norm, out)
    return out, None


def append_text_inputs(run: Run, x: Tensor, second_starts: Int[Tensor, "rows"], weights: TextInputWeights) -> None:
    """Append x = norm(x + types + positions)."""
    arguments = append_sum_norm(run, x, None, weights.norm, x)
    if weights.types is not None:
        arguments.set(types=weights.types, last_type=len(weights.types) - 1, second_starts=second_starts)
    if weights.positions is not None:
        arguments.set(embedded_positions=weights.positions)
