"""Move the packages of `infer` and their tests into eight rooms: files, imports, and the names in texts.

    python scripts/move_rooms.py            # in a clean work tree from before the move
    python scripts/move_rooms.py --table    # print old and new names as docs/dev/moved.md

It made the commit "Move the packages into eight rooms", but for what its message calls work by hand. To bring an older
branch here, run it on the branch's tip and on the commit where it began, and apply the difference of the two. It stays
for one release.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Folder below src/infer → its new place.
FOLDERS = {
    "bench": "cli/bench",
    "batch_file": "serving/batch_file",
    "distributed": "serving/distributed",
    "protocols": "serving/protocols",
    "server": "serving/server",
    "web_ui": "serving/web_ui",
    "prepare": "engine/prepare",
    "runner": "engine/runner",
    "session": "engine/session",
    "speculation": "engine/speculation",
    "tensor_parallel": "engine/tensor_parallel",
    "catalog": "models/catalog",
    "gguf_export": "models/gguf_export",
    "model": "models",
    "checkpoint": "files",
    "grammar": "text/grammar",
    "tokenizer": "text/tokenizer",
    "toolcalls": "text/toolcalls",
    "backends": "compute/backends",
    "kvcache": "compute/kvcache",
    "operands": "compute/operands",
    "ops": "compute/ops",
    "quantization": "compute/quantization",
    "sampling": "compute/sampling",
}
# Folders of modules that leave their package for one of their own: module → folder.
SPLITS = {
    "engine/step": """engine: drafting fair_queueing grammar_masks launched_step place queue request scheduler sequence
        sequence_grammar slot_params slots snapshot step_costs step_ends step_plans step_shares text_output timing""",
    "engine/prefixes": "engine: prefix_disk prefix_ends prefix_fingerprint",
    "engine/requests": """engine: async_answers conversation engine_thread host host_loading loop loop_messages mailbox
        model_settings prompt_batch prompt_encoding request_maker request_options reranker stream text_heads""",
    "engine/texts": """engine: classification embedding pooled_states reranking similarity text_calls text_states
        token_trace vector_options""",
    "models/memory": "model: cache_plan context_length memory_estimate",
    "files/tensors": """checkpoint: encoder_names fused_delta_nets fused_tensors lazy_weights quantisation_config
        quantised_rows quantised_tensors safetensors safetensors_writer stacked_experts tensor_bytes tensor_info
        tensor_names""",
    "files/gguf": """checkpoint: gguf gguf_gated gguf_gemma4 gguf_llama4 gguf_recurrent gguf_scales gguf_split
        gguf_text_encoders gguf_values gguf_writer importance_matrix quantised_file""",
    "files/hub": "checkpoint: file_versions find hub hub_download hub_removal",
    "files/heads": """checkpoint: classifier_files encoder_heads head_files pooling reranker_files sentence_modules
        text_prompts""",
    "text/templates": "tokenizer: chat_template special_tokens template_child template_messages template_process",
    "serving/protocols/anthropic": "protocols: message_blocks message_bodies message_history message_request",
    "serving/protocols/ollama": "protocols: ollama_bodies ollama_request",
    "serving/protocols/responses": "protocols: response_history response_request",
    "system/processes": "system: child_process lane parent_end processor_limit",
    "system/cores": "system: core_share cores nodes thread_start torch_threads",
    "system/memory": "system: available_memory cgroup memory_speed sized_cache",
    "system/files": "system: atomic json_file json_limits locked_folder open_file strict_json user_cache",
    "cli/terminal": "cli: hidden_keys markdown signals standard_streams terminal wrapping",
    "cli/options": """cli: command_options model_choice model_loading option_checks option_fields option_files
        other_programs prompts sampling_options server_options""",
    "cli/answers": """cli: answer_report batch_command classify_command embed_command generate_command given_texts
        permalink replay rerank_command trace_command""",
    "cli/model_commands": """cli: bench_command comparison_page compile_command doctor_command doctor_page
        estimate_command explain_command imatrix_command layer_charts machine_report models_command page_file
        quality_commands quantize_command suite_tables""",
    "cli/servers": "cli: ray_command serve_command server_commands shelf_command",
    "cli/chat": "cli: chat_commands chat_completion chat_input chat_loop chat_prompt chat_session typed_message",
}
# First lines of the folders that are new.
INTRODUCTIONS = {
    "cli/answers": "Commands that answer: generate, batch, embed, rerank, classify, sample-trace and replay.",
    "cli/chat": "`infer chat`: a conversation at a terminal or through a pipe.",
    "cli/model_commands": "Commands about models: what is in their files, how well they predict, how fast they are.",
    "cli/options": "Options of commands: declared, read, checked, and used to choose and load a model.",
    "cli/servers": "Commands that start servers, and ask and stop them.",
    "cli/terminal": "A terminal: streams, signals, styles, and lines that are wrapped and hidden.",
    "compute": "Arithmetic and its memory: operations, operands, caches, sampling, quantisation, and backends.",
    "engine/prefixes": "Prefixes of prompts that are kept beyond their sequences: on disk, and where they differ.",
    "engine/requests": "The way of a request: from a caller's arguments to the loop's thread, and its answer back.",
    "engine/step": "The engine's step: sequences, their slots, and the plan, the masks and the end of each step.",
    "engine/texts": "Whole texts: vectors, scores, labels, and the trace of a text's tokens.",
    "files/gguf": "GGUF files: read, written, and described under the names of Hugging Face's config.",
    "files/heads": "Heads for whole texts in a model's files: poolings, classifiers and rerankers. Loads no torch.",
    "files/hub": "The files of a model by the name that a user gives: folders, packages, and the hub's local cache.",
    "files/tensors": "Tensors in files: their places, their names, and what formats changed about them.",
    "models/memory": "The memory that a model needs, and the context and cache that fit. Loads no torch.",
    "serving": "Models over HTTP and in batches: protocols, the server, its page, replicas, and files of requests.",
    "serving/protocols/anthropic": "Anthropic's Messages API: its bodies, and how they become requests.",
    "serving/protocols/ollama": "Ollama's API: its bodies, and how they become bodies of OpenAI's routes.",
    "serving/protocols/responses": "OpenAI's Responses API: how its bodies become requests.",
    "system/cores": "Processors: how many to use, which ones, and the threads that run on them.",
    "system/files": "Files of others and of our own: read within limits, written as a whole, trusted or not.",
    "system/memory": "Memory: how much there is, how fast it is, and caches with a limit.",
    "system/processes": "Programs of ours in processes of their own, with limits of time and memory.",
    "text": "Text and its forms: tokenizers, chat templates, stop strings, grammars and tool calls.",
    "text/templates": "Chat templates: conversations to text, rendered in a process that a template cannot harm.",
}
TESTS = {old: new for old, new in FOLDERS.items() if old not in ("operands", "ops", "protocols", "runner", "web_ui")}
HISTORY = ("CHANGELOG.md", "docs/dev/log.md", "docs/dev/moved.md", "scripts/move_rooms.py", "benchmarks/reports/")


def folder_of(module: str) -> str | None:
    """Return the folder that a module, such as `queue` of `engine`, goes to if it leaves its package."""
    package, _, name = module.partition("/")
    return next((to for to, row in SPLITS.items() if row.startswith(f"{package}:") and name in row.split()), None)


def in_folder(path: str, folders: dict[str, str]) -> str:
    first, _, rest = path.partition("/")
    return f"{folders.get(first, first)}/{rest}" if rest else folders.get(first, first)


def new_source(path: str) -> str:
    """Return the new place of a file or folder below src/infer."""
    folder = folder_of(path.removesuffix(".py"))
    return f"{folder}/{path.partition('/')[2]}" if folder else in_folder(path, FOLDERS)


def new_test(path: str) -> str:
    """Return the new place of a file or folder below tests/."""
    return in_folder(path, TESTS)


def tracked(folder: str) -> list[str]:
    command = ["git", "ls-files", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.removeprefix(f"{folder}/") for line in listed.stdout.splitlines()]


class Names:
    """The files below src/infer and tests/ before the move, and the names that texts have for them afterwards."""

    def __init__(self) -> None:
        self.sources, self.tests = tracked("src/infer"), tracked("tests")
        self.source_folders = {str(each) for path in self.sources for each in Path(path).parents} - {"."}
        self.test_folders = {str(each) for path in self.tests for each in Path(path).parents} - {"."}

    def module(self, dotted: str) -> str:
        """Return the new name of a dotted name: the longest part that is a module or a package decides."""
        parts = dotted.split(".")
        for end in range(len(parts), 1, -1):
            path = "/".join(parts[1:end])
            if f"{path}.py" in self.sources or path in self.source_folders:
                return ".".join(["infer", *new_source(path).split("/"), *parts[end:]])
        return dotted

    def path(self, found: re.Match[str]) -> str:
        """Return the new path. Without a prefix it is a file, below src/infer or tests/."""
        prefix, path = found["prefix"] or "", found["path"]
        bare = path.rstrip("/*.")
        end = path[len(bare) :]
        if prefix.endswith("infer/"):
            known = bare in self.sources or bare in self.source_folders or f"{bare}.py" in self.sources
            return prefix + (new_source(bare) + end if known else path)
        if prefix:
            return prefix + (new_test(bare) + end if bare in self.tests or bare in self.test_folders else path)
        is_code = found.string[found.start() - 1] == "`"  # in prose, a module or a folder has no suffix
        if bare in self.sources or (is_code and f"{bare}.py" in self.sources):
            return new_source(bare) + end
        if bare in self.source_folders and ("/" in bare or end == "/*" or (is_code and end)):
            return new_source(bare) + end
        return new_test(bare) + end if bare in self.tests else path

    def short(self, found: re.Match[str]) -> str:
        """Return the new spelling of `package.module` or `package.module.name`, as docstrings and pages have it."""
        dotted: str = found[1]
        new = self.module(f"infer.{dotted}").split(".")
        count = len(dotted.split("."))
        return f"`{'.'.join(new[-count:])}`" if "/".join(dotted.split(".")[:2]) + ".py" in self.sources else found[0]


_LOGGER = re.compile(r'(?:[Ll]ogger|at_level)[^\n]*"infer\.server"')
_DOTTED = re.compile(r"\binfer(?:\.[A-Za-z_]\w*)+")
_PATH = re.compile(
    r"(?<![\w./-])(?P<prefix>(?:src/)?infer/|tests/)?(?P<path>[\w.]+(?:/[\w.*]+)+/?|(?<=/)[\w.]+/?|(?<=`)\w+/)"
)
_SHORT = re.compile(r"`([a-z_]+(?:\.\w+)+)`")


def rewritten(text: str, names: Names, *, is_python: bool) -> str:
    """Return a file's text with the new names. Names that are done are hidden behind NUL from the later steps."""
    if is_python:
        text = with_new_imports(text, names)
    text = _LOGGER.sub(lambda found: found[0].replace("infer", "inf\0er"), text)
    text = _DOTTED.sub(lambda found: names.module(found[0]), text)
    text = _SHORT.sub(names.short, text)
    return _PATH.sub(names.path, text).replace("\0", "")


