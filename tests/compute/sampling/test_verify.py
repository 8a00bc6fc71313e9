"""A verified step with tensors of two devices. Torch's device `meta` stands in for a GPU."""

from typing import Any

import pytest
import torch

from infer.compute.operands.step import Chunk
from infer.compute.ops import device
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.sampler import Sampled
from infer.engine.runner import sample_loop
from infer.sampling_params import SamplingParams

VOCAB = 64


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_masks_on_the_host_serve_logits_on_a_device_and_follow_their_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, Any]] = []

    def sample(logits: Any, columns: Any, history: Any, positions: Any, allowed: Any) -> Sampled:
        asked.append((logits, allowed))
        return Sampled(torch.tensor([5, 9]))

    monkeypatch.setattr(sample_loop.ops, "sample", sample)
    monkeypatch.setitem(device.MODULE_BY_NAME, "meta", "infer.compute.backends.torch_backend")
    columns = SamplingColumns.of([SamplingParams(temperature=0)] * 2, VOCAB, device=torch.device("cpu"))
    parts = [Chunk(0, [1, 5], num_drafts=1), Chunk(1, [2])]
    logits, masks = torch.zeros(3, VOCAB, device=name), torch.arange(6, dtype=torch.int32).reshape(3, 2)
    drawn, ended = sample_loop.verify(logits, parts, [1, 1], columns, None, masks)
    assert [each.token_ids for each in drawn] == [[5, 5], [9]]
    assert [(given.device.type, allowed.device.type) for given, allowed in asked] == [(name, name)] * 2
    if name == "cpu":
        assert (asked[0][1].tolist(), asked[1][1][0].tolist()) == ([[0, 1], [4, 5]], [2, 3])
    assert len(ended) == 2
    assert ended == sorted(ended)
