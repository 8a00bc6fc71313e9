"""Failed steps of an engine: which sequences make their steps fail."""

from collections.abc import Iterable
from typing import final

from infer.engine.step.request import Request
from infer.engine.step.sequence import Sequence
from infer.sampling_params import SamplingParams

_MOST_IN_A_ROW = 2  # failed steps, after which they are no accident
_MOST_FAULTS = 4  # failed steps during which a suspect got no token, for example after each part of a long prompt


@final
class Faults:
    """Finds the culprits of failed steps.

    After a failed step all sequences are computed again. They are suspects until they have a further token. If steps
    continue to fail meanwhile, the suspects run one by one, each until it has a token. If its steps continue to fail
    then, it is a culprit. After the last suspect, the culprits end, and the others continue if one of them got a token.
    Otherwise a row of the engine's own must get one (`make_probe`), or the engine has failed.
    """

    def __init__(self) -> None:
        self.suspects: dict[Sequence, int] | None = None  # with the number of their tokens; None without a fault
        self._culprits: dict[Sequence, Exception] = {}
        self._num_faults = self._num_in_a_row = 0
        self.alone: Sequence | None = None  # the suspect that runs now, while no other sequence does
        self.has_progress = False  # True if a suspect that ran alone got a token

    def add(self, error: Exception, active: Iterable[Sequence]) -> None:
        """Count a failed step. `active` are the sequences that it may have computed. Without any, raise the error."""
        self._num_faults, self._num_in_a_row = self._num_faults + 1, self._num_in_a_row + 1
        if self.alone is None:
            self.suspects = {sequence: sequence.num_generated for sequence in active}
        if self._num_in_a_row >= _MOST_IN_A_ROW or self._num_faults >= _MOST_FAULTS:
            if not self.suspects:
                raise error
            if self.alone is not None:
                self._culprits[self.alone] = error
            self._try_next(self.suspects)

    def passed(self) -> None:
        """Count a step that succeeded, while there are suspects. Another sequence may be `alone` afterwards."""
        self._num_in_a_row = 0
        assert self.suspects is not None
        for sequence in [self.alone] if self.alone is not None else list(self.suspects):
            has_token = sequence.num_generated > self.suspects[sequence]
            if has_token or sequence.has_ended or sequence.is_paused:
                if sequence is self.alone:
                    self.has_progress |= has_token
                    self._try_next(self.suspects)
                    return
                del self.suspects[sequence]
        if not self.suspects:
            self.suspects, self._num_faults = None, 0

    def _try_next(self, suspects: dict[Sequence, int]) -> None:
        """Let the next suspect run alone, if there is one."""
        if self.alone is not None:
            del suspects[self.alone]
        else:
            self.has_progress = False
        self._num_faults = self._num_in_a_row = 0
        self.alone = next(iter(suspects), None)
        if self.alone is None:
            self.suspects = None

    def take_culprits(self) -> dict[Sequence, Exception]:
        """Return the culprits that have not ended, with their errors, once each suspect has run alone."""
        if self.alone is not None:
            return {}
        culprits, self._culprits = self._culprits, {}
        return {sequence: error for sequence, error in culprits.items() if not sequence.is_finished}


def make_probe(culprit: Sequence) -> Sequence:
    """Return a row of one token, whose step shows if the engine works without the culprit."""
    params, request = SamplingParams(temperature=0, max_new_tokens=1), culprit.request
    return Sequence(Request(request.tokenizer, (0,), params, 2, request.vocab_size))