def with_new_imports(text: str, names: Names) -> str:
    """Return the text with each `from infer… import …` in its new form: modules may go to several packages."""
    lines = text.splitlines(keepends=True)
    for node in sorted(imports_of(text), key=lambda node: -node.lineno):
        assert node.module is not None
        by_module = dict[str, list[str]]()
        for alias in node.names:
            whole = names.module(f"{node.module}.{alias.name}")
            name = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            by_module.setdefault(whole.rpartition(".")[0], []).append(name)
        comment = re.search(r"  # noqa.*", "".join(lines[node.lineno - 1 : node.end_lineno]))
        indent = " " * node.col_offset
        new = [f"{indent}from {hidden(module)} import ({', '.join(each)})" for module, each in by_module.items()]
        lines[node.lineno - 1 : node.end_lineno] = ["\n".join(new) + (comment[0] if comment else "") + "\n"]
    return "".join(lines)


def hidden(module: str) -> str:
    return module.replace("infer", "inf\0er", 1)


def imports_of(text: str) -> list[ast.ImportFrom]:
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    return [node for node in found if node.module and (node.module + ".").startswith("infer.") and not node.level]


def shifted(text: str, old: str, new: str) -> str:
    """Return a test file's text whose paths from `__file__` upwards are as much longer as the file lies deeper."""
    by = new.count("/") - old.count("/")
    text = re.sub(r"(?<=Path\(__file__\)\.parents\[)(:?)(\d)", lambda found: f"{found[1]}{int(found[2]) + by}", text)
    return text.replace("Path(__file__).parent.parent", f"Path(__file__).parents[{1 + by}]") if by else text


