"""The common beginning of several prompts is computed once, and the answers are the same."""

from pathlib import Path

import pytest

from infer import LLM
from infer.sampling_params import SamplingParams
from path_cases import EOS, make_folder

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
COMMON = [(7 * index + index // 9) % EOS for index in range(100)]  # a page of 64 tokens, and part of one
PROMPTS = [[*COMMON, *range(index, index + 10)] for index in range(4)]


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_prompts_that_begin_alike_share_whole_pages_with_the_same_answers(name: str, tmp_path: Path) -> None:
    folder = make_folder(name, tmp_path)
    plain, sharing = LLM(folder), LLM(folder, reuse_prefixes=True)
    expected = [plain.generate(prompt, GREEDY) for prompt in PROMPTS]
    assert [result.reused_tokens for result in expected] == [0] * 4

    alone = [sharing.generate(prompt, GREEDY) for prompt in PROMPTS]
    assert sharing.generate(COMMON[:64], GREEDY).reused_tokens == 0  # its last token has to be run

    together = sharing.generate_all(PROMPTS, GREEDY, batch_size=2)
    for found, num_reused in ((alone, [0, 64, 64, 64]), (together, [64] * 4)):
        assert [result.token_ids for result in found] == [result.token_ids for result in expected]
        assert [result.reused_tokens for result in found] == num_reused

    further = [*PROMPTS[0], *alone[0].token_ids[:6], *range(12)]  # 128 tokens, and the cache has those of the answer
    result = sharing.generate(further, GREEDY)
    assert (result.reused_tokens, result.token_ids) == (64, plain.generate(further, GREEDY).token_ids)


def test_a_session_that_goes_back_writes_over_no_page_that_others_find(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    plain, sharing = LLM(folder), LLM(folder, reuse_prefixes=True)
    session = sharing.session()
    session.append(COMMON)
    session.rewind(60)
    session.append(PROMPTS[1][90:])
    del session  # its pages can now be used by others
    for prompt in (PROMPTS[0], [*COMMON[:40], *PROMPTS[1][90:], *COMMON[:30]]):
        assert sharing.generate(prompt, GREEDY).token_ids == plain.generate(prompt, GREEDY).token_ids
