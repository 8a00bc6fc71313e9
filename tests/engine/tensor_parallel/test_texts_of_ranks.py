"""Vectors, scores and labels of texts: a model that several processes share refuses them in one line."""

from pathlib import Path

import pytest

from classifier_model import make_classifier
from infer import LLM, InvalidRequestError
from refusals import check_refused
from reranker_model import make_reranker_model
from served import serving

pytestmark = pytest.mark.slow


def test_texts_are_for_models_of_one_process(tmp_path: Path) -> None:
    make_classifier(tmp_path / "a")
    make_reranker_model(tmp_path / "Qwen3-Reranker-tiny")
    with LLM(tmp_path / "a", threads=1, tensor_parallel=2) as shared, serving(shared, allow_embeddings=True) as served:
        for call in (shared.embed, shared.classify):
            with pytest.raises(InvalidRequestError, match=r"vectors, scores and labels .* load it without"):
                call(["abc"])
        for path in ("/v1/embeddings", "/v1/classify"):
            answer = served.client.post(path, json={"input": "abc"})
            assert (answer.status_code, "tensor_parallel" in answer.json()["error"]["message"]) == (400, True)
    with LLM(tmp_path / "Qwen3-Reranker-tiny", threads=1, tensor_parallel=2) as shared:
        check_refused(lambda: shared.rerank("a", ["b"]), "load it without tensor_parallel")
        assert shared.generate("a", temperature=0, max_new_tokens=2).token_ids
