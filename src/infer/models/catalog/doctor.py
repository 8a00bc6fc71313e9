"""Search a model's files for faults: in the headers, and in one pass over the tensors. No engine is created.

A tensor becomes a `TensorSummary`, and the checks compare summaries. So the memory needed does not grow with the model.
`weight_errors` compares the matrices with those of another file of the same model.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, log2, prod, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.operands.weights import StoredWeight, UnreadWeight
from infer.compute.quantization.ggml_blocks import dequantize, scales_of
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.errors import ModelError, ModelFormatError
from infer.files import Checkpoint, open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights, as_float32
from infer.files.tensors.tensor_info import TensorInfo
from infer.models.catalog.tokenizer_checks import (
    Finding,
    Kind,
    StatedTokens,
    check_templates,
    converter_findings,
    id_findings,
    make_tokenizer,
    size_findings,
    stated_tokens,
)
from infer.models.families import make_architecture
from infer.models.tensors import check_tensors

OnProgress = Callable[[int, int], None]

BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")  # matrices with one row per token
_VALUES_PER_PIECE = 1 << 20  # read at a time
_VALUES_AT_ONCE = 1 << 15  # counted at a time: they stay in a core's cache, and torch uses one thread
_FLOAT_BLOCK = 32
_MOST_ZERO_BLOCKS = 0.01  # share of a matrix's blocks
_LEAST_LAYERS = 5  # with fewer, a median over layers says little
_MOST_DEVIATIONS = 10.0  # median absolute deviations of the logarithm
_LEAST_FACTORS = {"root mean square": 8.0, "largest value": 32.0}  # layers of known models differ by 4 at most
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
_MAX_LISTED = 5


@dataclass
class TensorSummary:
    """Counts of one pass over a tensor. NaN and infinite values count as zero in `largest` and `squares`."""

    name: str
    info: TensorInfo
    num_values: int = 0
    num_nan: int = 0
    num_infinite: int = 0
    largest: float = 0.0
    squares: float = 0.0
    num_blocks: int = 0
    num_zero_blocks: int = 0
    num_zero_scales: int = 0  # blocks whose scale is 0
    num_bad_scales: int = 0  # blocks whose scale is NaN or infinite
    zero_rows: list[int] = field(default_factory=list)  # only for matrices with one row per token

    @property
    def rms(self) -> float:
        return sqrt(self.squares / max(self.num_values, 1))

    @property
    def is_quantised(self) -> bool:
        return not BLOCK_TYPES[self.info.type].is_float

    def add(self, stored: StoredWeight) -> None:
        """Count rows that follow those counted so far."""
        num_columns = stored.shape[-1]
        rows = stored.data if self.is_quantised else stored.data.reshape(-1, num_columns)
        for data in torch.split(rows, max(1, _VALUES_AT_ONCE // num_columns)):
            if self.is_quantised:
                self._add_scales(data)
                data = dequantize(data, stored.type)
            self._add_values(data.float())

    def _add_scales(self, data: Tensor) -> None:
        scales = scales_of(data, self.info.type).float()
        firsts = scales if self.info.type in ("NVFP4", "NVFP4_SCALED") else scales[:, :1]  # a minimum may follow
        self.num_zero_scales += len(firsts) - int(firsts.count_nonzero(1).count_nonzero())
        if not isfinite(scales.sum()):
            self.num_bad_scales += int((~scales.isfinite()).any(1).sum())

    def _add_values(self, values: Float[Tensor, "rows columns"]) -> None:
        num_rows, num_columns = values.shape
        size = BLOCK_TYPES[self.info.type].block_size if self.is_quantised else _FLOAT_BLOCK
        size = size if num_columns % size == 0 else num_columns
        peaks = values.abs().reshape(-1, size).amax(1)
        self.num_zero_blocks += len(peaks) - int(peaks.count_nonzero())
        largest = float(peaks.amax())
        if not isfinite(largest):
            self.num_nan += int(values.isnan().sum())
            self.num_infinite += int(values.isinf().sum())
            values = values.nan_to_num(0.0, 0.0, 0.0)
            largest = float(values.abs().amax())
        self.largest = max(self.largest, largest)
        self.squares += float(values.square().sum())
        if self.name in BY_TOKEN:
            first = self.num_values // num_columns
            rows = (peaks.reshape(num_rows, -1).amax(1) == 0).nonzero().flatten().tolist()
            self.zero_rows += [first + row for row in rows]
        self.num_blocks += len(peaks)
        self.num_values += values.numel()


def read_tensors(
    tensors: Mapping[str, TensorInfo], unused_ids: Collection[int], on_progress: OnProgress
) -> tuple[list[Finding], list[TensorSummary]]:
    """Read all tensors once. Return the findings about them, and the counts of those that could be read.

    Rows of `unused_ids` may be zero.

    Raises ModelError if reading fails.
    """
    findings = list[Finding]()
    total, done = sum(prod(info.shape) for info in tensors.values()), 0
    weights, summaries = LazyWeights(tensors), list[TensorSummary]()
    for name, info in tensors.items():
        summary, before = TensorSummary(name, info), done
        done += prod(info.shape)
        try:
            for stored in pieces(weights, name, info):
                summary.add(stored)
                on_progress(before + summary.num_values, total)
        except ModelFormatError as error:  # methods of quantisation check their scales
            if info.packed is None or error.field == "file":
                raise
            fix = "quantise it again from the original"
            findings.append(Finding("scales", info.name, error.problem, fix, info.name))
            continue
        summaries.append(summary)
        findings += [*_not_finite(summary), *_zeros(summary), *_zero_rows(summary, unused_ids)]
    return [*findings, *outliers(summaries)], summaries


def pieces(weights: LazyWeights, name: str, info: TensorInfo) -> Iterator[StoredWeight]:
    """Yield a matrix some rows at a time, and any other tensor as a whole. Tensors without values yield nothing."""
    if not prod(info.shape):
        return
    weight = weights[name]
    if isinstance(weight, StoredWeight):
        yield StoredWeight(weight.type, weight.shape or (1,), weight.data)
        return
    assert isinstance(weight, UnreadWeight)
    num_rows, num_columns = weight.shape
    step = max(1, _VALUES_PER_PIECE // num_columns)
    for first in range(0, num_rows, step):
        end = min(first + step, num_rows)
        yield StoredWeight(weight.type, (end - first, num_columns), weight.read(first, end))


def _not_finite(summary: TensorSummary) -> Iterator[Finding]:
    if not (summary.num_nan or summary.num_infinite or summary.num_bad_scales):
        return
    problem = f"{summary.num_nan:,} of {summary.num_values:,} values are NaN and {summary.num_infinite:,} are infinite"
    if summary.num_bad_scales:
        problem += f", because {summary.num_bad_scales:,} of {summary.num_blocks:,} blocks have a scale like that"
    yield _finding(summary, "not finite", f"{problem}; every value must be finite")


def _zeros(summary: TensorSummary) -> Iterator[Finding]:
    """Yield a finding for a matrix of a layer with many blocks of zeros, or with many scales that are zero."""
    if len(summary.info.shape) < 2 or "embed" in summary.name or summary.name in BY_TOKEN:
        return
    least = _MOST_ZERO_BLOCKS * summary.num_blocks
    rule = f"at most {_MOST_ZERO_BLOCKS:.0%} may"
    if summary.num_zero_blocks > least:
        problem = f"{_share(summary.num_zero_blocks, summary)} have only zeros; {rule}"
        yield _finding(summary, "zeros", problem)
    elif summary.num_zero_scales > least:
        yield _finding(summary, "scales", f"{_share(summary.num_zero_scales, summary)} have a scale of 0; {rule}")


def _zero_rows(summary: TensorSummary, unused_ids: Collection[int]) -> Iterator[Finding]:
    rows = [row for row in summary.zero_rows if row not in unused_ids]
    if rows:
        listed = ", ".join(map(str, rows[:_MAX_LISTED])) + (", …" if len(rows) > _MAX_LISTED else "")
        count = "1 row is" if len(rows) == 1 else f"{len(rows):,} rows are"
        yield _finding(summary, "zeros", f"{count} all zero (ids {listed}); a used token must have other values")


def outliers(summaries: Sequence[TensorSummary]) -> Iterator[Finding]:
    """Yield a finding for each matrix whose values are out of line with those of the same matrix of other layers.

    Distances are in median absolute deviations of the logarithm, over all layers. Zeros have findings of their own.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[TensorSummary]] = {}
    for summary in summaries:
        if len(summary.info.shape) > 1 and summary.squares and _NUMBER.search(summary.name):
            groups.setdefault((_NUMBER.sub("", summary.name), summary.info.shape), []).append(summary)
    for group in groups.values():
        found = set[str]()
        for measure, values in (
            ("root mean square", [each.rms for each in group]),
            ("largest value", [each.largest for each in group]),
        ):
            for index, usual in far_from_median(values, _LEAST_FACTORS[measure]):
                if group[index].name not in found:
                    found.add(group[index].name)
                    problem = f"the {measure} is {values[index]:.3g}, and {usual:.3g} is the median over layers"
                    rule = f"it may differ by a factor of at most {_LEAST_FACTORS[measure]:g}"
                    yield _finding(group[index], "outlier", f"{problem}; {rule}")


