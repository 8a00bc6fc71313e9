"""The faults of scripts/plant_faults.py can still be planted. With INFER_TESTS=all, their tests fail for each."""

from pathlib import Path

import pytest

from cases import cases
from extent import IS_WHOLE
from plant_faults import Fault, main, plant, problem_of, read_faults

FAULTS = read_faults()


def test_each_fault_has_an_id_of_its_own_applies_to_one_place_and_names_tests() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert [problem for fault in FAULTS if (problem := problem_of(fault)) is not None] == []


@cases(
    "change problem",
    ({"file": "absent.py"}, r"A1: src/infer/absent\.py does not exist"),
    ({"old": "no such text"}, "A1: the old text occurs 0 times in .*'no such text'"),
    ({"old": "return"}, r"A1: the old text occurs \d+ times"),
    ({"tests": ["compute/backends/test_shared_prefix.py::test_absent"]}, "A1: .*::test_absent does not exist"),
    ({"tests": []}, "A1: no test is named"),
)
def test_a_fault_that_cannot_be_planted_is_named(change: dict[str, object], problem: str) -> None:
    fault = next(fault for fault in FAULTS if fault.id == "A1")
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(problem_of(fault._replace(**change)))


def test_an_unknown_id_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-fault"])
    assert "no fault has the id no-such-fault" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fault_without_an_effect_survives_and_the_sources_stay_as_they_are(tmp_path: Path) -> None:
    source, tests = tmp_path / "src" / "infer", tmp_path / "tests"
    for folder in (source, tests):
        folder.mkdir(parents=True)
    (source / "__init__.py").touch()
    (source / "half.py").write_text("def half(number):\n    return number // 2\n")
    (tests / "test_half.py").write_text("from infer.half import half\n\n\ndef test_half():\n    assert half(4) == 2\n")
    old, named = "number // 2", ["test_half.py::test_half"]
    faults = [
        Fault("rounds up", "no effect", "half.py", old, "-(-number // 2)", named),
        Fault("quarter", "seen", "half.py", old, "number // 4", named),
        Fault("broken", "seen", "half.py", old, "number //", named),
    ]
    assert [problem_of(fault, tmp_path) for fault in faults] == [None] * 3
    found = plant(faults, 1, tmp_path)
    assert found == {"rounds up": "survived", "quarter": "killed", "broken": "error"}
    assert old in (source / "half.py").read_text()


if IS_WHOLE:  # takes an hour

    @pytest.mark.slow
    @pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])
    def test_the_named_tests_see_the_fault(fault: Fault) -> None:
        assert plant([fault], 1) == {fault.id: "killed"}
