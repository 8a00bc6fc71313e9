"""On Windows itself, the library and the command say in one line that WSL 2 is the way."""

import runpy
import sys

import pytest

import infer


def test_the_library_names_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match=r"install it in WSL 2, as docs/how-to/windows\.md shows"):
        _ = infer.LLM


def test_the_command_names_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delitem(sys.modules, "infer.__main__", raising=False)  # another test may have imported it
    with pytest.raises(SystemExit, match="WSL 2") as ended:
        runpy.run_module("infer", run_name="__main__")
    assert "\n" not in str(ended.value)
