"""Values that a Mac reports, from texts and numbers of its programs. Nothing here runs on a Mac."""

import signal
from pathlib import Path

import pytest

from infer.system import cores, macos
from infer.system.atomic import locked_folder
from infer.system.available_memory import available_memory_bytes, total_memory_bytes
from infer.system.child_process import Child, ChildError
from mac_mask import NUMBERS, MacLibrary

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               20000.
Pages active:                            180000.
Pages inactive:                          170000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                         90000.
Pages purgeable:                           1000.
"Translation faults":                 812345678.
Pages copy-on-write:                   12345678.
File-backed pages:                       100000.
Anonymous pages:                         253000.
Pages stored in compressor:              300000.
"""
GROWING = """
print('""', flush=True)
input()
kept = []
while True:
    kept.append(bytearray(1 << 20))
"""


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(macos, "_library", MacLibrary)
    for module in (macos, cores):
        monkeypatch.setattr(module, "IS_MACOS", True)


def test_free_memory_is_what_activity_monitor_does_not_count() -> None:
    assert macos.bytes_of_vm_stat(VM_STAT) == (20_000 + 100_000 + 1_000) * 16_384


@pytest.mark.parametrize("text", ["", "Pages free: 3.", "(page size of 4096 bytes)"])
def test_another_output_of_vm_stat_reports_nothing(text: str) -> None:
    assert macos.bytes_of_vm_stat(text) is None


@pytest.mark.usefixtures("mac")
def test_a_mac_computes_with_its_performance_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cores.default_num_threads(), cores.processor_name()) == (2, "Apple M4")
    monkeypatch.delitem(NUMBERS, "hw.perflevel0.physicalcpu")
    assert cores.default_num_threads() == 4


@pytest.mark.usefixtures("mac")
def test_a_mac_reports_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(macos, "free_memory_bytes", lambda: macos.bytes_of_vm_stat(VM_STAT))
    assert (total_memory_bytes(), available_memory_bytes()) == (16 << 30, 121_000 * 16_384)


def test_without_vm_stat_the_free_memory_is_unknown() -> None:
    if Path("/usr/bin/vm_stat").exists():
        pytest.skip("this is a Mac")
    assert macos.free_memory_bytes() is None


@pytest.mark.usefixtures("mac")
def test_a_process_that_takes_too_much_memory_ends(tmp_path: Path) -> None:
    program = tmp_path / "growing.py"
    program.write_text(GROWING)
    child = Child(program, memory_bytes=100 << 20)
    with pytest.raises(ChildError) as caught:
        child.ask(None, 60.0)
    assert caught.value.signal == signal.SIGKILL


def test_no_core_is_reserved_where_threads_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_affinity", lambda: None)
    assert cores.take_cores(1) == []
    assert cores.node_of_thread(0, 1) is None
    with cores.visit({0}):
        pass


def test_the_paths_of_sockets_fit_a_mac() -> None:
    """A path has at most 103 bytes there, and temporary folders have long names."""
    temporary = "/private/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T"
    for prefix in ("infer-front-", "infer-shelf-"):
        with locked_folder(prefix) as folder:
            assert len(f"{temporary}/{folder.name}/10000") <= 103
