"""`/v1/classify`: the labels of texts with their probabilities, in vLLM's shape."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InvalidRequestError
from infer.serving.protocols.refusals import refuse
from infer.serving.protocols.retrieval_bodies import ClassifyBody, refusal_of_texts, texts_or_pairs_of
from infer.serving.server.answer_types import Answer, Count
from infer.serving.server.asking import enter, text_tokens, while_connected
from infer.serving.server.call import call_of
from infer.serving.server.door import Arrival
from infer.serving.server.endpoint import post
from infer.serving.server.replies import json_response
from infer.serving.server.routes.embeddings import EmbeddingsUsage
from infer.serving.server.routes.served_models import check_model
from infer.serving.server.server_state import ServerState


async def classify(request: Request, state: ServerState, body: ClassifyBody) -> Response:
    llm, call = state.llm(), call_of(request)
    check_model(request, state, body.model)
    texts, classifier = texts_or_pairs_of(body.input), llm.host.facts.heads.classifier
    if classifier is None:
        raise refuse("this model is not a classifier: serve a classifier", "model", "unsupported_model")
    await enter(request, state, Arrival("", num_prompt_tokens=text_tokens(texts), num_answer_tokens=0))
    try:
        values, ids = await while_connected(request, llm.compute_labels(texts, truncate=bool(body.truncate)))
    except InvalidRequestError as error:
        raise refusal_of_texts(error, "input") from error
    call.warnings += [ids.warning] if ids.warning else []
    labels = classifier.labels
    data = [Labelled(index, labels[each.index(max(each))], each, len(labels)) for index, each in enumerate(values)]
    usage = EmbeddingsUsage(ids.num_tokens, ids.num_tokens)
    name = "classify-" + call.id.removeprefix("req-")
    answer = ClassifyAnswer(id=name, created=call.created, model=call.model, data=data, usage=usage)
    return json_response(answer, call)


class Labelled(Struct):
    """The most probable label of a text, and the probabilities of all labels in the model's order."""

    index: Count
    label: str
    probs: list[float]
    num_classes: Count


class ClassifyAnswer(Answer, tag_field="object", tag="list"):
    id: str
    created: Count
    model: str
    data: list[Labelled]
    usage: EmbeddingsUsage


ROUTES = [post("/v1/classify", classify, "Label texts", ClassifyBody, ClassifyAnswer, "classify")]
