"""Published files of Qwen2.5, BERT and EmbeddingGemma against `transformers` and sentence-transformers.

The larger coder and the larger encoder need gigabytes: only INFER_TESTS=all fetches them and runs their tests.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from assets import asset
from extent import usual_or_all
from infer import LLM
from infer.files import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")]

PROMPTS = {"minilm": (None, None), "embeddinggemma": ("query", "document")}  # of questions and of documents
TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the Moon; 3.14159 is close to pi.\n"
    "def add(a, b):\n    return a + b\n\nÜber den Wolken ist die Freiheit wohl grenzenlos. 日本語も少し。 "
)
TEXTS = [TEXT, "", "Wo liegt Bern?", "The ferry leaves at six, and nobody takes it in winter.", "\n日本語も少し。"]
DOCUMENT_BY_QUESTION = {
    "When does the boat depart?": "The ferry to the island leaves at six, and nobody takes it in winter.",
    "Which city is the Swiss seat of government?": "Bern is the capital of Switzerland and lies on the river Aare.",
    "How is a stringed instrument tuned?": "A violin has four strings, which are tuned in fifths.",
    "How long does baking take?": "Yeast makes the dough of bread rise within an hour.",
}
DOCUMENTS = list(DOCUMENT_BY_QUESTION.values())


class Encoder(NamedTuple):
    path: Path
    llm: LLM
    prompts: tuple[str | None, str | None]

    def questions(self) -> torch.Tensor:
        return self.llm.embed(list(DOCUMENT_BY_QUESTION), prompt_name=self.prompts[0])

    def documents(self) -> torch.Tensor:
        return self.llm.embed(DOCUMENTS, prompt_name=self.prompts[1])


@pytest.fixture(scope="module", params=["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"][: usual_or_all(1, 2)])
def coder_path(request: pytest.FixtureRequest) -> Path:
    return asset(f"models/{request.param}.gguf")


@pytest.fixture(scope="module")
def coder(coder_path: Path) -> Iterator[LLM]:
    with LLM(coder_path, max_seq_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module", params=list(PROMPTS)[: usual_or_all(1, 2)])
def encoder(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    path = asset(f"models/{request.param}")
    with LLM(path) as llm:
        yield Encoder(path, llm, PROMPTS[request.param])


def test_logits_of_qwen_equal_transformers(coder: LLM, coder_path: Path) -> None:
    from oracle import make_oracle, mean_kl, oracle_logits  # `transformers` takes seconds to import

    token_ids = coder.tokenizer.encode(TEXT)
    expected = oracle_logits(make_oracle(open_checkpoint(coder_path)), token_ids)
    logits = coder.logits(token_ids)
    assert mean_kl(expected, logits) <= 1e-5
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.1
    assert clear.sum() > len(token_ids) // 2
    assert torch.equal(expected.argmax(-1)[clear], logits.argmax(-1)[clear])


def test_qwen_writes_a_function_that_works(coder: LLM) -> None:
    asked = "Write a Python function is_even(n) that returns True if n is even. Answer with the code only."
    answer = coder.chat([{"role": "user", "content": asked}], temperature=0, max_new_tokens=128)
    assert answer.finish_reason == "eos"
    code = answer.text.partition("```python\n")[2].partition("```")[0]
    assert "def is_even(n):" in code
    assert "return n % 2 == 0" in code


def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"It is 17 degrees in {city}, with hail."


def get_price(item: str) -> str:
    """Return the price of an item.

    Args:
        item: Name of the item.
    """
    raise NotImplementedError(item)


def test_qwen_calls_the_right_tool_and_answers_from_its_result(coder: LLM) -> None:
    tools = [get_price, get_weather]
    messages = [{"role": "user", "content": "What is the weather in Bern?"}]
    answer = coder.chat(messages, tools=tools, temperature=0, max_new_tokens=64)
    (call,) = answer.tool_calls
    assert (answer.finish_reason, call.name, call.parsed()) == ("eos", "get_weather", {"city": "Bern"})
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**call.parsed())}
    messages += [answer.to_message(), result, {"role": "user", "content": "Answer in one sentence."}]
    answer = coder.chat(messages, tools=tools, tool_choice="none", temperature=0, max_new_tokens=64)
    assert answer.finish_reason == "eos"
    assert re.search("^The weather in Bern is .*(17 degrees.*hail|hail.*17 degrees)", answer.text)


def test_an_encoder_finds_the_document_of_each_question(encoder: Encoder) -> None:
    likeness = encoder.questions() @ encoder.documents().T
    best, second = likeness.topk(2).values.unbind(-1)
    assert likeness.argmax(-1).tolist() == list(range(len(DOCUMENTS)))
    assert (best - second > 0.1).all()


def test_vectors_of_encoders_equal_sentence_transformers(encoder: Encoder) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    oracle = sentence_transformers.SentenceTransformer(str(encoder.path), device="cpu")
    for prompt_name in {None, *encoder.prompts}:
        vectors = encoder.llm.embed(TEXTS, prompt_name=prompt_name).numpy()
        expected = oracle.encode(TEXTS, prompt_name=prompt_name, batch_size=1)
        np.testing.assert_allclose(vectors, expected, atol=5e-6)
    questions = oracle.encode(list(DOCUMENT_BY_QUESTION), prompt_name=encoder.prompts[0])
    documents = oracle.encode(DOCUMENTS, prompt_name=encoder.prompts[1])
    expected_order = (questions @ documents.T).argsort()
    assert np.array_equal((encoder.questions() @ encoder.documents().T).numpy().argsort(), expected_order)
