"""Messages that are typed at a terminal or read from a pipe: where they end, and what their marks mean.

A backslash at a line's end continues the message on the next line. A line that begins with three double quotes opens a
block that three more end. Text that is pasted at a terminal is one message, however many lines it has.
"""

BLOCK = '"""'
LEAVE_HINT = "(Ctrl-C again, Ctrl-D or /quit leaves)"


def is_open_block(text: str) -> bool:
    """Return True if the text begins a block that is not closed yet."""
    block = text.lstrip()
    return block.startswith(BLOCK) and not block.removeprefix(BLOCK).rstrip().endswith(BLOCK)


def message_of(text: str) -> str:
    """Return the message without the marks of a block."""
    block = text.lstrip()
    return block.removeprefix(BLOCK).rstrip().removesuffix(BLOCK).strip("\n") if block.startswith(BLOCK) else text
