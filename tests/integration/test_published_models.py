"""Published files of Qwen2.5, BERT and EmbeddingGemma against `transformers` and sentence-transformers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from infer import LLM
from infer.files import open_checkpoint
from oracle import make_oracle, mean_kl, oracle_logits

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the Moon; 3.14159 is close to pi.\n"
    "def add(a, b):\n    return a + b\n\nÜber den Wolken ist die Freiheit wohl grenzenlos. 日本語も少し。 "
)
TEXTS = [TEXT, "", "Wo liegt Bern?", "The ferry leaves at six, and nobody takes it in winter.", "\n日本語も少し。"]


@pytest.fixture(scope="module")
def coder(qwen_coder_path: Path) -> Iterator[LLM]:
    with LLM(qwen_coder_path, max_seq_len=1024) as llm:
        yield llm


def test_logits_of_qwen_equal_transformers(coder: LLM, qwen_coder_path: Path) -> None:
    token_ids = coder.tokenizer.encode(TEXT)
    expected = oracle_logits(make_oracle(open_checkpoint(qwen_coder_path)), token_ids)
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


@pytest.mark.parametrize("model", ["minilm", "embeddinggemma"])
def test_vectors_of_encoders_equal_sentence_transformers(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"{model}_path")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    oracle = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    prompts = [None, "query", "document"] if model == "embeddinggemma" else [None]
    with LLM(path) as llm:
        for prompt_name in prompts:
            vectors = llm.embed(TEXTS, prompt_name=prompt_name).numpy()
            expected = oracle.encode(TEXTS, prompt_name=prompt_name, batch_size=1)
            np.testing.assert_allclose(vectors, expected, atol=5e-6)
