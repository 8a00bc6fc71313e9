"""Note what a process calls of infer while a request is counted. `flow.py` lets Python run this file at each start.

The folder INFER_FLOW has the file `request`: one byte, the number of the counted request, or 0 between requests. Each
process writes a line per request, kind ("function" or "type"), file or module, and name.
"""

import mmap
import os
import sys
import threading
from types import CodeType, FrameType

FOLDER = os.environ["INFER_FLOW"]
PACKAGE = os.path.join(os.environ["INFER_FLOW_SOURCE"], "infer", "")
LOG = open(os.path.join(FOLDER, f"{os.getpid()}.log"), "a", buffering=1)  # noqa: SIM115 (it stays open until the end)
with open(os.path.join(FOLDER, "request"), "rb") as counted:
    REQUEST = mmap.mmap(counted.fileno(), 1, access=mmap.ACCESS_READ)
noted = set[tuple[int, CodeType | type]]()


def note_call(frame: FrameType, event: str, _argument: object) -> None:
    number = REQUEST[0]
    if number == 0 or event != "call":
        return
    code = frame.f_code
    if (number, code) not in noted and code.co_filename.startswith(PACKAGE) and not is_of_tick(frame):
        noted.add((number, code))
        print(number, "function", code.co_filename[len(PACKAGE) :], code.co_qualname, sep="\t", file=LOG)
    made = made_type(frame)
    if made is not None and (number, made) not in noted:
        noted.add((number, made))
        print(number, "type", made.__module__, made.__qualname__, sep="\t", file=LOG)


def is_of_tick(frame: FrameType | None) -> bool:
    """Return True for a call of the server's main loop, which looks after all requests ten times per second."""
    while frame is not None and frame.f_code.co_name != "main_loop":
        frame = frame.f_back
    return frame is not None


def made_type(frame: FrameType) -> type | None:
    """Return the class of infer whose object this call makes, or None: a call of `__init__`, or of a tuple's maker."""
    code = frame.f_code
    if code.co_name == "__init__" and code.co_argcount:
        made = type(frame.f_locals[code.co_varnames[0]])
    elif code.co_name == "<lambda>" and code.co_varnames[:1] == ("_cls",):
        made = frame.f_locals["_cls"]
    else:
        return None
    return made if made.__module__.startswith("infer.") else None


threading.setprofile(note_call)
sys.setprofile(note_call)
