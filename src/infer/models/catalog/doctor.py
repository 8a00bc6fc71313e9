"""Search a model's files for faults: in the headers, and in one pass over the tensors. No engine is created."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infer.compute.operands.architecture import Architecture
from infer.errors import ModelError
from infer.files import Checkpoint, open_checkpoint
from infer.models.catalog.tensor_checks import BY_TOKEN, OnProgress, TensorSummary, read_tensors
from infer.models.catalog.tokenizer_checks import (
    Finding,
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
        return {
            "path": self.path,
            "num_tensors": self.num_tensors,
            "num_tokens": self.num_tokens,
            "findings": tuple(map(asdict, self.findings)),
            "requantise": self.requantise,
        }


def examine(model: str | Path, on_progress: OnProgress) -> Diagnosis:
    """Return the findings about a model.

    Raises InvalidRequestError if it does not exist, and ModelError if its files cannot be read.
    """
    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    stated = stated_tokens(checkpoint)
    findings = [*_network(checkpoint, architecture)]
    of_ids = [*id_findings(stated, checkpoint.metadata, generates=not architecture.reads_whole_texts)]
    findings += of_ids
    if (embedding := checkpoint.tensors.get(BY_TOKEN[0])) is not None:
        findings += size_findings(stated, embedding.shape[0], is_gguf=bool(checkpoint.metadata))
    findings += converter_findings(checkpoint.metadata)
    tokenizer, markers = make_tokenizer(checkpoint), frozenset[str]()
    if not isinstance(tokenizer, Finding):
        check = check_templates(tokenizer, stated, is_gguf=bool(checkpoint.metadata))
        findings += check.findings
        markers = check.markers
    elif not of_ids:  # findings about ids name the cause
        findings.append(tokenizer)
    read = read_tensors(checkpoint.tensors, unused_ids(checkpoint, stated, markers), on_progress)
    findings += read.findings
    checkpoint.check_unchanged()
    counts = len(checkpoint.tensors), len(stated.texts)
    return Diagnosis(str(checkpoint.path), *counts, tuple(findings), tuple(read.summaries))


def _network(checkpoint: Checkpoint, architecture: Architecture) -> Iterator[Finding]:
    try:
        check_tensors(architecture, checkpoint.tensors)
    except ModelError as error:
        yield Finding("network", checkpoint.path.name, str(error), "convert it again from the original")


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
