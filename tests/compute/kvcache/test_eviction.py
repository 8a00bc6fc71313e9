"""Answers over caches that evict are the same by every path, and equal to a definition by visible tokens.

If a policy waits until memory is short, nothing is evicted before. SnapKV keeps the tokens that a prompt's last tokens
attend to.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import path_cases
from extent import slow_except
from infer import LLM, InvalidRequestError, SamplingParams, Session
from infer.compute.kvcache import paged
from infer.compute.kvcache.cache_settings import OBSERVED_TOKENS, CacheSettings
from infer.compute.kvcache.snapkv import choose_slots
from infer.compute.operands.step import Chunk
from infer.compute.quantization.kv_layout import decode_keys, decode_values, key_parts, value_parts
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from path_cases import CASES, CONTEXT, Outcome, Place, Way, World, make_folder, varied_ids
from refusals import check_refused

STEP = 16  # tokens in one step, so few that windows are much shorter than the text and pages are used again
SLIDING = CacheSettings(page_tokens=16, eviction_policy="sliding", eviction_window=24, protected_prefix=3)
WORLDS = {"sliding": ("llama", SLIDING), "windows": ("windows", CacheSettings(page_tokens=16))}
WORLDS |= {"sliding beside windows": ("windows", SLIDING), "sliding beside chunks": ("chunks", SLIDING)}
WORLDS |= {"q8": ("wide", replace(SLIDING, kv_type="q8")), "q4": ("wide", replace(SLIDING, kv_type="q4"))}
WAYS = [Way("half", 7), Way("random", 16, 1), Way("right", 1, 4), Way("none", 16), Way("half", 7, capture=False)]
SOME = CASES[::6]


@pytest.fixture(scope="module", params=slow_except(["sliding"], WORLDS))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    name, settings = WORLDS[request.param]
    return replace(path_cases.make_world(name, tmp_path_factory.mktemp(name)), settings=settings)


def check_copies(session: Session, llm: LLM, params: SamplingParams, folder: Path) -> None:
    """Check that a session, its fork and its copy on disk answer as the model answers the whole text."""
    before, other = session.token_ids, session.fork()
    session.save(folder / "saved")
    wanted = llm.generate(before, params).token_ids
    for each in (session, other, llm.load_session(folder / "saved")):
        assert each.generate(params).token_ids == wanted


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, Outcome]:
    outcomes = path_cases.all_by_definition(world, SOME)
    return {case.name: outcome for case, outcome in zip(SOME, outcomes, strict=True)}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_cache_that_evicts_gives_the_answer_of_no_cache(world: World, expected: dict[str, Outcome], way: Way) -> None:
    runner = path_cases.make_runner(world, way, step_tokens=STEP)
    assert isinstance(runner, Runner)
    for case in SOME:
        result = path_cases.run_alone(world, case, way, expected[case.name].token_ids, Place(world, way, runner))
        assert Outcome.of(result) == expected[case.name], case.name
        runner.cache.check_integrity()
    tables = [rows.table for rows in runner.cache.groups]
    assert any(table.pages_per_row < CONTEXT // 16 for table in tables)


@pytest.mark.parametrize("way", [Way("half", 64), Way("none", 7, 64)], ids=str)
def test_rows_that_evict_side_by_side_give_equal_answers(world: World, expected: dict[str, Outcome], way: Way) -> None:
    said = [expected[case.name].token_ids for case in SOME]
    results = path_cases.run_batch(world, SOME, way, 3, said)
    assert [Outcome.of(result) for result in results] == [expected[case.name] for case in SOME]


WINDOW, PREFIX, PAGE = 48, 3, 16
PLAIN = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1, seed=3, max_new_tokens=40, ignore_eos=True)
SNAPKV = CacheSettings(page_tokens=PAGE, eviction_policy="snapkv", eviction_window=WINDOW, protected_prefix=PREFIX)
LATE = replace(SNAPKV, eviction_policy="sliding", memory_threshold_mb=1)


def make_llm(folder: Path, policy: str = "snapkv", **settings: object) -> LLM:
    given = {"eviction_window": WINDOW, "protected_prefix": PREFIX, **settings}
    return LLM(folder, eviction_policy=policy, **given)  # type: ignore[arg-type]


def make_late(llama: Path, policy: str = "sliding") -> LLM:
    return make_llm(llama, policy, memory_threshold_mb=1)


def test_a_window_as_long_as_the_text_changes_nothing(llama: Path) -> None:
    full, sliding = LLM(llama), LLM(llama, eviction_policy="sliding", eviction_window=CONTEXT)
    prompt = varied_ids(CONTEXT - 12)
    assert sliding.logits(prompt).equal(full.logits(prompt))
    assert sliding.generate(prompt, PLAIN).token_ids == full.generate(prompt, PLAIN).token_ids
    shorter = LLM(llama, eviction_policy="sliding", eviction_window=CONTEXT // 2)
    assert not shorter.logits(prompt).equal(full.logits(prompt))


def test_a_text_with_a_sliding_window_continues_beyond_the_context(llama: Path) -> None:
    check_refused(lambda: LLM(llama, max_seq_len=1500), r"own 160, got 1500: only eviction_policy sliding allows more")
    llm = LLM(llama, max_seq_len=1500, eviction_policy="sliding", eviction_window=40)
    result = llm.generate(varied_ids(100), replace(PLAIN, max_new_tokens=None))
    assert (len(result.token_ids), result.finish_reason, result.stop_reason) == (1400, "length", "context")
    again = llm.generate(varied_ids(100) + result.token_ids[:900], replace(PLAIN, max_new_tokens=50))
    assert again.token_ids == result.token_ids[900:950]


def test_a_full_context_ends_an_answer_where_nothing_is_forgotten(llama: Path) -> None:
    result = LLM(llama).generate(varied_ids(100), replace(PLAIN, max_new_tokens=None))
    assert (len(result.token_ids), result.finish_reason, result.stop_reason) == (CONTEXT - 100, "length", "context")


def test_a_session_that_goes_back_beyond_its_cache_answers_as_a_new_model(llama: Path, tmp_path: Path) -> None:
    llm = LLM(llama, max_seq_len=1500, eviction_policy="sliding", eviction_window=40)
    session = llm.session()
    session.append(varied_ids(1200))
    session.generate(PLAIN)
    for count in (3, 30, 500, 2, 600):
        session.rewind(count)
        left = len(session.token_ids)
        assert session.num_cached_tokens in (0, left, left - 1)
        assert session.num_cached_tokens or count >= 500, "what is near was forgotten"
        check_copies(session, llm, PLAIN, tmp_path)


def test_without_a_policy_a_threshold_has_no_effect_and_a_warning_says_so(llama: Path) -> None:
    with pytest.warns(UserWarning, match="^memory_threshold_mb=1: no effect with eviction_policy none"):
        late = LLM(llama, memory_threshold_mb=1)
    with pytest.warns(UserWarning, match="^eviction_window=48, protected_prefix=3: no effect"):
        plain = make_llm(llama, "none")
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
    assert make_late(llama, policy).generate(varied_ids(100), PLAIN).token_ids == whole
    assert make_llm(llama, policy).generate(varied_ids(100), PLAIN).token_ids != whole


def test_short_of_memory_from_the_start_it_is_sliding(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row slides once a page is full. If the prompt is read page by page, that is before the window is full."""
    set_available(monkeypatch, 0)
    expected = make_llm(llama, "sliding").generate(varied_ids(100), PLAIN)
    llm = make_late(llama)
    assert llm._host is not None
    engine = llm._host.engine_if_any = Engine(Runner(llm.model, llm.max_seq_len, settings=LATE))
    llm._host.loop.own(engine, engine.runner.model.backend)
    assert llm.generate(varied_ids(100), PLAIN, prefill_chunk=PAGE).token_ids == expected.token_ids


