"""`/metrics`: the counters and the engine's current work, in Prometheus' text format."""

from starlette.requests import Request
from starlette.responses import Response

from infer.serving.server.endpoint import get
from infer.serving.server.server_state import ServerState

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def read_metrics(request: Request, state: ServerState) -> Response:
    if (llm := state.loaded) is None:
        return metrics_response(state.metrics.text())
    engine = llm.host.engine_if_any
    snapshot = None if engine is None else await llm.host.answers.run(engine.snapshot)
    return metrics_response(state.metrics.text(llm.host, snapshot))


def metrics_response(text: str) -> Response:
    return Response(text, headers={"Content-Type": _TYPE})


ROUTES = [get("/metrics", read_metrics, "List the metrics, for Prometheus", answer="text/plain")]
