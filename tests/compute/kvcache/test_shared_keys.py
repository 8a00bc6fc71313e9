"""Layers that attend to an earlier layer's keys and values, in rows of a whole model."""

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from extent import usual_or_all
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.engine.runner.caches import make_cache
from infer.errors import ModelError
from infer.models.families import make_architecture
from infer.models.transformer import Transformer
from test_families import load
from test_recurrent_rows import CAPACITY, NUM_ROWS, SETTINGS, Rows, go_on_at_random
from tiny import GEMMA4, Tiny, make_tiny

pytestmark = pytest.mark.slow

TINY_SHARED = next(tiny for tiny in GEMMA4 if tiny.name == "gemma4_shared")
CONFIG = TINY_SHARED.config.to_dict()


class ModelRows(Rows):
    """Rows of a whole model. Their residual streams have the bits of the whole text in one step of a new cache."""

    def __init__(self, model: Transformer, step_tokens: int = 512) -> None:
        self.model = model
        super().__init__(make_cache(model, CAPACITY, NUM_ROWS, settings=SETTINGS, step_tokens=step_tokens), "cpu")
        self.of_text = cache(self._of_text)

    def mix(self, step: Step) -> Tensor:
        return self.model.residual(step, self.cache).clone()

    def expected(self, text: Sequence[int]) -> Tensor:
        return self.of_text(tuple(text))

    def _of_text(self, text: tuple[int, ...]) -> Tensor:
        alone = make_cache(self.model, CAPACITY, settings=SETTINGS, step_tokens=CAPACITY)
        alone.reserve(0, len(text))
        return self.model.residual(Step.of(list(text)), alone).clone()

    def compare(self, found: Tensor, wanted: Tensor) -> None:
        assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder: Path = tmp_path_factory.mktemp("shared")
    longer = copy.deepcopy(TINY_SHARED.config)
    longer.max_position_embeddings = CAPACITY
    make_tiny(Tiny("gemma4_shared", longer), folder)
    return load(folder)


@pytest.mark.parametrize("seed", range(usual_or_all(1, 4)))
@torch.inference_mode()
def test_rows_continue_as_one_text_after_any_operations(model: Transformer, seed: int) -> None:
    go_on_at_random(ModelRows(model), seed, 120)


def test_only_layers_with_keys_of_their_own_have_pages(model: Transformer) -> None:
    attention = model.architecture.attention
    assert [layer.shared_from for layer in attention] == [None, None, None, 1, 1, 2, 2]
    held: PagedCache = make_cache(model, 64)
    assert len(held.memory.layers) == 3
    assert [index for index in model.architecture.cache_indices if index is not None] == [0, 1, 2, 1, 1, 2, 2]


def test_shared_keys_need_a_layer_of_their_kind() -> None:
    assert isinstance(make_architecture(CONFIG).layers[-1].mixer, Attention)
    with pytest.raises(ModelError, match=r"num_kv_shared_layers=5 leaves no layer with keys of kind full_attention"):
        make_architecture(CONFIG | {"num_kv_shared_layers": 5})
    with pytest.raises(ModelError, match=r"num_kv_shared_layers must be from 0 to 6, got 7"):
        make_architecture(CONFIG | {"num_kv_shared_layers": 7})
