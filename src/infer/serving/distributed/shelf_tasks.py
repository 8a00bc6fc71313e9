"""The tasks of routes, for a server whose models are of several kinds. They have the names of `ModelPlan.takes`."""

from collections.abc import Mapping, Sequence

from infer.serving.distributed.shelved_model import ShelvedModel
from infer.serving.server.app import ROUTES
from infer.serving.server.http_errors import ApiError

_TASKS_BY_OPERATION: Mapping[str, Sequence[str]] = {
    "embeddings": ("embed",),
    "rerank": ("rerank", "embed"),  # a model for embeddings compares its vectors
    "classify": ("classify",),
}
_TASKS_BY_PATH = {
    route.path: _TASKS_BY_OPERATION.get(route.operation, ("generate",)) for route in ROUTES if route.operation
}


def tasks_of_route(path: str) -> Sequence[str]:
    """Return the tasks of which a model must take one to answer on this route. Any model answers if there are none."""
    return _TASKS_BY_PATH.get(path, ())


def refusal(model: ShelvedModel | None, tasks: Sequence[str], able: Sequence[str]) -> ApiError:
    """Return the error for a model that takes none of the tasks, or for None if no model does.

    `able` are the names of the models that take one.
    """
    takes = () if model is None or model.plan is None else model.plan.takes
    does = "no model here can" if model is None else f"the model {model.name!r:.80} can {' and '.join(takes)}, and not"
    fix = f"name {' or '.join(map(repr, able))}" if able else f"serve a model that can {' or '.join(tasks)}"
    return ApiError(400, f"{does} {tasks[0]}: {fix:.400}", param="model", code="unsupported_model")
