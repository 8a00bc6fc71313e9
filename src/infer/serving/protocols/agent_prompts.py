"""Move or drop the parts of a coding agent's prompt that change with each request, so that prefixes are reused.

Claude Code begins its system prompt with a billing line, in which `cch=` differs for each request. It ends the system
prompt and each tool result with the number of tokens left in its context.
"""

import re
from typing import Any, final

from infer.serving.server_settings import AgentPrompts

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*")
_MOST_BUDGET = 200  # the longest budget reminder with its frame, in characters
_BUDGET = re.compile(
    r"(?:<system-reminder>\s{0,4})?(?P<budget><total_tokens>[^<>\n]{1,60}</total_tokens>)(?:\s{0,4}</system-reminder>)?"
)


@final
class TokenBudgets:
    """The budget reminders of one prompt, which are removed from the ends of its texts.

    The newest one is appended after all messages.
    """

    def __init__(self, prompts: AgentPrompts) -> None:
        self._is_kept = prompts == "keep"
        self._newest: str | None = None

    def taken_from(self, text: str) -> str:
        """Return the text without a reminder at its end, and remember the reminder."""
        if self._is_kept:
            return text
        begin = max(0, len(text.rstrip()) - _MOST_BUDGET)
        for found in _BUDGET.finditer(text, begin):
            if not text[found.end() :].strip():
                self._newest = found["budget"]
                return text[: found.start()].rstrip()
        return text

    def put_behind(self, messages: list[dict[str, Any]]) -> None:
        """Append the newest reminder to the last message that the assistant did not write."""
        if self._newest is None:
            return
        for message in reversed(messages):
            if message["role"] != "assistant":
                text = message["content"]
                message["content"] = f"{text}\n\n{self._newest}" if text else self._newest
                return


def is_billing(text: str, prompts: AgentPrompts) -> bool:
    """Return True for a system block that is only the billing line and must be dropped."""
    return prompts == "adapt" and _BILLING.fullmatch(text.strip()) is not None
