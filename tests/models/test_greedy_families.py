"""Greedy answers through `LLM` against the argmax of `transformers`, with speculation on, for every family."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from infer import LLM, SamplingParams
from path_cases import Always
from tiny import ONE_EACH, Tiny, make_tiny

LENGTH = 40  # fills the windows several times over


@pytest.mark.slow(cases=5)
@pytest.mark.parametrize("tiny", ONE_EACH, ids=lambda tiny: tiny.name)
def test_greedy_is_the_argmax_of_transformers(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(tiny.config)
    config.vocab_size, config.bos_token_id, config.eos_token_id = VOCAB_SIZE, None, 256
    oracle = make_tiny(replace(tiny, config=config), tmp_path)
    write_byte_tokenizer(tmp_path)
    llm = LLM(tmp_path, dtype="float32")
    monkeypatch.setattr("infer.engine.step.drafting.DraftPolicy", lambda most, priors: Always())
    params = SamplingParams(temperature=0, max_new_tokens=LENGTH, ignore_eos=True)
    prompts = ["abcabcabcab", "a", "to be or not to be or not"]
    results = [llm.generate(prompt, params, speculation="ngram") for prompt in prompts]
    for prompt, result in zip(prompts, results, strict=True):
        prompt_ids = llm.tokenizer.encode(prompt)
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt_ids + result.token_ids])).logits[0]
        # Greedy decoding samples the likeliest token after each prefix, which one pass over the whole text shows.
        assert result.token_ids == logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
    assert sum(result.stats.drafts_proposed for result in results) > 0
    together = llm.generate_all(prompts, params, batch_size=2, speculation="ngram")
    assert [result.token_ids for result in together] == [result.token_ids for result in results]
