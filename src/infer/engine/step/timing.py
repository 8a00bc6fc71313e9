"""The times at which an answer's tokens were computed and delivered, in seconds."""

import time
from typing import final

from infer.compute.operands.step import Clock
from infer.outputs import GenerationTiming


@final
class AnswerTimer:
    """Collects the times of one answer that `GenerationTiming` reports."""

    def __init__(self) -> None:
        self.began: float | None = None  # when the wait for the tokens began, by time.perf_counter
        self.arrivals = list[float]()  # when each token arrived, forced or sampled, by the same clock
        self._waited = 0.0
        self._prefill_s: float | None = None
        self._decode_times_s, self._sampling_times_s = list[float](), list[float]()

    def begin(self) -> None:
        """Note at the first call that the wait for the tokens begins."""
        if self.began is None:
            self.began = time.perf_counter()

    def waited(self, seconds: float) -> None:
        """Add time that gave no token. It counts as a part of the next forward."""
        self._waited += seconds

    def stepped(self, num_accepted: int, clock: Clock) -> None:
        """Add the times of a step or a multi-step, of whose sampled tokens the first `num_accepted` were accepted.

        The first token ends the prefill. Python's time before a forward and after the last sampling counts as a part of
        the next forward. Steps whose tokens were dropped are not counted.
        """
        before = clock.started
        for end in clock.ends[:num_accepted]:
            forward_s, sampling_s = self._waited + end.forward - before, end.sampling - end.forward
            if self._prefill_s is None:
                self._prefill_s = forward_s + sampling_s
            else:
                self._decode_times_s.append(forward_s)
                self._sampling_times_s.append(sampling_s)
            before, self._waited = end.sampling, 0.0
        self._waited += clock.ended - before

    def keep(self, num_tokens: int) -> None:
        """Forget the times after the first `num_tokens` tokens.

        Forced tokens have no step times, so some may be kept.
        """
        del self.arrivals[num_tokens:]
        del self._decode_times_s[max(0, num_tokens - 1) :]
        del self._sampling_times_s[max(0, num_tokens - 1) :]

    def result(self) -> GenerationTiming:
        arrivals = [at - (self.began or 0.0) for at in self.arrivals]
        return GenerationTiming(self._prefill_s or 0.0, self._decode_times_s, self._sampling_times_s, arrivals)
