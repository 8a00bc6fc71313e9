"""Changes JSON by its structure: a value is replaced, moved, doubled or dropped, and the result is JSON again."""

import copy
import json
import random
from collections.abc import Iterable
from typing import Any, final

_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 8, 0.5, -0.0, 1e-30, 1e30, 1e308, float("nan"), float("inf")),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**30, 10**400),
    *("", " ", "a", "é", "\0", "\ud800", "<eos>", "x" * 1000, "null", "-1", "default", "full_attention"),
    *([], {}, [[]], [None], [0], ["a"], {"a": 1}, {"": []}, [[[[[[[[]]]]]]]]),
)


@final
class JsonMutator:
    """Inserts values from all seeds."""

    def __init__(self, seeds: Iterable[bytes]) -> None:
        self._pool: list[Any] = list(_STRANGE)
        self._names: list[str] = [""]
        for seed in seeds:
            try:
                self._collect(json.loads(seed))
            except (ValueError, RecursionError):
                continue

    def mutate(self, content: bytes, seed: int) -> bytes | None:
        """Return the changed content, or None if it is not JSON."""
        draw = random.Random(seed)
        try:
            value = json.loads(content)
            for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
                value = self._changed(value, draw)
            return json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            return None

    def _collect(self, value: Any) -> None:
        self._pool.append(value)
        if isinstance(value, dict):
            self._names += value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for each in list(inner)[:30]:
            self._collect(each)

    def _changed(self, value: Any, draw: random.Random) -> Any:
        """Return one step down while there is something below and the dice say so."""
        if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
            return self._other(value, draw)
        changed = copy.copy(value)
        place = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        action = draw.random()
        if action < 0.7:
            changed[place] = self._changed(value[place], draw)
        elif action < 0.8:
            del changed[place]
        elif isinstance(changed, dict):
            changed[draw.choice(self._names)] = self._other(value[place], draw)
        else:
            changed.insert(place, draw.choice((value[place], self._other(value[place], draw))))
        return changed

    def _other(self, value: Any, draw: random.Random) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
            return value + draw.choice((-1, 1, 8, -8, 1 << 31, 1 << 63))
        if isinstance(value, str) and value and draw.random() < 0.3:
            place = draw.randrange(len(value))
            return value[:place] + draw.choice(("", "\0", "é", " ", "\\", "(", "*", "世", value)) + value[place + 1 :]
        return draw.choice(self._pool)
