"""Available memory: the smaller one of the machine's and the container's, at load and for every row.

The default context is the model's own, up to the default limit, if memory suffices.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, InvalidRequestError, ModelError, SamplingParams
from infer.compute.backends import base
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import GPU_STEP, HOST_STEP, StepLimits
from infer.engine.runner.runner import make_cache
from infer.files import open_checkpoint
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings, pool_bytes
from infer.system.available_memory import available_memory_bytes, total_memory_bytes
from refusals import check_refused
from test_session import make_model

MB = 2**20
MEMINFO = f"MemTotal: {64 * 1024} kB\nMemFree: 100 kB\nMemAvailable: {32 * 1024} kB\n"
V2 = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"}
V1 = {
    "proc/self/cgroup": "5:memory:/a/b\n4:cpu,cpuacct:/\n",
    "proc/self/mountinfo": "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}


def write(root: Path, text_by_name: dict[str, str]) -> Path:
    for name, text in text_by_name.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def grouped(path: str, **limits: object) -> dict[str, str]:
    """Return the files of a machine whose group has these limits."""
    files = {f"sys/fs/cgroup/{path}/memory.{name}": f"{value}\n" for name, value in limits.items()}
    return {"proc/meminfo": MEMINFO, **(V1 if path.startswith("memory") else V2), **files}


MACHINES: dict[str, tuple[dict[str, str], int | None, int | None]] = {
    "unknown": ({}, None, None),
    "machine": ({"proc/meminfo": MEMINFO}, 32 * MB, 64 * MB),
    "group": (grouped("a/b", max=8 * MB, current=5 * MB, stat=f"anon 1\ninactive_file {2 * MB}"), 5 * MB, 8 * MB),
    "group above": (grouped("a/b", max="max") | grouped("a", max=16 * MB, current=15 * MB), 1 * MB, 16 * MB),
    "version 1, over it": (grouped("memory/a/b", limit_in_bytes=4 * MB, usage_in_bytes=6 * MB), 0, 4 * MB),
    "version 1, no limit": (grouped("memory/a/b", limit_in_bytes=9223372036854771712), 32 * MB, 64 * MB),
    "large group": (grouped("a/b", max=100 * MB, current=10 * MB), 32 * MB, 64 * MB),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_least_of_the_machine_and_its_groups_counts(tmp_path: Path, machine: str) -> None:
    files, available, total = MACHINES[machine]
    root = write(tmp_path, files)
    assert (available_memory_bytes(root), total_memory_bytes(root)) == (available, total)


def set_available(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda: num_bytes)


def row_bytes(llm: LLM, num_tokens: int) -> int:
    kv = sum(pool_bytes(llm.architecture.attention, CacheSettings(), "f16", num_tokens, 1))
    return kv + 12 * llm.architecture.vocab_size + 8 * num_tokens


@pytest.mark.slow
def test_a_model_has_pages_for_as_many_contexts_as_fit_and_batches_wait_for_them(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=95, ignore_eos=True)
    prompts: list[Any] = [[40 + index] * 5 for index in range(20)]
    expected = [llm.generate(each, params).token_ids for each in prompts]
    # The check counts the workspace.
    monkeypatch.setattr("infer.models.from_checkpoint.MemoryBudget.check", lambda *arguments: None)
    for count, found in ((2.5, 2), (1.2, 1), (100, 8)):
        set_available(monkeypatch, int(count * row_bytes(llm, 400)))
        small = LLM(make_model(tmp_path), max_seq_len=400)
        assert small.host.runner.cache.pool_pages == [found * 7]
        assert [result.token_ids for result in small.generate_all(prompts, params, batch_size=64)] == expected


def test_a_row_that_does_not_fit_is_refused_with_one_that_would(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    set_available(monkeypatch, row_bytes(llm, 130))
    check_refused(lambda: make_cache(llm.model, 400), r"1 x 400 tokens of cache .* max_seq_len=1(28|3\d) fits")
    make_cache(llm.model, 120)
    set_available(monkeypatch, 10)
    check_refused(lambda: make_cache(llm.model, 400), "free some of it")


def test_a_pool_that_does_not_fit_is_refused_with_one_that_would(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    set_available(monkeypatch, 4 * row_bytes(llm, 400))
    with pytest.raises(
        InvalidRequestError, match=r"5 x 400 tokens of cache in 40 pages need .* available: pool_pages=\d\d fits"
    ) as error:
        make_cache(llm.model, 400, 5, pool_pages=40)
    pages = int(str(error.value).rpartition("pool_pages=")[2].split()[0])
    assert 20 < pages < 35
    make_cache(llm.model, 400, 5, pool_pages=pages)
    check_refused(lambda: make_cache(llm.model, 400, 5, pool_pages=pages + 1), f"pool_pages={pages} fits")


SETTINGS, LOAD = CacheSettings(), LoadSettings()


@cache
def smollm2() -> tuple[Any, Any]:
    checkpoint = open_checkpoint("smollm2")
    return make_architecture(checkpoint.config), checkpoint.tensors


def test_the_default_is_the_models_own_up_to_a_limit() -> None:
    assert [context_length(asked, smollm2()[0], SETTINGS) for asked in (None, 99)] == [8192, 99]
    for wrong in (1, 0, -5, 8193):
        with pytest.raises(InvalidRequestError, match="max_seq_len must be"):
            context_length(wrong, smollm2()[0], SETTINGS)


def test_if_memory_is_short_the_default_context_is_the_part_that_fits() -> None:
    def fits(available: int | None) -> int:
        budget = MemoryBudget.of(*smollm2(), LOAD, SETTINGS, num_tokens=8192)
        return budget.with_length_that_fits(available).num_tokens

    whole = MemoryBudget.of(*smollm2(), LOAD, SETTINGS, num_tokens=8192).model
    assert fits(None) == fits(whole) == 8192
    part = fits(whole - 50_000_000)
    assert part in range(512, 8192, 64)
    assert MemoryBudget.of(*smollm2(), LOAD, SETTINGS, num_tokens=part).model <= whole - 50_000_000
    assert fits(1_000_000) == 8192  # no useful part fits, so the refusal names the whole context


def test_a_cut_default_is_a_warning_and_a_requested_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    room = MemoryBudget.of(*smollm2(), LoadSettings(num_threads=1), SETTINGS, num_tokens=2048).model + 100_000
    monkeypatch.setattr(base, "available_memory_bytes", lambda: room)
    with pytest.warns(UserWarning, match=r"the context is [\d,]+ tokens, not 8,192: \d+ MB of memory are available"):
        llm = LLM("smollm2", threads=1)
    assert 512 <= llm.max_seq_len <= 2112
    check_refused(lambda: LLM("smollm2", threads=1, max_seq_len=4096), r"max_seq_len=\d+ fits", ModelError)


def test_a_gpu_with_little_memory_has_smaller_steps() -> None:
    def budget(device: str = "cuda", **limits: int) -> MemoryBudget:
        load = replace(LOAD, device=device, limits=GPU_STEP._replace(**limits) if limits else None)
        return MemoryBudget.of(*smollm2(), load, SETTINGS, num_tokens=2048)

    def buffers(tokens: int) -> int:
        return budget(tokens=tokens).buffers[0]

    def fits(available: int | None, device: str = "cuda") -> StepLimits:
        return budget(device).with_step_that_fits(available).load.step

    assert (fits(None), fits(8 * buffers(8192)).tokens) == (GPU_STEP, 8192)
    assert (fits(8 * buffers(8192) - 8).tokens, fits(8 * buffers(4096)).tokens) == (4096, 4096)
    history = budget().history
    assert (fits(32 * history).logits, fits(32 * history - 32).logits, fits(16 * history).logits) == (512, 256, 256)
    whole = budget(tokens=1024, logits=128)
    assert (fits(whole.model).tokens, fits(1), fits(1, "cpu")) == (512, (512, 64), HOST_STEP)


def test_a_model_is_loaded_for_the_steps_that_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, prompt = make_model(tmp_path, context=1024), [number % 40 + 3 for number in range(900)]
    monkeypatch.setattr(base.Backend, "step_limits", GPU_STEP)
    llm = LLM(folder, threads=1)
    assert llm._host.model.step_limits == GPU_STEP
    expected = llm.generate(prompt, max_new_tokens=4, prefill_chunk=1024, seed=1).token_ids
    monkeypatch.setattr(base, "available_memory_bytes", lambda: 60_000_000)
    llm = LLM(folder, threads=1)
    assert 512 <= llm._host.model.step_limits.tokens < 8192
    assert llm.generate(prompt, max_new_tokens=4, prefill_chunk=1024, seed=1).token_ids == expected
