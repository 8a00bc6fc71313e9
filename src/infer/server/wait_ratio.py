"""The ratio of measured to predicted waits for a first token, learnt from the accepted requests.

The forecast knows the time of steps. It knows neither the time between two steps nor later arrivals. The ratio stays
near the median of the last requests, so a few outliers change little.
"""

from typing import final

_LEAST_SECONDS = 1.0  # of a prediction: chance has a large share in shorter waits
_STEP = 1.01  # by which one request changes the ratio
_LEAST, _MOST = 0.5, 3.0


@final
class WaitRatio:
    def __init__(self) -> None:
        self.value = 1.0  # measured over predicted seconds

    def learn(self, predicted: float, measured: float) -> None:
        """Learn from a request that waited for `measured` seconds. `predicted` is in seconds, without this ratio."""
        if predicted >= _LEAST_SECONDS:
            changed = self.value * _STEP if measured > predicted * self.value else self.value / _STEP
            self.value = max(_LEAST, min(changed, _MOST))
