"""The expected seconds that a request waits for its model in a server of several."""

import time
from collections.abc import Collection, Sequence

from infer.serving.distributed.shelved_model import ShelvedModel


def wait_seconds(model: ShelvedModel, models: Collection[ShelvedModel], waiting: Collection[str], budget: int) -> float:
    """Return the expected seconds until the model is ready.

    `waiting` are the names of the models for which requests wait. Models are loaded one after the other, and a model
    makes room only after its answers have ended. A model that is kept for clients makes no room before they can be
    back.
    """
    if model.phase == "loading":
        return model.load_seconds
    others = [each for each in models if each is not model]
    ahead = [each for each in others if not each.is_in_memory and (each.is_wanted or each.name in waiting)]
    loads = [model, *ahead, *(each for each in others if each.phase == "loading")]
    answering = max((each.busy_seconds for each in others if each.must_go), default=0.0)
    return sum(each.load_seconds for each in loads) + max(answering, _kept_seconds(model, others, budget))


def _kept_seconds(model: ShelvedModel, others: Sequence[ShelvedModel], budget: int) -> float:
    """Return for how long models that are kept for clients prevent the load of this one."""
    kept = [each for each in others if each.is_in_memory and (each.is_wanted or each.source.is_pinned)]
    if model.num_bytes + sum(each.num_bytes for each in kept) <= budget:
        return 0.0
    now = time.monotonic()
    return max((each.wishes.seconds_left(now) for each in kept), default=0.0)
