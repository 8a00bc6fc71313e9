"""`experts_memory`: the tokens of a model whose experts are all in memory, its memory, and the refusals."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen3MoeConfig

from byte_tokenizer import write_byte_tokenizer
from commands import run
from converted import convert
from infer import LLM, InferError, InvalidRequestError, ModelError, SamplingParams
from infer.cli.chat_loop import PlainInput, converse
from infer.cli.chat_session import ChatSession
from infer.cli.commands.serve_command import _lines, _plan
from infer.cli.terminal import experts_remark
from infer.compute.backends.cpu.experts import expert_file
from infer.compute.backends.cpu.experts.pool_plan import plan_pools
from infer.errors import ModelFormatError
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.catalog.header_facts import plan_served
from infer.models.compile_ahead import make_outline
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_checked
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.tensors import expected_shapes
from infer.serving.distributed.shelved_model import ModelSource
from infer.serving.server_settings import ServerSettings
from path_cases import CONFIGS, MERGES, SAMPLERS, make_folder, varied_ids
from steps import logits_of
from tiny import BY_NAME, Tiny, make_tiny

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe", "llama4", "gemma4_moe"]
WHOLE = 10**12
IDS = [3 + (7 * index + index * index // 5) % 90 for index in range(60)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the packed experts."""
    monkeypatch.setattr(expert_file, "base_folder", lambda: tmp_path)
    return tmp_path / "experts"


def least_memory(path: Path, **settings: Any) -> int:
    """Return the smallest memory that the experts of a model may have."""
    checkpoint = open_checkpoint(path)
    outline = make_outline(make_architecture(checkpoint.config), checkpoint.tensors, ModelSettings.of(settings))
    pools = plan_pools(outline.architecture, outline.types, WHOLE)
    return sum(pool.table_bytes + pool.num_chosen * pool.frame_bytes for pool in pools)


