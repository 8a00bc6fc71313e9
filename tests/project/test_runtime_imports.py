"""No pickle, no evaluated text and no network, neither in infer's source nor in a process that runs a model."""

import ast
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostile_files import CONFIG, write_folder, write_gguf
from infer.errors import UnsupportedModelError
from infer.models.from_checkpoint import load_model
from shapes import SOURCE
from syntax import nodes_below
from test_house import syntax_trees
from watched import python_command

UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code"}
NETWORK = {"socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc", "asyncio"}
PROCESSES = {"subprocess", "multiprocessing", "pty"}
UNPICKLING_CALLS = ("torch.load", "torch.jit.load", "torch.hub.", "np.load", "numpy.load", "yaml.")
EVALUATING = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN = UNPICKLING | NETWORK | PROCESSES | EVALUATING | {"huggingface_hub"}
RANKS = ("engine/tensor_parallel/ranks", "engine/tensor_parallel/follower")
# Modules that are forbidden elsewhere, and the only files that may use them, by folder.
ALLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "subprocess": {  # git, compilers, strangers' grammars, ranks, the user's clients, and a Mac's free memory
        "cli/commands/": ("bench_command", "server_commands"),
        "": ("compute/backends/cpu/compile/parallel", "system/child_process", "system/macos", RANKS[0]),
    },
    # Rows and calls, through pipes to processes that this one started
    "multiprocessing": {"serving/batch_file/": ("workers",)},
    "multiprocessing.process": {"serving/batch_file/": ("workers",)},
    "multiprocessing.connection": {
        "serving/batch_file/": ("workers",),
        "engine/tensor_parallel/": ("follower", "ranks"),
    },
    "huggingface_hub": {"files/hub/": ("hub_download",)},  # asked for by the user
    "urllib.parse": {"text/grammar/": ("schema_values",), "cli/commands/": ("server_commands",)},
    "urllib.error": {"cli/commands/": ("server_commands",)},  # asks a running server
    "urllib.request": {"cli/commands/": ("server_commands",)},
    "http": {"serving/server/": ("connection",)},
    "ssl": {"serving/server/": ("process",)},
    "asyncio": {  # answers for programs that use it, the server and its replicas
        "": ("async_llm", "engine/requests/answer", "engine/requests/loop", "engine/requests/stream"),
        "serving/server/": (
            *("endpoint", "connection", "process", "server_state"),
            *("routes/protocols", "routes/status", "routes/ollama", "routes/served_models"),
        ),
        "serving/distributed/": ("front", "replica", "shelf", "shelved_model", "ray_serve"),
    },
    "socket": {  # those of ranks and of the server's threads are pairs that have no address
        "": (RANKS[0], "cli/commands/serve_command"),
        "serving/server/": ("process", "app"),
        "serving/distributed/": ("front", "replica", "shelved_model"),
    },
}


def name_of(node: ast.expr) -> str:
    """Return the dotted name of a function, or only its end if an expression precedes it."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree: ast.Module) -> Iterator[str]:
    """Yield imported modules, also those imported by name, and calls of builtins that evaluate text."""
    for node in nodes_below(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."
        elif isinstance(node, ast.Call):
            called = name_of(node.func)
            if called in EVALUATING or called.startswith(UNPICKLING_CALLS):
                yield called
            elif called.endswith("import_module") and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)
            elif any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                yield "pickle"


def is_forbidden(use: str) -> bool:
    return use.startswith(UNPICKLING_CALLS) or use.split(".")[0] in FORBIDDEN


def test_our_source_has_no_pickle_no_evaluation_and_no_network() -> None:
    found = {(name, use) for name, tree in syntax_trees().items() for use in uses(tree) if is_forbidden(use)}
    assert found == {
        (f"{folder}{name}.py", use)
        for use, folders in ALLOWED.items()
        for folder, names in folders.items()
        for name in names
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from urllib.request import urlopen", "import os, socket", "eval('1')", "torch.load(p)",
        "np.load(p, allow_pickle=True)", "import_module('pickle')", "exec(compile(s, 'f', 'exec'))",
        "from multiprocessing import Process", "def f():\n    import http.client", "yaml.load(text)",
    ],
)  # fmt: skip
def test_the_check_of_our_source_finds(source: str) -> None:
    assert any(map(is_forbidden, uses(ast.parse(source))))


AUDITED = """
import json, sys
seen = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        seen.append((event, str(arguments[0])))
    elif event.split(".")[0] in WATCHED:
        seen.append((event, sys._getframe(1).f_code.co_filename))
