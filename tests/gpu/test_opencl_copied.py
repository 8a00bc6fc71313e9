"""Devices with separate memory, where the host reads poison if it does not copy first, and accesses out of bounds.

Oclgrind finds no such access and no race in any OpenCL kernel. It finds a planted one of each."""

import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import opencl_platform
from infer import LLM, InvalidRequestError, ModelError, SamplingParams
from infer.compute import ops
from looping import until_freed
from test_session import make_model
from watched import script_command

pytest.importorskip("pyopencl")

opencl_platform.use_cpu_runtime()

# The platform is chosen before these modules are imported.
import pyopencl as cl  # noqa: E402

from infer.compute.backends.opencl.runtime import Memory  # noqa: E402

pytestmark = pytest.mark.slow
_POISON = 0xFF  # in each byte: NaN of every float type, and -1
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
NOISY = SamplingParams(temperature=0.9, seed=4, max_new_tokens=12)
FILTERED = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2, seed=5, max_new_tokens=12, logprobs=2)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Let the device have memory of its own. Placed tensors are poisoned on the host, and again after each copy to the
    device.
    """
    memory = ops.backend_named("opencl")._memory
    assert isinstance(memory, Memory)
    make, to_device = memory._make, memory.to_device

    def make_poisoned(host: Tensor, buffer: Any, *, is_of_host: bool) -> Any:
        placed = make(host, buffer, is_of_host=is_of_host)
        if not is_of_host:
            placed.fill(_POISON)
        return placed

    def to_device_and_poison(tensor: Tensor, first: int = 0, count: int | None = None) -> None:
        to_device(tensor, first, count)
        memory.finish()
        if not memory.placed(tensor).is_of_host:
            memory._part(tensor, first, count)[0].fill(_POISON)

    monkeypatch.setattr(memory, "is_shared", False)
    monkeypatch.setattr(memory, "_make", make_poisoned)
    monkeypatch.setattr(memory, "to_device", to_device_and_poison)
    return memory


def test_every_way_of_sampling_reads_the_device_s_results(tmp_path: Path) -> None:
    """These are noise, drafts, masks, filters, a batch, and ops that run one by one. The host samples all of them."""
    folder, found = make_model(tmp_path), []
    for device in ("cpu", "opencl"):
        llm = LLM(folder, device=device)
        results = [
            llm.generate("hello", GREEDY),
            llm.generate("hello", NOISY),
            llm.generate("abab abab abab", FILTERED, speculation="ngram"),
            llm.generate("abab abab abab", GREEDY, speculation="ngram"),
            llm.generate("one", SamplingParams(temperature=0, regex="[a-d]+", max_new_tokens=9)),
            *llm.generate_all(["a", "bc", "a longer prompt than the others"], [GREEDY, FILTERED, NOISY]),
            LLM(folder, device=device, capture=False).generate("hello", GREEDY),
        ]
        found.append([(result.token_ids, result.logprobs) for result in results] + [llm.embed(["a text"])[0].tolist()])
    assert found[0] == found[1]


@pytest.mark.parametrize("capture", [True, False])
def test_a_chunk_of_a_prompt_without_logits_copies_none(capture: bool, tmp_path: Path) -> None:
    """Only the last chunk of a prompt has logits. The memory of an empty tensor has no address."""
    folder, found = make_model(tmp_path), []
    prompt = list(range(50, 100))
    for device in ("cpu", "opencl"):
        llm = LLM(folder, device=device, capture=capture)
        session = llm.session()
        session.append(prompt)
        asked = SamplingParams(temperature=0, max_new_tokens=3, logprobs=0)
        results = [llm.generate(prompt, asked, prefill_chunk=16), session.generate(asked)]
        found.append([(result.token_ids, result.logprobs) for result in results])
    assert found[0] == found[1]


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("policy", ["none", "sliding", "snapkv"])
def test_pages_that_the_host_saves_loads_copies_and_moves_are_those_of_the_device(policy: str, tmp_path: Path) -> None:
    """A session is forked within a page, saved, loaded and continued. It forgets the same tokens as on the CPU."""
    folder, found = make_model(tmp_path / "model"), []
    settings: dict[str, Any] = {} if policy == "none" else {"eviction_policy": policy, "eviction_window": 48}
    for device in ("cpu", "opencl"):
        llm = LLM(folder, device=device, **settings)
        session = llm.session(system="a rule that is longer than a page of the cache, to be shared by all who have it")
        results = [session.send("hello", GREEDY)]
        fork = session.fork()
        results += [each.send("go on", NOISY) for each in (session, fork)]
        session.save(tmp_path / device)
        results.append(LLM(folder, device=device, **settings).load_session(tmp_path / device).send("and on", GREEDY))
        results += [each.send("and on", GREEDY) for each in (fork, session)]
        found.append([(result.token_ids, result.reused_tokens) for result in results])
    assert found[0] == found[1]
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "opencl").read_bytes()


def test_weights_and_pages_take_memory_of_the_device_while_they_live(memory: Memory, tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    until_freed()  # models of earlier tests
    before = memory.available_bytes()
    llm = LLM(folder, device="opencl")
    taken = before - memory.available_bytes()
    assert taken > sum(
        part.num_bytes for each in llm.model.projections if each.label.endswith("gate_up") for part in each.parts
    )
    assert ops.backend_named("opencl").available_bytes() == before - taken
    del llm
    until_freed()
    assert memory.available_bytes() == before


def test_a_model_too_large_for_the_device_is_refused_before_loading(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda: 200_000)
    with pytest.raises(ModelError, match=r"of weights, .* of cache .*, but 0 MB are available: "):
        LLM(folder, device="opencl", max_seq_len=256)
    with pytest.raises(InvalidRequestError, match=r"has room for 0 MB in one piece, and 1\.0 MB are needed: a smaller"):
        memory.zeros((1_000_000,), torch.uint8)
    monkeypatch.undo()
    monkeypatch.setattr(cl, "Buffer", Mock(side_effect=cl.MemoryError()))
    with pytest.raises(InvalidRequestError, match=r"has no 1\.0 MB free, because other work uses its memory"):
        memory.zeros((1_000_000,), torch.uint8)


def checked(*planted: str) -> str:
    """Return the report of Oclgrind."""
    command = script_command(Path(__file__).parents[1] / "helpers" / "opencl_checked.py", *planted)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout + result.stderr


@pytest.mark.slow(rest=0)
def test_oclgrind_finds_no_access_out_of_bounds_and_no_race() -> None:
    report = checked()
    assert "Invalid" not in report
    assert "race" not in report


@pytest.mark.slow(rest=0)
@pytest.mark.parametrize(("planted", "words"), [("bounds", "Invalid write"), ("race", "data race")])
def test_oclgrind_finds_planted_faults(planted: str, words: str) -> None:
    assert words in checked(planted)
