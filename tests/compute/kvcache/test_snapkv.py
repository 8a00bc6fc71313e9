"""SnapKV keeps the tokens of a prompt that its last tokens attend to, in any steps of prompt and answer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from extent import slow_except
from infer import LLM
from infer.compute.kvcache.cache_settings import OBSERVED_TOKENS, CacheSettings
from infer.compute.kvcache.snapkv import choose_slots
from infer.compute.operands.step import Chunk
from infer.compute.quantization.kv_layout import decode_keys, decode_values, key_parts, value_parts
from infer.engine.runner.runner import Runner
from infer.errors import InvalidRequestError
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, make_folder, varied_ids
from test_eviction import check_copies

WINDOW, PREFIX = 48, 3
SNAPKV = CacheSettings(page_tokens=16, eviction_policy="snapkv", eviction_window=WINDOW, protected_prefix=PREFIX)
PLAIN = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1, seed=3, max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=slow_except(["llama"], ["llama", "windows"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder)


def make_llm(folder: Path, **settings: object) -> LLM:
    given = {"eviction_policy": "snapkv", "eviction_window": WINDOW, "protected_prefix": PREFIX, **settings}
    if given["eviction_policy"] == "none":  # the others would have no effect
        del given["eviction_window"], given["protected_prefix"]
    return LLM(folder, **given)  # type: ignore[arg-type]


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
        context.reserve(0, 1)
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
    assert make_llm(folder, eviction_policy="none").generate(prompt, params).token_ids != expected


def test_forced_tokens_are_what_they_are_without_a_jump(llm: LLM) -> None:
    params = replace(RANDOM, regex="abcdefghijklmnopqrst[a-z]{15}", ignore_eos=False)
    prompt = varied_ids(100)
    forced = llm.generate(prompt, params)
    assert forced.token_ids == llm.generate(prompt, replace(params, logprobs=0)).token_ids
    assert forced.stats.tokens_forced > 0


def test_a_window_as_long_as_the_text_changes_nothing(folder: Path) -> None:
    prompt = varied_ids(100)
    full = make_llm(folder, eviction_policy="none").generate(prompt, PLAIN)
    assert make_llm(folder, eviction_window=CONTEXT).generate(prompt, PLAIN).token_ids == full.token_ids


def test_a_short_prompt_slides_once_it_has_grown(folder: Path, llm: LLM) -> None:
    """If the prompt was kept whole, the rest of the text has a window, as with `sliding`."""
    prompt = varied_ids(40)
    params = replace(PLAIN, max_new_tokens=90)
    sliding = make_llm(folder, eviction_policy="sliding").generate(prompt, params)
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
    with pytest.raises(InvalidRequestError, match="only eviction_policy sliding allows more"):
        make_llm(folder, max_seq_len=1000)
    with pytest.raises(InvalidRequestError, match="snapkv keeps only a part"):
        llm.sample_trace(varied_ids(4), PLAIN)
