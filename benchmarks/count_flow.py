"""Count the files and functions of infer that a request touches, in the server's process and in its children.

Every process of the server starts with a profiler, which notes each function of infer the first time that it is called
while a file exists. Each case is asked once before it is counted, so what happens once per process is left out.

    python benchmarks/count_flow.py
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from harness import make_parser, write_report
from server_process import ServerProcess, running

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"messages": QUESTION, "stream": True, "max_tokens": 7, "temperature": 0}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
CASES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "chat with tools": {**CHAT, "tools": [{"type": "function", "function": WEATHER}]},
    "chat with a schema": {
        **CHAT,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
    },
}
PROFILER = """
import os, sys, threading
folder = os.environ["INFER_FLOW"]
flag, seen = os.path.join(folder, "on"), set()
log = open(os.path.join(folder, f"{os.getpid()}.log"), "a", buffering=1)

def note(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    if event == "call" and "/infer/" in name and os.path.exists(flag):
        key = name.rpartition("/infer/")[2], code.co_qualname
        if key not in seen:
            seen.add(key)
            print(*key, sep="\\t", file=log)

threading.setprofile(note)
sys.setprofile(note)
"""


def count(server: ServerProcess, folder: Path, body: dict[str, Any]) -> set[tuple[str, ...]]:
    """Return (file, function) of each that the request calls, in any process."""
    server.post("/v1/chat/completions", body).read()
    for log in folder.glob("*.log"):
        os.truncate(log, 0)
    (folder / "on").touch()
    try:
        server.post("/v1/chat/completions", body).read()
    finally:
        (folder / "on").unlink()
    lines = [line for log in folder.glob("*.log") for line in log.read_text().replace("\0", "").splitlines()]
    return {tuple(line.split("\t")) for line in lines}


def main() -> None:
    options = make_parser(__doc__, model="smollm2").parse_args()
    flows = dict[str, dict[str, Any]]()
    for name, body in CASES.items():  # a server each: a function is noted once per process
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "sitecustomize.py").write_text(PROFILER)
            os.environ |= {"INFER_FLOW": place, "PYTHONPATH": os.pathsep.join([place, *filter(None, sys.path)])}
            command = [sys.executable, "-m", "infer", "serve", options.model, "--port", "PORT", "--threads", "1"]
            with running(command, folder / "server.txt") as server:
                found = count(server, folder, body)
        files = {file for file, _ in found}
        by_package = Counter(file.partition("/")[0] for file in files)
        print(f"{name}: {len(files)} files, {len(found)} functions", dict(by_package))
        flows[name] = {"files": len(files), "functions": len(found), "files_by_package": by_package}
    write_report(options, flows=flows)


if __name__ == "__main__":
    main()
