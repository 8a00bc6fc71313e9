"""Vectors, scores and labels of texts: a model that several processes share refuses them in one line."""

from pathlib import Path

import pytest

from infer import LLM, InvalidRequestError
from reranker_model import make_reranker_model
from served import serving

pytestmark = pytest.mark.slow


def test_texts_are_for_models_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-tiny"
    make_reranker_model(folder)
    with LLM(folder, threads=1, tensor_parallel=2) as shared, serving(shared, allow_embeddings=True) as served:
        for call in (shared.embed, shared.classify, lambda texts: shared.rerank("a", texts)):
            with pytest.raises(InvalidRequestError, match=r"vectors, scores and labels .* load it without"):
                call(["abc"])
        assert shared.generate("a", temperature=0, max_new_tokens=2).token_ids
        for path in ("/v1/embeddings", "/v1/classify"):
            answer = served.client.post(path, json={"input": "abc"})
            assert (answer.status_code, "tensor_parallel" in answer.json()["error"]["message"]) == (400, True)
