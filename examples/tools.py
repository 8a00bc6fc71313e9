"""A model that calls a calculator. A call is data, and only this program decides which code runs."""

import sys
from typing import Literal

from infer import LLM


def calculate(operation: Literal["add", "multiply"], a: int, b: int) -> int:
    """Compute with two whole numbers."""
    return a + b if operation == "add" else a * b


def main(model: str = "smollm2") -> None:
    with LLM(model).session(tools=[calculate]) as session:
        asked = {"temperature": 0, "max_new_tokens": 60, "parallel_tool_calls": False}
        answer = session.send("What is 12 plus 7?", tool_choice="calculate", **asked)
        while answer.tool_calls:
            (call,) = answer.tool_calls
            value = str(calculate(**call.parsed()))
            print(f"{call.name}({call.arguments}) = {value}")
            result = {"role": "tool", "tool_call_id": call.id, "content": value}
            answer = session.send(result, tool_choice="none", **asked)
        print(answer.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