def far_from_median(values: Sequence[float], least_factor: float) -> Iterator[tuple[int, float]]:
    """Yield the index of each outlier of positive numbers, with the median.

    An outlier is away by `least_factor`, and by ten times the median absolute deviation.
    """
    if len(values) < _LEAST_LAYERS:
        return
    logs = [log2(value) for value in values]
    middle = median(logs)
    limit = max(log2(least_factor), _MOST_DEVIATIONS * median(abs(each - middle) for each in logs))
    for index, each in enumerate(logs):
        if abs(each - middle) > limit:
            yield index, 2.0**middle


def _share(count: int, summary: TensorSummary) -> str:
    return f"{count:,} of {summary.num_blocks:,} blocks ({count / summary.num_blocks:.1%})"


def _finding(summary: TensorSummary, kind: Kind, problem: str) -> Finding:
    name = summary.info.name
    expert = re.search(r"\.experts\.([0-9]+)\.", summary.name)
    place = name if expert is None or f".{expert[1]}." in name else f"{name} (expert {expert[1]})"
    if summary.is_quantised:
        return Finding(kind, place, problem, f"quantise it again from the original: it is {summary.info.type}", name)
    fix = "convert it again from the original"
    if summary.num_infinite and summary.info.type == "F16":
        fix += " as BF16 or F32: F16 ends at 65,504"
    return Finding(kind, place, problem, fix)


