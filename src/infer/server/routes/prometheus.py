"""`/metrics`: the counters and the engine's current work, in Prometheus' text format."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infer.server.endpoint import ApiRoute
from infer.server.exposition import Counter, Family, gauge, text_of
from infer.server.server_state import ServerState

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def read_metrics(request: Request, state: ServerState) -> Response:
    found = list(state.metrics.families())
    if (llm := state.loaded) is not None:
        found += _engine_families(await llm.host.answers.run(llm.host.engine.snapshot))
        found += _settings_families(llm.host)
    return metrics_response(text_of(found))


def metrics_response(text: str) -> Response:
    return Response(text, headers={"Content-Type": _TYPE})


def _engine_families(now: Any) -> Sequence[Family]:
    """Return the families of an `engine.snapshot.EngineSnapshot`."""
    pages = sum(pool.num_pages for pool in now.pools)
    free = sum(pool.num_free for pool in now.pools)
    preempted = Counter("infer:num_preemptions_total", "Answers that gave their pages up and were computed again.")
    preempted.add(now.num_preemptions)
    return [
        gauge("infer:num_requests_running", "Answers that have a slot.", len(now.running)),
        gauge("infer:num_requests_waiting", "Answers that wait for a slot.", len(now.waiting)),
        gauge("infer:kv_cache_usage_perc", "Share of the cache's pages in use, 1 is all.", 1 - free / max(pages, 1)),
        gauge("infer:max_num_requests_running", "Slots.", now.max_running),
        preempted.family(),
    ]


def _settings_families(host: Any) -> Sequence[Family]:
    """Return the families of an `engine.host.Host` that do not change."""
    cache = host.settings.cache
    labels = {
        "page_tokens": cache.page_tokens,
        "num_pages": sum(host.runner.pool_pages),
        "kv_type": host.model.kv_type if cache.kv_type == "auto" else cache.kv_type,
        "eviction_policy": cache.eviction_policy,
        "reuse_prefixes": str(cache.reuse_prefixes).lower(),
    }
    told = {name: str(value) for name, value in labels.items()}
    return [
        gauge("infer:threads", "Threads to compute with.", host.num_threads),
        gauge("infer:cache_config_info", "How keys and values are stored, as labels.", 1, **told),
    ]


ROUTES = [ApiRoute("GET", "/metrics", read_metrics)]
