"""A tally of many values is written as `prometheus_client` writes a histogram of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.serving.server.metrics import Tally

BOUNDS = (0.0005, 0.25, 1, 131072)


@pytest.mark.parametrize("label", ["", "kind"])
@given(values=st.lists(st.sampled_from([0.0, *BOUNDS]) | st.floats(0, 1e6), max_size=20))
def test_a_tally_is_written_as_a_histogram_of_the_same_values(label: str, values: list[float]) -> None:
    from prometheus_client import CollectorRegistry, Histogram, generate_latest

    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("infer:seconds", "Of a step.", BOUNDS, label)
    ours.register(tally)
    histogram = Histogram("infer:seconds", "Of a step.", [label] if label else [], buckets=BOUNDS, registry=theirs)
    tally.observe_all(values, "decode" if label else "")
    labelled = histogram.labels("decode") if label else histogram
    for value in values:
        labelled.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        found = generate_latest(registry).decode().splitlines()
        return [line for line in found if "_created" not in line and "_sum" not in line]

    assert lines(ours) == lines(theirs)
    (total,) = (each.value for family in ours.collect() for each in family.samples if each.name.endswith("_sum"))
    assert total == pytest.approx(sum(values))