WATCHED = {
    "pickle", "marshal", "exec", "compile", "import", "socket", "ssl", "http", "urllib", "ftplib", "smtplib", "code",
    "subprocess", "os", "ctypes",
}
sys.addaudithook(watch)
from infer import LLM, SamplingParams
def run(path):
    llm = LLM(path)
    params = SamplingParams(temperature=0.7, seed=1, max_new_tokens=8, ignore_eos=True)
    result = llm.generate("hello", params, speculation="ngram")
    assert len(result.token_ids) == 8
    llm.chat([{"role": "user", "content": "hi"}], params)
    session = llm.session()
    session.send("hello", params)
    session.save(sys.argv[3])
    llm.load_session(sys.argv[3])
phases = []
for path in (sys.argv[1], sys.argv[2], sys.argv[1]):
    run(path)
    phases.append(list(seen))
    seen.clear()
print(json.dumps(phases))
"""


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, str]]]:
    """Return the events of Python's audit hooks while a folder, a GGUF file and the folder again load and answer."""
    place = tmp_path_factory.mktemp("audited")
    folder = write_folder(place / "a-folder", config_json=CONFIG | {"auto_map": {"AutoModel": "modeling_evil.Evil"}})
    for name in ("modeling_evil.py", "__init__.py", "sitecustomize.py", "tokenizer.py"):
        (folder / name).write_text("raise SystemExit('this must never run')")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl"):
        os.mkfifo(folder / name)  # opening it would wait for ever
    gguf = write_gguf(place / "model.gguf")
    command = python_command(AUDITED, str(folder), str(gguf), str(place / "saved"))
    subprocess.run(command, capture_output=True, check=True)  # compiles the missing kernels
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return [[(event, where) for event, where in phase] for phase in found]


@pytest.mark.slow
def test_running_a_model_unpickles_nothing_and_uses_no_network(phases: list[list[tuple[str, str]]]) -> None:
    kinds = ("pickle", "socket", "ssl", "http", "urllib", "ftplib", "smtplib")
    assert [each for phase in phases for each in phase if each[0].split(".")[0] in kinds] == []
    assert len(phases[0]) > 100


@pytest.mark.slow
def test_only_modules_are_executed(phases: list[list[tuple[str, str]]]) -> None:
    """No code of infer executes text. Once everything is imported, nothing is compiled or executed."""
    executed = [each for phase in phases for each in phase if each[0] in ("exec", "compile")]
    assert len(executed) > 100  # modules
    assert [each for each in executed if each[1].startswith(str(SOURCE))] == []
    kinds = ("exec", "compile", "import", "marshal", "code", "subprocess", "ctypes")
    # These are of our own memory: nothing is loaded or called.
    views = ("ctypes.cdata", "ctypes.cdata/buffer", "ctypes.addressof")
    assert [each for each in phases[2] if each[0].split(".")[0] in kinds and each[0] not in views] == []


@pytest.mark.slow
def test_only_the_needed_files_of_a_folder_are_opened(phases: list[list[tuple[str, str]]]) -> None:
    opened = {Path(name).name for phase in phases for event, name in phase if event == "open" and "/a-folder/" in name}
    names = ("config", "generation_config", "tokenizer", "tokenizer_config")
    assert opened == {"model.safetensors", *(f"{name}.json" for name in names)}


def test_a_model_that_needs_its_own_code_is_refused(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "evil", "auto_map": {"AutoModel": "modeling_evil.Evil"}}
    with pytest.raises(UnsupportedModelError, match=r"'evil' is not supported.*auto_map.*never run"):
        load_model(write_folder(tmp_path / "model", config_json=config))
