"""Failed steps of an engine: which sequences make their steps fail."""

from collections.abc import Iterable
from typing import final

from infer.engine.step.sequence import Sequence

_MOST_IN_A_ROW = 2  # failed steps, after which they are no accident
_MOST_FAULTS = 4  # failed steps during which a suspect got no token, for example after each part of a long prompt


@final
class Faults:
    """Finds the culprits of failed steps.

    After a failed step all sequences are computed again. They are suspects until they have a further token. If steps
    continue to fail meanwhile, the suspects run one by one, each until it has a token. If its steps continue to fail
    then, it is a culprit. Culprits end, and the others continue. If no suspect got a token, the engine has failed.
    """

    def __init__(self) -> None:
        self._suspects: dict[Sequence, int] | None = None  # with the number of their tokens; None without a fault
        self._culprits: dict[Sequence, Exception] = {}
        self._has_progress = False  # True if a suspect got a token
        self._num_faults = self._num_in_a_row = 0
        self.alone: Sequence | None = None  # the suspect that runs now, while no other sequence does

    def add(self, error: Exception, active: Iterable[Sequence]) -> None:
        """Count a failed step. `active` are the sequences that it may have computed.

        Raises the error if the engine has failed.
        """
        self._num_faults, self._num_in_a_row = self._num_faults + 1, self._num_in_a_row + 1
        if self._suspects is None:
            self._has_progress = False
        if self.alone is None:
            self._suspects = {sequence: sequence.num_generated for sequence in active}
        if self._num_in_a_row < _MOST_IN_A_ROW and self._num_faults < _MOST_FAULTS:
            return
        assert self._suspects is not None
        if self.alone is not None:
            self._culprits[self.alone] = error
        elif len(self._suspects) < 2 and not self._has_progress:
            raise error
        else:
            self._has_progress &= len(self._suspects) < 2
        self._try_next()

    def passed(self) -> None:
        """Count a step that succeeded. Another sequence may be `alone` afterwards.

        Raises the error of a culprit if the engine has failed.
        """
        self._num_in_a_row = 0
        if self._suspects is None:
            return
        for sequence in [self.alone] if self.alone is not None else list(self._suspects):
            has_token = sequence.num_generated > self._suspects[sequence]
            self._has_progress |= has_token
            if has_token or sequence.has_ended or sequence.is_paused:
                if sequence is self.alone:
                    self._try_next()
                    return
                del self._suspects[sequence]
        if not self._suspects:
            self._suspects, self._num_faults = None, 0

    def _try_next(self) -> None:
        """Let the next suspect run alone. After the last one, end the culprits."""
        assert self._suspects is not None
        if self.alone is not None:
            del self._suspects[self.alone]
        self._num_faults = self._num_in_a_row = 0
        self.alone = next(iter(self._suspects), None)
        if self.alone is not None:
            return
        self._suspects, culprits, self._culprits = None, self._culprits, {}
        if culprits and not self._has_progress:
            raise culprits.popitem()[1]
        for sequence, error in culprits.items():
            if not sequence.is_finished:
                sequence.blame(error)
