"""A policy that waits until memory is short: nothing is evicted before, and evicted memory is freed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infer import LLM
from infer.compute.kvcache import paged
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, varied_ids

WINDOW, PREFIX, PAGE = 48, 3, 16
SLIDING = CacheSettings(eviction_policy="sliding", eviction_window=WINDOW, protected_prefix=PREFIX)
LATE = replace(SLIDING, memory_threshold_mb=1)
PLAIN = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)


def make_llm(llama: Path, policy: str = "sliding", threshold: int | None = 1) -> LLM:
    settings = {"eviction_policy": policy, "eviction_window": WINDOW, "protected_prefix": PREFIX}
    return LLM(llama, **settings, memory_threshold_mb=threshold)  # type: ignore[arg-type]


def test_without_a_policy_a_threshold_has_no_effect_and_a_warning_says_so(llama: Path) -> None:
    with pytest.warns(UserWarning, match="^memory_threshold_mb=1: no effect with eviction_policy none"):
        late = LLM(llama, memory_threshold_mb=1)
    with pytest.warns(UserWarning, match="^eviction_window=48, protected_prefix=3: no effect"):
        plain = make_llm(llama, "none", None)
    ids = varied_ids(3 * PAGE)
    assert late.generate(ids, PLAIN).token_ids == plain.generate(ids, PLAIN).token_ids


def set_available(monkeypatch: pytest.MonkeyPatch, megabytes: int | None) -> None:
    monkeypatch.setattr(paged, "available_memory_bytes", lambda: None if megabytes is None else megabytes * 2**20)


@pytest.mark.parametrize("policy", ["sliding", "snapkv"])
@pytest.mark.parametrize("available", [1, None], ids=["enough", "unknown"])
def test_nothing_is_evicted_while_there_is_memory(
    llama: Path, policy: str, available: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_available(monkeypatch, available)
    whole = LLM(llama).generate(varied_ids(100), PLAIN).token_ids
    assert make_llm(llama, policy).generate(varied_ids(100), PLAIN).token_ids == whole
    assert make_llm(llama, policy, None).generate(varied_ids(100), PLAIN).token_ids != whole


def test_short_of_memory_from_the_start_it_is_sliding(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row slides once a page is full. If the prompt is read page by page, that is before the window is full."""
    set_available(monkeypatch, 0)
    expected = make_llm(llama, threshold=None).generate(varied_ids(100), PLAIN)
    llm = make_llm(llama)
    settings = replace(LATE, page_tokens=PAGE)
    assert llm._host is not None
    engine = llm._host.engine_if_any = Engine(Runner(llm.model, llm.max_seq_len, settings=settings))
    llm._host.loop.own(engine)
    assert llm.generate(varied_ids(100), PLAIN, prefill_chunk=PAGE).token_ids == expected.token_ids


def test_short_of_memory_a_prompt_is_compressed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_llm(llama, "snapkv", None).generate(varied_ids(60), PLAIN)
    llm, prompt = make_llm(llama, "snapkv"), varied_ids(60)  # no page is full before the prompt ends
    set_available(monkeypatch, 0)
    assert llm.generate(prompt, PLAIN).token_ids == expected.token_ids


@pytest.mark.parametrize("policy", ["sliding", "snapkv"])
def test_a_session_that_slid_for_want_of_memory_is_saved_and_loaded(
    llama: Path, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session stays as it was: evicted tokens do not return when there is memory again."""
    llm = make_llm(llama, policy)
    session = llm.session()
    set_available(monkeypatch, 0)
    session.append(varied_ids(110))
    set_available(monkeypatch, 1)
    session.save(tmp_path / "saved")
    loaded = llm.load_session(tmp_path / "saved")
    cache, slots = llm._opened.runner.cache, [each._cache.lease.slot or 0 for each in (session, loaded)]
    assert loaded.num_cached_tokens == 110
    assert cache.groups[0].state(slots[1])._replace(first=0) == cache.groups[0].state(slots[0])
    assert (cache.groups[0].windows[slots] == WINDOW - PREFIX).all()
    cache.check_integrity()
    wanted, found = session.generate(PLAIN), loaded.generate(PLAIN)
    assert (found.token_ids, found.reused_tokens) == (wanted.token_ids, wanted.reused_tokens)
    assert found.reused_tokens >= 109
    assert found.token_ids != LLM(llama).generate(varied_ids(110), PLAIN).token_ids


@torch.inference_mode()
def test_the_memory_of_evicted_pages_returns_to_the_system(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_available(monkeypatch, 1)
    model = LLM(llama, max_seq_len=CONTEXT).model
    context = Runner(model, 2048, num_slots=2, settings=replace(LATE, page_tokens=256))
    context.extend(0, varied_ids(100))
    cache = context.cache
    cache._lengths[0] = 0  # the others are not run: a page of the system has room for more positions than the model has
    cache.reserve(0, 2000)
    for layer in cache.memory.layers:
        layer.keys.fill_(1)
        layer.values.fill_(1)
    cache.commit(0, 1500)
    assert len(cache.groups[0].table.page_by_index(0)) == 8
    cache.check_integrity()
    set_available(monkeypatch, 0)
    cache.commit(0, 300)
    cache.check_integrity()
    assert sorted(cache.groups[0].table.page_by_index(0)) == [0, 6, 7]  # the prefix, the window, the reserved page
    keys = cache.memory.layers[0].keys
    assert keys[:, 1:6].count_nonzero() < keys[:, 1:6].numel() / 2
    assert keys[:, :1].all()
    assert keys[:, 6:8].all()
    assert keys[:, 8:].all(), "another row's pages"
    cache.truncate(0, 0)
    assert cache.groups[0].can_compress(0)
