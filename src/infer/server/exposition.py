"""Counters and histograms, and Prometheus' text format for them. For one thread only."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple, final

Labels = tuple[str, ...]
Number = int | float
_HELP = "# HELP "


class Sample(NamedTuple):
    suffix: str
    labels: Mapping[str, str]
    value: Number


class Family(NamedTuple):
    """All samples of one name."""

    name: str
    kind: str  # "counter", "gauge" or "histogram"
    help: str
    samples: Iterable[Sample]


@final
class Counter:
    def __init__(self, name: str, help: str, *labels: str) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._values = defaultdict[Labels, Number](int)

    def add(self, value: Number, *labels: str) -> None:
        self._values[labels] += value

    def family(self) -> Family:
        found = self._values if self._labels else self._values or {(): 0}
        samples = [Sample("", dict(zip(self._labels, labels, strict=True)), value) for labels, value in found.items()]
        return Family(self._name, "counter", self._help, samples)


@final
class Histogram:
    """A histogram that counts the values up to each of `bounds`, and above them."""

    def __init__(self, name: str, help: str, bounds: Sequence[Number], *labels: str) -> None:
        self._name, self._help, self._bounds, self._labels = name, help, bounds, labels
        self._counts = defaultdict[Labels, list[int]](lambda: [0] * (len(bounds) + 1))
        self._sums = defaultdict[Labels, Number](int)
        if not labels:
            self._counts[()], self._sums[()] = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: Number, *labels: str) -> None:
        self.observe_all([value], *labels)

    def observe_all(self, values: Sequence[Number], *labels: str) -> None:
        counts = self._counts[labels]
        for value in values:
            counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += sum(values)

    def family(self) -> Family:
        return Family(self._name, "histogram", self._help, list(self._samples()))

    def _samples(self) -> Iterator[Sample]:
        for labels, counts in self._counts.items():
            named, total = dict(zip(self._labels, labels, strict=True)), 0
            for bound, count in zip((*self._bounds, inf), counts, strict=True):
                total += count
                yield Sample("_bucket", {**named, "le": _number(bound)}, total)
            yield Sample("_count", named, total)
            yield Sample("_sum", named, self._sums[labels])


def gauge(name: str, help: str, value: Number, **labels: str) -> Family:
    return Family(name, "gauge", help, [Sample("", labels, value)])


def text_of(families: Iterable[Family]) -> str:
    """Return the families in version 0.0.4 of Prometheus' text format."""
    lines = list[str]()
    for name, kind, help_text, samples in families:
        lines += [f"{_HELP}{name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{sample.suffix}{_labels(sample.labels)} {_number(sample.value)}" for sample in samples]
    return "\n".join(lines) + "\n"


def labelled(text: str, **labels: str) -> str:
    """Return `text`, which is in Prometheus' format, with these labels on every sample."""
    added = _labels(labels)[1:-1]
    lines = list[str]()
    for line in text.splitlines():
        name, inside, rest = line.partition("{")
        if line.startswith("#"):
            lines.append(line)
        elif inside:
            lines.append(f"{name}{{{added},{rest}")
        else:
            name, _, value = line.partition(" ")
            lines.append(f"{name}{{{added}}} {value}")
    return "".join(f"{line}\n" for line in lines)


def merged(texts: Iterable[str]) -> str:
    """Return texts of Prometheus' format as one text, with all samples of a family together."""
    block_by_name: dict[str, str] = {}
    for block in (block for text in texts for block in text.split(_HELP)[1:]):
        name = block.split(" ", 1)[0]
        samples = block.splitlines(keepends=True)[2:]
        block_by_name[name] = block_by_name[name] + "".join(samples) if name in block_by_name else block
    return "".join(_HELP + block for block in block_by_name.values())


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: Number) -> str:
    return "+Inf" if value == inf else repr(value)
