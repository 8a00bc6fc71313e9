"""The layers after a pooled state: equal to torch's modules, and with bits that depend only on one state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infer.errors import ModelFormatError
from infer.files.heads.pooling import StepFiles, check_head, take_layer
from infer.files.tensors.safetensors import read_safetensors
from infer.models.pooled_head import Head, load_head
from refusals import check_refused

SIZE, MIDDLE, LABELS = 70, 150, 3
ACTIVATIONS: dict[str, nn.Module] = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}
ACTIVATIONS |= {"sigmoid": nn.Sigmoid(), "silu": nn.SiLU(), "tanh": nn.Tanh()}


def applied(head: Head, states: torch.Tensor) -> torch.Tensor:
    return torch.stack([head.of(state) for state in states])


def save(path: Path, modules: nn.Module, **changes: Tensor) -> dict[str, Any]:
    """Save the tensors of modules, and return those of the file."""
    save_file({name: tensor.contiguous() for name, tensor in modules.state_dict().items()} | changes, path)
    return read_safetensors(path)


def load(steps: tuple[StepFiles, ...]) -> Head:
    assert check_head(steps, SIZE) == LABELS
    return load_head(steps)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_classifier_of_modern_bert_s_kind_is_that_of_torch(tmp_path: Path, name: Any, has_bias: bool) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(MIDDLE, eps=1e-3, bias=has_bias)
    nn.init.normal_(norm.weight)
    oracle = nn.Sequential(nn.Linear(SIZE, MIDDLE, bias=has_bias), ACTIVATIONS[name], norm, nn.Linear(MIDDLE, LABELS))
    found = save(tmp_path / "a.safetensors", oracle)
    head = load((take_layer(found, "0"), name, take_layer(found, "2", 1e-3), take_layer(found, "3")))
    states = torch.randn(5, SIZE)
    with torch.inference_mode():
        torch.testing.assert_close(applied(head, states.double()), oracle.double()(states.double()))


def test_the_bits_of_a_result_depend_only_on_its_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    found = save(
        tmp_path / "a.safetensors", nn.Sequential(nn.Linear(SIZE, MIDDLE), nn.Tanh(), nn.Linear(MIDDLE, LABELS))
    )
    head = load((take_layer(found, "0"), "tanh", take_layer(found, "2")))
    states = torch.randn(9, SIZE).double()
    together = applied(head, states)
    assert torch.equal(together, torch.stack([head.of(state.clone()) for state in states]))
    assert torch.equal(together[3:], applied(head, states[3:]))
    assert torch.equal(together.flip(0), applied(head, states.flip(0)))


def test_half_precision_is_read_as_it_is(tmp_path: Path) -> None:
    weight, state = torch.randn(LABELS, SIZE).bfloat16(), torch.randn(SIZE).double()
    save_file({"linear.weight": weight}, tmp_path / "a.safetensors")
    found = read_safetensors(tmp_path / "a.safetensors")
    torch.testing.assert_close(load((take_layer(found, "linear"),)).of(state), weight.double() @ state)


MISFITS = [
    ({"linear.weight": torch.zeros(LABELS, SIZE + 1)}, r"'linear.weight': expected \(3, 70\), got \(3, 71\)"),
    ({"linear.weight": torch.zeros(SIZE)}, r"'linear.weight': expected \(70, 70\), got \(70,\)"),
    ({"linear.bias": torch.zeros(2)}, r"'linear.bias': expected \(3,\), got \(2,\)"),
    ({"linear.bias": torch.zeros(LABELS, dtype=torch.int8)}, "'linear.bias': expected .*, got I8"),
]


@pytest.mark.parametrize(("changes", "message"), MISFITS)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, Tensor], message: str) -> None:
    modules = nn.ModuleDict({"linear": nn.Linear(SIZE, LABELS)})
    found = save(tmp_path / "a.safetensors", modules, **changes)
    check_refused(lambda: check_head((take_layer(found, "linear"),), SIZE), message, ModelFormatError)
