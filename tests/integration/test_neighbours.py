"""One client misbehaves in each of many ways, and another client's stream continues, as `check_neighbours` measures."""

import sys
from pathlib import Path

import pytest

from extent import IS_WHOLE
from watched import python_command

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from check_neighbours import MISDEEDS, Heard, measure, table
from server_process import running

pytestmark = pytest.mark.slow

LEAST_RATIO = 0.25  # of the rate without neighbours: other tests run at the same time
MOST_GAPS = 40.0  # times the largest gap without neighbours


if IS_WHOLE:  # takes some minutes

    def test_a_stream_goes_on_beside_each_misdeed(smollm2_path: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text("loud sk-loud\nquiet sk-quiet\n")
        keys.chmod(0o600)
        code = "import sys; from infer.cli import main; sys.exit(main())"
        options = ["--model", smollm2_path, "--port", "PORT", "--threads", 1, "--api-key-file", keys]
        with running(python_command(code, "serve", *options, seconds=1800), tmp_path / "log") as server:
            found = measure(server, [], rounds=1)
        assert set(found) == {misdeed.name for misdeed in MISDEEDS}
        rows, _ = table(found)
        (alone,) = (row for row in rows if row["misdeed"] == "nothing")
        for row in rows:
            assert row["ratio"] >= LEAST_RATIO, row
            assert row["gap"] <= MOST_GAPS * alone["gap"], row


def test_a_table_says_which_stream_fell_below_the_bounds() -> None:
    found = {"nothing": [Heard(0.1, 100.0, 0.02)], "good": [Heard(0.1, 51.0, 0.4)], "slow": [Heard(0.1, 49.0, 0.4)]}
    found["stopped"] = [Heard(0.1, 90.0, 0.6)]
    rows, is_good = table(found)
    assert [row["good"] for row in rows] == [True, True, False, False]
    assert not is_good
    assert table({"nothing": found["nothing"], "good": found["good"]})[1]
