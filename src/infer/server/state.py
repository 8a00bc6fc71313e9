"""What all requests of a server share: its settings, its model, and whether it may be asked."""

import math
import time
from typing import Literal, final

import infer
from infer.server.errors import ApiError
from infer.server.settings import ServerSettings

Phase = Literal["loading", "ready", "draining", "failed"]


@final
class ServerState:
    """For the event loop, but `progress`, which the loading thread counts."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.phase: Phase = "loading"
        self.progress = 0.0  # of loading
        self.failure: Exception | None = None  # why it is in phase "failed"
        self.started_at = time.time()
        self._llm: infer.AsyncLLM | None = None

    def llm(self) -> "infer.AsyncLLM":
        """Raises ApiError 503 unless requests are served."""
        if self.phase == "ready" and self._llm is not None:
            return self._llm
        if self.phase == "loading":
            percent = math.floor(100 * self.progress)
            raise ApiError(503, f"the model is loading ({percent} %)", code="loading", headers={"Retry-After": "1"})
        if self.phase == "draining":
            headers = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=headers)
        raise ApiError(
            503, f"the server has failed: {self.failure}", code="failed", headers={"x-should-retry": "false"}
        )

    def become_ready(self, llm: "infer.AsyncLLM") -> None:
        """Serve this model, unless the server is shutting down."""
        self._llm = llm
        if self.phase == "loading":
            self.phase = "ready"

    def fail(self, failure: Exception) -> None:
        """From now on every request is refused."""
        self.phase, self.failure = "failed", failure

    @property
    def loaded(self) -> "infer.AsyncLLM | None":
        """The model, in whatever phase."""
        return self._llm