def weight_errors(reference: Checkpoint, other: Checkpoint, on_progress: OnProgress) -> dict[str, float]:
    """Return ‖other − reference‖ / ‖reference‖ of each matrix, by our names.

    It is empty if the checkpoints have different networks, whose matrices differ in names or shapes. A matrix whose
    error is not a finite number is left out. Raises ModelError if reading fails.
    """
    ours, theirs = (_matrices(each.tensors) for each in (reference, other))
    if {name: info.shape for name, info in ours.items()} != {name: info.shape for name, info in theirs.items()}:
        return {}
    found, done, total = dict[str, float](), 0, sum(prod(info.shape) for info in ours.values())
    weights, others = LazyWeights(ours), LazyWeights(theirs)
    for name, info in ours.items():
        difference = size = 0.0
        for right, near in zip(pieces(weights, name, info), pieces(others, name, theirs[name]), strict=True):
            expected = as_float32(right).data
            difference += float((as_float32(near).data - expected).square().sum())
            size += float(expected.square().sum())
            done += expected.numel()
            on_progress(done, total)
        if size > 0 and isfinite(error := sqrt(difference / size)):
            found[name] = error
    return found


def _matrices(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name: info for name, info in tensors.items() if len(info.shape) == 2}


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a model, and the amount of data that was read for them."""

    path: str
    num_tensors: int
    num_tokens: int
    findings: tuple[Finding, ...]
    summaries: tuple[TensorSummary, ...] = field(repr=False, compare=False)

    @property
    def requantise(self) -> tuple[str, ...]:
        """The tensors that must be quantised again."""
        return tuple(dict.fromkeys(each.requantise for each in self.findings if each.requantise))

    def to_json(self) -> dict[str, Any]:
        values = asdict(replace(self, summaries=()))
        del values["summaries"]
        return values | {"requantise": self.requantise}


def examine(model: str | Path, on_progress: OnProgress) -> Diagnosis:
    """Return the findings about a model.

    Raises InvalidRequestError if it does not exist, and ModelError if its files cannot be read.
    """
    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    stated = stated_tokens(checkpoint)
    findings = list[Finding]()
    try:
        check_tensors(architecture, checkpoint.tensors)
    except ModelError as error:
        findings.append(Finding("network", checkpoint.path.name, str(error), "convert it again from the original"))
    of_ids = [*id_findings(stated, checkpoint.metadata, generates=not architecture.reads_whole_texts)]
    findings += of_ids
    if (embedding := checkpoint.tensors.get(BY_TOKEN[0])) is not None:
        findings += size_findings(stated, embedding.shape[0], is_gguf=bool(checkpoint.metadata))
    findings += converter_findings(checkpoint.metadata)
    tokenizer, markers = make_tokenizer(checkpoint), frozenset[str]()
    if not isinstance(tokenizer, Finding):
        of_templates, markers = check_templates(tokenizer, stated, is_gguf=bool(checkpoint.metadata))
        findings += of_templates
    elif not of_ids:  # findings about ids name the cause
        findings.append(tokenizer)
    of_tensors, summaries = read_tensors(checkpoint.tensors, unused_ids(checkpoint, stated, markers), on_progress)
    checkpoint.check_unchanged()
    counts = len(checkpoint.tensors), len(stated.texts)
    return Diagnosis(str(checkpoint.path), *counts, (*findings, *of_tensors), tuple(summaries))


def unused_ids(checkpoint: Checkpoint, stated: StatedTokens, markers: frozenset[str]) -> frozenset[int]:
    """Return the ids whose rows may be zero.

    They are padding, rows without a token, and control tokens that no template writes.
    """
    rows = max((info.shape[0] for name in BY_TOKEN if (info := checkpoint.tensors.get(name)) is not None), default=0)
    padding = checkpoint.metadata.get("tokenizer.ggml.padding_token_id", checkpoint.config.get("pad_token_id"))
    controls = {token_id for token_id in stated.control_ids if stated.texts.get(token_id) not in markers}
    return frozenset(
        ({padding} if type(padding) is int else set()) | controls | (set(range(rows)) - stated.texts.keys())
    )
