"""`/v1/classify` answers in vLLM's shape, with the probabilities of the library."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cases import cases
from classifier_model import LABELS
from infer import LLM
from infer.serving.server.app import ROUTES
from infer.serving.server.routes.openapi import document
from served import Served, served_model, serving

TEXTS = ["a roof", "a bridge"]


served = served_model("labeller")


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
@pytest.mark.parametrize("given", [TEXTS, TEXTS[0], [list(b"a roof")], [["a roof", "a bridge"]]])
def test_texts_ids_and_pairs_have_their_labels(served: Served, labeller: LLM, path: str, given: Any) -> None:
    answer = served.ask(path, model="tiny", input=given)
    expected = labeller.classify([given] if isinstance(given, str) else given)
    for index, (found, each) in enumerate(zip(answer["data"], expected, strict=True)):
        assert (found["index"], found["label"], found["num_classes"]) == (index, each.label, 3)
        assert dict(zip(LABELS, found["probs"], strict=True)) == dict(zip(each.labels, each.probabilities, strict=True))
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    described = document(ROUTES)
    place = "#/paths/~1v1~1classify/post/responses/200/content/application~1json/schema"
    Draft202012Validator({**described, "$ref": place}).validate(answer)


def test_a_long_text_is_refused_or_cut(served: Served) -> None:
    texts = ["a", "x" * 9999]
    assert served.refusal("/v1/classify", input=texts)["code"] == "context_length_exceeded"
    answer = served.ask("/v1/classify", input=texts, truncate=True)
    assert answer["infer"]["warnings"] == ["1 of 2 texts were cut to 256 tokens"]


@cases(
    "body status param",
    ({}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": [""]}, 400, "input[0]"),
    ({"input": [["a", "b", "c"]]}, 400, "input[0][0]"),
    ({"input": "a", "model": "other"}, 404, "model"),
)
def test_texts_that_cannot_be_classified_are_refused(served: Served, body: Any, status: int, param: str) -> None:
    assert served.refusal("/v1/classify", status=status, **body)["param"] == param


def test_a_model_that_is_no_classifier_says_so(embedder: LLM) -> None:
    with serving(embedder, model="tiny") as served:
        assert served.refusal("/v1/classify", input="a")["code"] == "unsupported_model"
