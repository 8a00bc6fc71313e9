"""Conversations for bench_paths, from answers that repeat nothing to answers that copy."""

from dataclasses import dataclass
from typing import Any

ARTICLE = """\
The harbour of Vellmouth was closed for six days after the storm of 14 March. Two fishing boats, the Anna and \
the Good Hope, were driven against the northern wall, and the crane on the east pier lost its arm. Nobody was hurt. \
The harbour master, Ruth Calloway, said that the wall had held because it was repaired two years ago, at a cost of \
1.4 million pounds. The east pier will stay closed until the end of May. Ferries to the islands go from the old dock, \
twice a day, at 7:30 and at 16:45. The council will decide in April whether to pay for a new crane or to rent one."""

CODE = '''def load_prices(path, currency):
    """Read a file of prices and return them by name."""
    prices = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            name, value, unit = line.strip().split(",")
            if unit != currency:
                continue
            if name in prices:
                raise ValueError(f"the price of {name} is given twice")
            prices[name] = float(value)
    return prices
'''

LETTER = """From: Maria Lindqvist <maria.lindqvist@example.com>
Dear team, I would like to book the seminar room on the second floor for 17 people on 23 October, from 9:30 to 12:00. \
We need a projector, a whiteboard and coffee. My telephone number is +46 8 555 1234. Kind regards, Maria Lindqvist"""

BOOKING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sender_name": {"type": "string", "maxLength": 40},
        "sender_email": {"type": "string", "maxLength": 40},
        "telephone_number": {"type": "string", "maxLength": 24},
        "number_of_people": {"type": "integer", "minimum": 1, "maximum": 500},
        "date_of_the_booking": {"type": "string", "maxLength": 24},
        "needs_a_projector": {"type": "boolean"},
        "needs_coffee": {"type": "boolean"},
        "equipment": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "additionalProperties": False,
}
BOOKING["required"] = list(BOOKING["properties"])

SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Task:
    """The first turn of a conversation. `schema` is the schema of an answer in JSON."""

    name: str
    text: str
    schema: dict[str, Any] | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]


TASKS = (
    Task("chat", "Why is the sea salty? Explain it to a child in a few paragraphs."),
    Task("copy", f"Copy the following text exactly, word by word, without changing anything:\n\n{ARTICLE}"),
    Task("code edit", f"Here is a Python function:\n\n```python\n{CODE}```\n\nWrite the function again, with the "
         "parameter currency renamed to wanted_unit, and nothing else changed."),
    Task("code", "Write a Python class named Settings with the fields host, port, user, password, timeout, retries, "
         "verbose and path. Write a property with a getter and a setter with a check for each field. Only the code."),
    Task("algorithm", "Write a Python function shortest_path(graph, start, goal) with Dijkstra's algorithm for a graph "
         "as a dict of dicts with weights. Return the path and its length. Then explain its complexity."),
    Task("JSON", "Write what this letter says as a JSON object with the keys sender_name, sender_email, "
         "telephone_number, number_of_people, date_of_the_booking, needs_a_projector, needs_coffee and equipment."
         f"\n\n{LETTER}", BOOKING),
)  # fmt: skip