def move() -> None:
    if (ROOT / "src" / "infer" / "compute").exists():
        sys.exit("the packages of this tree stand in rooms already: run this in a tree from before the move")
    names = Names()
    for path in tracked("."):
        file = ROOT / path
        if path.startswith(HISTORY) or file.is_symlink():
            continue
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        new = rewritten(text, names, is_python=file.suffix in (".py", ".pyi"))
        if path.startswith("tests/"):
            new = shifted(new, path, f"tests/{new_test(path.removeprefix('tests/'))}")
        if new != text:
            file.write_bytes(new.encode())
    for folder, old_paths, place in (("src/infer", names.sources, new_source), ("tests", names.tests, new_test)):
        for old in old_paths:
            if (new_path := place(old)) != old:
                (ROOT / folder / new_path).parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["git", "mv", f"{folder}/{old}", f"{folder}/{new_path}"], cwd=ROOT, check=True)
    for folder, introduction in INTRODUCTIONS.items():
        (ROOT / "src/infer" / folder / "__init__.py").write_text(f'"""{introduction}"""\n', encoding="utf-8")
    for command in (["ruff", "check", "--fix", "-q", "."], ["ruff", "format", "-q", "."]):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False)


def table() -> str:
    """Return the page of old and new names."""
    lines = ["# Where modules went", ""]
    lines += ["Earlier entries of the log, reports and branches name old folders of `src/infer` and `tests`. Modules"]
    lines += ["kept their names. A module that the second table names went there; all others stayed in their package."]
    lines += ["Tests follow the first table only. `scripts/move_rooms.py` did it.", ""]
    lines += ["| old package | new place |", "|---|---|"]
    lines += [f"| `{old}/` | `{new}/` |" for old, new in sorted(FOLDERS.items())]
    lines += ["", "| old package | modules that left it | new place |", "|---|---|---|"]
    for new, row in SPLITS.items():
        package, *modules = row.replace(":", "").split()
        lines.append(f"| `{package}/` | {', '.join(modules)} | `{new}/` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--table" in sys.argv:
        print(table(), end="")
        return
    move()


if __name__ == "__main__":
    main()
