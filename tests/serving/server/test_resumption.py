"""A stream is requested again, with the parts that its client has: the same events follow, then the missing ones."""

import sys
from typing import Any

import pytest

from extent import usual_or_all
from infer.engine.step.sequence import Lease, Sequence
from infer.request_limits import MAX_PRIORITY
from infer.serving.server.connection import NOTE, SentPart, pack
from served import Served
from shapes import SOURCE

sys.path.append(str(SOURCE.parents[1] / "benchmarks"))
from failover_cases import TEMPLATE, cases, merged

CASES = {name: case for name, case in cases(24).items() if "stream" in case[1]}
MODEL, LOADED, SERVED = {"context": 1500}, {"chat_template": TEMPLATE, "reuse_prefixes": True}, {"is_child": True}
CALL = {"x-infer-id": f"req-{'ab' * 12}", "x-infer-created": "1700000000", "content-type": "application/json"}


def ask(served: Served, path: str, body: dict[str, Any], sent: list[SentPart]) -> list[bytes]:
    """Return the events of a stream, notes among them."""
    content, packed = served.client.build_request("POST", path, json=body).content, pack(sent) if sent else b""
    headers = CALL | {"x-infer-sent": str(len(packed))}
    answer = served.client.post(path, content=packed + content, headers=headers)
    assert answer.status_code == 200, answer.text
    return [event + b"\n\n" for event in answer.content.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_is_cut_after_any_event_continues_unchanged(served: Served, name: str) -> None:
    whole = ask(served, *CASES[name], [])
    expected = merged(text_of(whole))
    sent, noted, had = list[SentPart](), list[SentPart](), list[bytes]()
    places = {0, 1, 2, 3, len(whole) // 2, len(whole) - 3, *range(0, len(whole), usual_or_all(len(whole), 1))}
    for place, event in enumerate(whole):
        if event.startswith(NOTE):
            noted.append(SentPart.of_note(event))
            continue
        sent, noted, had = sent + noted, [], [*had, event]
        if place not in places:
            continue
        again = [each for each in ask(served, *CASES[name], sent) if not each.startswith(NOTE)]
        assert merged(text_of(again[: len(had)])) == merged(text_of(had))
        assert merged(text_of(had + again[len(had) :])) == expected


def test_an_answer_that_goes_on_enters_before_those_that_begin(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, priorities = served.state.llm().host.engine, list[int]()
    submit = engine.submit

    def noting(sequence: Sequence, lease: Lease | None = None) -> Sequence:
        priorities.append(sequence.priority)
        return submit(sequence, lease)

    monkeypatch.setattr(engine, "submit", noting)
    first = next(event for event in ask(served, *CASES["greedy"], []) if event.startswith(NOTE))
    ask(served, *CASES["greedy"], [SentPart.of_note(first)])
    assert priorities == [0, MAX_PRIORITY]


def text_of(events: list[bytes]) -> str:
    return b"".join(events).decode()
