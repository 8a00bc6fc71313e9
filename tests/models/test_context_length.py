"""Claims about the default context: the model's own, up to the default limit, if memory suffices."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infer import LLM
from infer.compute.backends import base
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import GPU_STEP, HOST_STEP
from infer.errors import InvalidRequestError, ModelError
from infer.files import open_checkpoint
from infer.models.families import make_architecture
from infer.models.memory.context_length import context_length, fitting_length, fitting_step
from infer.models.memory.memory_estimate import LoadSettings, estimate
from refusals import check_refused
from test_session import make_model

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
        return fitting_length(*smollm2(), LOAD, SETTINGS, most=8192, available=available)

    whole = estimate(*smollm2(), LOAD, SETTINGS, num_tokens=8192).model
    assert fits(None) == fits(whole) == 8192
    part = fits(whole - 50_000_000)
    assert part in range(512, 8192, 64)
    assert estimate(*smollm2(), LOAD, SETTINGS, num_tokens=part).model <= whole - 50_000_000
    assert fits(1_000_000) == 8192  # no useful part fits, so the refusal names the whole context


def test_a_cut_default_is_a_warning_and_a_requested_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    room = estimate(*smollm2(), LoadSettings(num_threads=1), SETTINGS, num_tokens=2048).model + 100_000
    monkeypatch.setattr(base, "available_memory_bytes", lambda: room)
    with pytest.warns(UserWarning, match=r"the context is [\d,]+ tokens, not 8,192: \d+ MB of memory are available"):
        llm = LLM("smollm2", threads=1)
    assert 512 <= llm.max_seq_len <= 2112
    check_refused(lambda: LLM("smollm2", threads=1, max_seq_len=4096), r"max_seq_len=\d+ fits", ModelError)


def test_a_gpu_with_little_memory_has_smaller_steps() -> None:
    def workspace(step_tokens: int) -> int:
        load = replace(LOAD, device="cuda", step_tokens=step_tokens)
        return estimate(*smollm2(), load, SETTINGS, num_tokens=2048).workspace

    def fits(available: int | None, device: str = "cuda", most: int = GPU_STEP.tokens) -> int:
        sizes = {"num_tokens": 2048, "most": most, "available": available}
        return fitting_step(*smollm2(), replace(LOAD, device=device), SETTINGS, **sizes)

    assert fits(None) == fits(8 * workspace(8192)) == 8192
    assert fits(8 * workspace(8192) - 8) == fits(8 * workspace(4096)) == 4096
    assert (fits(8 * workspace(1024)), fits(1), fits(1, "cpu", HOST_STEP.tokens)) == (1024, 512, HOST_STEP.tokens)


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
