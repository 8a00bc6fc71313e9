"""The model whose cache is tested."""

from pathlib import Path

import pytest

from path_cases import make_folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("llama"))
