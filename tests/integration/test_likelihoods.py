"""lm-evaluation-harness over HTTP, and npm's `openai`, get the library's results from a served SmolLM2."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from assets import asset
from infer import LLM
from served import Served

pytestmark = pytest.mark.slow

CONTEXT, CONTINUATIONS = "The capital of France is", (" Paris.", " a city in the south of Italy.")


def asked(served: Served, prompts: list[Any], **others: Any) -> list[dict[str, Any]]:
    """Return the choices, in their order, for a request of lm_eval's `local-completions`."""
    body = {"model": "smollm2", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = served.client.post("/v1/completions", json=body | {"echo": True} | others)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_likelihoods_of_continuations_are_the_library_s(served: Served, llm: LLM, max_tokens: int) -> None:
    context = llm.tokenizer.encode(CONTEXT)
    prompts = [context + llm.tokenizer.encode(each) for each in CONTINUATIONS]
    for prompt, choice in zip(prompts, asked(served, prompts, max_tokens=max_tokens), strict=True):
        scores, likeliest = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        expected = llm.prompt_logprobs(prompt, num=1)
        assert len(scores) == len(prompt) + max_tokens
        assert scores[0] is None
        assert scores[1 : len(prompt)] == [each.logprob for each in expected[1:]]
        is_greedy = [score == max(top.values()) for score, top in zip(scores[1:], likeliest[1:], strict=True)]
        assert is_greedy[: len(prompt) - 1] == [each.rank == 1 for each in expected[1:]]


def test_texts_have_the_likelihoods_of_their_ids(served: Served, llm: LLM) -> None:
    texts = [CONTEXT + each for each in CONTINUATIONS]
    by_text, by_ids = asked(served, texts), asked(served, [llm.tokenizer.encode(text) for text in texts])
    assert [choice["logprobs"] for choice in by_text] == [choice["logprobs"] for choice in by_ids]
    for text, choice in zip(texts, by_text, strict=True):
        assert choice["text"].startswith(text)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


# npm's client


SCRIPT = Path(__file__).parent / "openai_client.mjs"


@pytest.mark.usefixtures("idle_afterwards")
def test_npm_s_client_gets_the_library_s_answers(served: Served, expected: str, node: str) -> None:
    command = [node, str(SCRIPT), str(asset("clients/openai")), f"{served.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found[way] for way in ("whole", "streamed", "collected")] == [expected] * 3
    assert found["parsed"]["name"] in ("Paris", "Rome")
    assert found["refusal"] == {"isBadRequest": True, "param": "temperature", "status": 400}