def test_short_of_memory_a_prompt_is_compressed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_llm(llama).generate(varied_ids(60), PLAIN)
    llm, prompt = make_late(llama, "snapkv"), varied_ids(60)  # no page is full before the prompt ends
    set_available(monkeypatch, 0)
    assert llm.generate(prompt, PLAIN).token_ids == expected.token_ids


@pytest.mark.parametrize("policy", ["sliding", "snapkv"])
def test_a_session_that_slid_for_want_of_memory_is_saved_and_loaded(
    llama: Path, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session stays as it was: evicted tokens do not return when there is memory again."""
    llm = make_late(llama, policy)
    session = llm.session()
    set_available(monkeypatch, 0)
    session.append(varied_ids(110))
    set_available(monkeypatch, 1)
    session.save(tmp_path / "saved")
    loaded = llm.load_session(tmp_path / "saved")
    cache, slots = llm.host.runner.cache, [each._cache.lease.slot or 0 for each in (session, loaded)]
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
    cache.lengths[0] = 0  # the others are not run: a page of the system has room for more positions than the model has
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


@pytest.fixture(scope="module", params=slow_except(["llama"], ["llama", "windows"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder)


def test_the_slots_with_the_most_attention_are_kept_with_their_neighbours() -> None:
    weights = torch.zeros(2, 2, OBSERVED_TOKENS, 200)
    weights[0, 1, 5, 90] = 1.0
    weights[1, 0, 31, 20], weights[1, 1, 0, 160] = 0.5, 0.75
    slots = choose_slots(weights, 4, 4 + OBSERVED_TOKENS + 10)
    last = list(range(200 - OBSERVED_TOKENS, 200))
    assert slots[0].tolist() == [0, 1, 2, 3, 4, 5, 6, *range(87, 94), *last]  # the first three of equal ones
    assert slots[1].tolist() == [0, 1, 2, 3, 17, 18, 19, *range(157, 164), *last]


@torch.inference_mode()
def test_the_next_token_sees_exactly_the_kept_tokens_to_the_bit(llm: LLM) -> None:
    prompt = varied_ids(120)
    whole, kept = Runner(llm.model, CONTEXT), Runner(llm.model, CONTEXT, settings=SNAPKV)
    for context in (whole, kept):
        context.extend(0, prompt)
    kept.after_prompt(0, prompt)
    kept.cache.check_integrity()
    (rows,) = (rows for rows in kept.cache.groups if rows.group.is_late)
    assert rows.state(0) == (len(prompt) - WINDOW, PREFIX, WINDOW - PREFIX, WINDOW)
    selections = set()
    for layer in rows.group.layers:
        (found_keys, found_values), (keys, values) = stored(kept, layer, WINDOW), stored(whole, layer, len(prompt))
        for head in range(len(keys)):
            slots = [int((keys[head] == each).all(-1).nonzero()[0]) for each in found_keys[head]]
            assert found_values[head].equal(values[head, slots])
            assert slots[:PREFIX] == list(range(PREFIX))
            assert slots[-OBSERVED_TOKENS:] == list(range(len(prompt) - OBSERVED_TOKENS, len(prompt)))
            assert slots == sorted(set(slots))
            selections.add(tuple(slots))
    assert len(selections) > 1, "every head chose the same"
    for context in (whole, kept):
        context.cache.reserve(0, 1)
    assert not kept.forward([Chunk(0, [5])]).equal(whole.forward([Chunk(0, [5])]))


def stored(context: Runner, layer: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the first slots, [kv_heads, slots, dim] each."""
    cache = context.cache
    memory, (rows,) = cache.memory.layers[layer], (rows for rows in cache.groups if layer in rows.group.layers)
    where = cache.memory.place(rows, 0, torch.arange(num_slots))
    keys, values = key_parts(memory.keys, "f16"), value_parts(memory.values, "f16")
    return decode_keys((keys[0][:, *where],), "f16"), decode_values((values[0][:, *where],), "f16")


@pytest.mark.parametrize("params", slow_except([PLAIN], [PLAIN, RANDOM]), ids=["greedy", "random"])
def test_every_path_gives_the_same_answer(folder: Path, llm: LLM, params: SamplingParams) -> None:
    prompt = varied_ids(110)
    expected = llm.generate(prompt, params).token_ids
    for chunk in (1, 7, 64):
        assert llm.generate(prompt, params, prefill_chunk=chunk).token_ids == expected, chunk
    assert llm.generate(prompt, params, speculation="ngram").token_ids == expected
    assert llm.generate(prompt, replace(params, logprobs=2)).token_ids == expected
    assert make_llm(folder, capture=False).generate(prompt, params).token_ids == expected
    others = [varied_ids(20), prompt, varied_ids(90)]
    together = llm.generate_all(others, params, batch_size=3)
    assert [each.token_ids for each in together] == [llm.generate(each, params).token_ids for each in others]
    assert LLM(folder).generate(prompt, params).token_ids != expected


def test_forced_tokens_are_what_they_are_without_a_jump(llm: LLM) -> None:
    params = replace(RANDOM, regex="abcdefghijklmnopqrst[a-z]{15}", ignore_eos=False)
    prompt = varied_ids(100)
    forced = llm.generate(prompt, params)
    assert forced.token_ids == llm.generate(prompt, replace(params, logprobs=0)).token_ids
    assert forced.stats.tokens_forced > 0


def test_snapkv_with_a_window_as_long_as_the_text_changes_nothing(folder: Path) -> None:
    prompt = varied_ids(100)
    full = LLM(folder).generate(prompt, PLAIN)
    assert make_llm(folder, eviction_window=CONTEXT).generate(prompt, PLAIN).token_ids == full.token_ids


def test_a_short_prompt_slides_once_it_has_grown(folder: Path, llm: LLM) -> None:
    """If the prompt was kept whole, the rest of the text has a window, as with `sliding`."""
    prompt = varied_ids(40)
    params = replace(PLAIN, max_new_tokens=90)
    sliding = make_llm(folder, "sliding").generate(prompt, params)
    assert llm.generate(prompt, params).token_ids == sliding.token_ids


def test_a_session_answers_as_a_new_model(llm: LLM, tmp_path: Path) -> None:
    session = llm.session()
    session.append(varied_ids(70))
    for count in (0, 5, 30):
        session.rewind(count)
        session.append(varied_ids(12))
        check_copies(session, llm, replace(PLAIN, max_new_tokens=10), tmp_path)


def test_impossible_settings_are_refused(folder: Path, llm: LLM) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"protected_prefix=3 and the 32 last tokens that snapkv observes.*got 35"
    ):
        make_llm(folder, eviction_window=35)
    check_refused(lambda: make_llm(folder, max_seq_len=1000), "only eviction_policy sliding allows more")
    check_refused(lambda: llm.sample_trace(varied_ids(4), PLAIN), "snapkv keeps only a part")
