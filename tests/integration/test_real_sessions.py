"""Sessions with SmolLM2, with its own template and tokenizer."""

from pathlib import Path

import pytest

from infer import LLM, SamplingParams

pytestmark = pytest.mark.slow

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Write a line about both, with an emoji.")
GREEDY = SamplingParams(temperature=0, max_new_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_new_tokens=40)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, max_seq_len=1024)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_turns_equal_chats_of_the_whole_conversation(llm: LLM, tmp_path: Path, params: SamplingParams) -> None:
    session, messages = llm.session(), list[dict[str, str]]()
    for question in QUESTIONS:
        cached = session.num_cached_tokens
        result = session.send(question, params)
        messages.append({"role": "user", "content": question})
        prompt = session.token_ids[: -len(result.token_ids)]
        assert llm.generate(prompt, params).token_ids == result.token_ids
        assert llm.tokenizer.decode(prompt, False) == llm.tokenizer.render_chat_template(messages)
        assert (result.reused_tokens, result.dropped_tokens) == (cached, 0)
        messages.append({"role": "assistant", "content": result.text})
        session.save(tmp_path / "talk")
        session = llm.load_session(tmp_path / "talk")
    assert session.messages == messages


def test_likely_text_has_likely_tokens(llm: LLM) -> None:
    def mean(text: str) -> float:
        found = [entry.logprob for entry in llm.prompt_logprobs(text) if entry is not None]
        return sum(found) / len(found)

    assert mean("The capital of France is Paris.") > mean("The capital of France is purple.") > mean("of is The The of")
