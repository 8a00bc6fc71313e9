"""The smallest device that runs steps on its own: a CPU's recording whose tokens are visible only after a wait."""

from typing import Any, final

from infer.compute.backends.base import Captured, Generated, PendingStep, SampledStep
from infer.compute.operands.step import Chunk, Step
from infer.engine.runner.runner import Runner


@final
class RunsOnItsOwn(Captured):
    """Runs each step when it is launched, as a stream runs its work in order.

    `calls` are the launches and waits with the numbers of their steps. `error` is raised by the next wait.
    """

    def __init__(self, recording: Captured) -> None:
        self.capacity, self.max_logits = recording.capacity, recording.max_logits
        self._recording = recording
        self._last: tuple[PendingStep, Generated] | None = None
        self.calls = list[tuple[str, int]]()
        self.num_launched = self.num_behind = 0
        self.is_alone = True  # the device needs no host; if False, each step has ended when `launch` returns
        self.error: Exception | None = None

    @classmethod
    def replace(cls, runner: Runner) -> "RunsOnItsOwn":
        """Let a runner launch its steps here."""
        assert isinstance(runner._captured, Captured)
        runner._captured = cls(runner._captured)
        return runner._captured

    def launch(self, step: SampledStep, behind: PendingStep | None = None) -> PendingStep:
        if behind is not None:
            self.num_behind += 1
            assert self._last is not None
            assert behind is self._last[0]
            step = step._replace(chunks=[self._resolved(chunk, self._last[1]) for chunk in step.chunks])
        assert all(token_id >= 0 for chunk in step.chunks for token_id in chunk.token_ids)
        found, number = self._recording.launch(step).wait(), self.num_launched
        self.num_launched += 1
        self.calls.append(("launch", number))

        def wait() -> Generated:
            self.calls.append(("wait", number))
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return found

        self._last = PendingStep(wait, is_running=self.is_alone), found
        return self._last[0]

    @staticmethod
    def _resolved(chunk: Chunk, before: Generated) -> Chunk:
        """Replace each id that stands for a token by the token. For a failed row, this is the token 0."""
        ids = [max(0, before.token_ids[-2 - each][0]) if each < -1 else each for each in chunk.token_ids]
        return chunk._replace(token_ids=ids)

    def run(self, step: Step) -> Any:
        return self._recording.run(step)

    def run_multi_step(self, *arguments: Any, **options: Any) -> Generated:
        return self._recording.run_multi_step(*arguments, **options)

    def profile(self, step: Step) -> list[tuple[str, int]]:
        return self._recording.profile(step)