@pytest.mark.slow(cases=3, rest=5)
@pytest.mark.parametrize(("form", "name"), list(product(["folder", "GGUF"], FAMILIES)))
@pytest.mark.parametrize("weights", ["auto", "q8"])
def test_logits_have_the_bits_of_experts_in_memory(form: str, name: str, weights: str, tmp_path: Path) -> None:
    made = tmp_path / "model"
    make_tiny(BY_NAME[name], made)
    path = made if form == "folder" else convert(made, tmp_path / "model.gguf")
    least = least_memory(path, weights=weights)

    def logits(**memory: int) -> torch.Tensor:
        settings = ModelSettings.of({"weights": weights, "max_seq_len": 100, **memory})
        return logits_of(load_checked(open_checkpoint(path), None, settings), IDS)

    expected = logits()
    for most_bytes in (least, least * 3 // 2, WHOLE):
        assert torch.equal(logits(experts_memory=most_bytes), expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("experts", tmp_path_factory.mktemp("experts"))


def answers(llm: LLM) -> Iterator[list[int]]:
    """Yield the tokens of answers alone, mixed in a batch, with drafts, and after a shared beginning."""
    prompts = [varied_ids(count) for count in (1, 5, 40, 90)]
    for index, values in enumerate(SAMPLERS.values()):
        yield llm.generate(prompts[index % 4], max_new_tokens=12, **values).token_ids
    for chunk in (1, 7, 64):
        mixed = llm.generate_all(prompts * 2, max_new_tokens=10, temperature=0.7, seed=chunk, prefill_chunk=chunk)
        yield from (each.token_ids for each in mixed)
    yield llm.generate(varied_ids(40), max_new_tokens=20, temperature=0, speculation="ngram").token_ids
    yield llm.generate(varied_ids(90)[:70], max_new_tokens=5, temperature=0).token_ids


@pytest.mark.parametrize("weights", ["auto", "q8"])
def test_answers_are_equal_for_every_memory_batch_and_chunk(model: Path, weights: Any) -> None:
    with LLM(model, weights=weights) as llm:
        expected = list(answers(llm))
    least = least_memory(model, weights=weights)
    for most_bytes in (least, 2 * least, WHOLE):
        with LLM(model, weights=weights, experts_memory=most_bytes, reuse_prefixes=True) as llm:
            assert list(answers(llm)) == expected


@pytest.mark.slow
def test_two_models_at_once_have_their_own_experts(model: Path) -> None:
    least = least_memory(model)
    with LLM(model) as llm:
        expected = list(answers(llm))
    with LLM(model, experts_memory=least) as first, LLM(model, experts_memory=2 * least) as second:
        assert list(answers(first)) == list(answers(second)) == list(answers(first)) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_expert_that_cannot_be_read_ends_answers_with_its_name_and_never_with_other_tokens(
    model: Path, folder: Path
) -> None:
    with LLM(model) as llm:
        expected = llm.generate(varied_ids(40), max_new_tokens=12, temperature=0).token_ids
    with LLM(model, experts_memory=least_memory(model)) as llm:
        (path,) = folder.glob("*.experts")
        content = path.read_bytes()
        path.write_bytes(content[:-1000] + bytes(1000))
        problem = ""
        try:
            result = llm.generate(varied_ids(40), max_new_tokens=12, temperature=0)
            assert result.finish_reason == "error"
            problem = result.error or ""
        except InferError as error:
            problem = str(error)
        assert "of layer 1 in" in problem, problem
        assert "is damaged" in problem
    with LLM(model, experts_memory=least_memory(model)) as llm:
        assert llm.generate(varied_ids(40), max_new_tokens=12, temperature=0).token_ids == expected


@pytest.mark.parametrize("form", ["folder", "GGUF"])
def test_experts_packed_while_their_weights_were_written_to_are_not_kept(
    form: str, model: Path, tmp_path: Path
) -> None:
    """Other bytes were there for a moment only, and the times are the old ones."""
    path = shutil.copytree(model, tmp_path / "model") if form == "folder" else convert(model, tmp_path / "model.gguf")
    (file,) = [path] if form == "GGUF" else path.glob("*.safetensors")
    content, status = file.read_bytes(), file.stat()
    settings = ModelSettings(max_seq_len=100, experts_memory=least_memory(path))

    def change(layer: int, _: int) -> None:
        if layer == 1:
            file.write_bytes(content[: len(content) // 3] + bytes(len(content) - len(content) // 3))

    with pytest.raises(ModelFormatError):
        load_checked(open_checkpoint(path), None, settings, change)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    expected = logits_of(load_checked(open_checkpoint(path), None, replace(settings, experts_memory=None)), IDS)
    assert torch.equal(logits_of(load_checked(open_checkpoint(path), None, settings), IDS), expected)


class Header(NamedTuple):
    """The part of a tensor's header that decides its memory."""

    type: str
    shape: tuple[int, ...]


def test_memory_of_experts_is_counted_and_offered() -> None:
    sizes: Any = {"num_experts": 128, "num_hidden_layers": 8, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    architecture = make_architecture(Qwen3MoeConfig(**sizes, head_dim=128, num_attention_heads=32).to_dict())
    tensors = {name: Header("Q8_0", shape) for name, shape in expected_shapes(architecture).items()}

    def budget(memory: int | None) -> MemoryBudget:
        load = LoadSettings(experts_memory=memory)
        return MemoryBudget.of(architecture, tensors, load, ModelSettings().cache, num_tokens=100)

    whole = budget(None)
    most = 8 * 128 * 3 * 768 * 2048 * 34 // 32  # bytes of all experts
    for memory in (most // 100, most // 3, most * 9 // 10):
        assert whole.weights - most < budget(memory).weights <= whole.weights - most + memory
        assert budget(memory).weights > whole.weights - most + memory * 0.98
    assert whole.weights <= budget(2 * most).weights < whole.weights * 1.001
    with pytest.raises(InvalidRequestError, match="experts_memory must be at least 41 MB for this model, which is"):
        budget(10**6)
    available = whole.model - most // 2
    with pytest.raises(ModelError, match=r"MB are available: experts_memory=([0-9]+)MB fits") as refusal:
        whole.check("model", available)
    fitting = int(re.findall(r"experts_memory=([0-9]+)MB", str(refusal.value))[0]) * 10**6
    assert budget(fitting).model <= available < budget(fitting + 2 * 10**7).model
    budget(fitting).check("model", available)
    with pytest.raises(ModelError, match=rf"experts_memory={fitting // 10**6}MB fits"):
        budget(most * 3 // 4).check("model", available)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a model whose experts take 7 MB with 8 bits."""
    folder = tmp_path_factory.mktemp("large") / "large"
    config = {**CONFIGS["experts"].to_dict(), "num_experts": 64, "moe_intermediate_size": 256}
    make_tiny(Tiny("large", Qwen2MoeConfig(**config)), folder)
    write_byte_tokenizer(folder, merges=MERGES)
    return folder


class Silent(PlainInput):
    """A person at a terminal who types nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_interactive = True

    def read(self, typed: str = "") -> None:
        return None


def test_experts_that_do_not_fit_are_read_from_a_file(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(large, weights="q8", threads=2) as llm:
        expected = llm.generate(IDS, max_new_tokens=20, temperature=0).token_ids
    settings, load = ModelSettings(weights="q8", threads=2), LoadSettings(weights="q8", num_threads=2)
    checkpoint = open_checkpoint(large)
    headers = make_architecture(checkpoint.config), checkpoint.tensors
    budget = MemoryBudget.of(*headers, load, settings.cache, num_tokens=headers[0].own_length)
    monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda: budget.model)
    with pytest.raises(ModelError, match=r"large needs .* MB are available: weights=q8 fits"):
        LLM(large, threads=2)
    available = budget.model - 3_000_000
    monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda: available)
    message = r"large needs \d+ MB here, but \d+ MB are available: 2 MB of it are for experts, and the others are read"
    with pytest.warns(UserWarning, match=message):
        llm = LLM(large, weights="q8", threads=2)
    with llm:
        frames: Any = llm.model.layers[0].feed_forward.experts.frames  # type: ignore[union-attr]
        assert 1_500_000 < frames.pool.plan.num_bytes <= 3_000_000
        assert llm.generate(IDS, max_new_tokens=20, temperature=0).token_ids == expected
        remark = experts_remark(frames.pool.plan.num_bytes, frames.store.path)
        assert remark.endswith(f" MB of experts in memory, the others in {frames.store.path} (--experts-memory)")
        assert f"experts  {remark}" in _lines(llm, ServerSettings(), "http://host")
        monkeypatch.setattr("infer.cli.chat_loop._editor", lambda: None)
        monkeypatch.setattr("infer.cli.chat_loop.PlainInput", Silent)
        converse(ChatSession(llm, "large", SamplingParams()))
        assert remark in capsys.readouterr().err.splitlines()
    plan = plan_served(str(large), settings, most_bytes=available + budget.process, share_bytes=0)
    assert plan.cache is not None
    assert plan.num_bytes <= available + budget.process
    assert 1_000_000 <= (plan.cache.load.experts_memory or 0) <= 3_000_000
    monkeypatch.setattr("infer.cli.commands.explain_command.available_memory_bytes", lambda: available + budget.process)
    shown = run("estimate", str(large), "--weights", "q8", "--threads", "2").out
    assert "experts in 2.0 MB at most and in a file" in shown
    assert "it fits" in shown


def test_a_served_model_has_the_memory_for_experts_that_its_plan_gives_it(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the model does not choose it again, from the memory that is free when it loads."""
    settings = ModelSettings(weights="q8", threads=2)
    options: Any = SimpleNamespace(settings=settings, server=ServerSettings())
    source = ModelSource("large", str(large))
    whole = _plan(options, 0, source, WHOLE)
    assert "--experts-memory" not in whole.options
    plan = _plan(options, 0, source, whole.num_bytes - 3_000_000)
    given = {name: int(value) for name, value in zip(plan.options[::2], plan.options[1::2], strict=True)}
    memory = given.pop("--experts-memory")
    assert given == dict(zip(whole.options[::2], map(int, whole.options[1::2]), strict=True))
    own = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    for available in (plan.num_bytes, WHOLE):
        monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda free=available: free)
        with LLM(large, weights="q8", threads=2, experts_memory=memory, **own) as llm:
            store: Any = llm.host.model.experts
            assert memory - 100_000 < store.memory_bytes <= memory


def test_memory_is_taken_for_experts_only_up_to_the_limit(model: Path) -> None:
    least = least_memory(model)
    with LLM(model, experts_memory=2 * least) as llm:
        frames: Any = llm.model.layers[0].feed_forward.experts.frames  # type: ignore[union-attr]
        assert least < frames.pool.plan.num_bytes <= 2 * least
        assert len(frames.pool.bytes) <= 2 * least


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"experts_memory": 1}, "experts_memory must be at least 1 MB for this model"),
        ({"experts_memory": "6GX"}, r"experts_memory must be a number of bytes or a size such as"),
        (
            {"experts_memory": "6GB", "tensor_parallel": 2},
            "experts_memory works in one process, not with tensor_parallel=2",
        ),
    ],
)
def test_bad_memories_are_refused_in_a_line(model: Path, settings: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        LLM(model, **settings)


def test_a_model_without_experts_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="experts_memory has no effect: the model has no experts"):
        LLM(make_folder("llama", tmp_path / "llama"), experts_memory="1GB").close()
