"""npm's `openai` against a served SmolLM2."""

import json
import subprocess
from pathlib import Path

import pytest

from assets import asset
from served import Served

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "openai_client.mjs"


@pytest.mark.usefixtures("idle_afterwards")
def test_npm_s_client_gets_the_library_s_answers(served: Served, expected: str, node: str) -> None:
    command = [node, str(SCRIPT), str(asset("clients/openai")), f"{served.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found[way] for way in ("whole", "streamed", "collected")] == [expected] * 3
    assert found["parsed"]["name"] in ("Paris", "Rome")
    assert found["refusal"] == {"isBadRequest": True, "param": "temperature", "status": 400}
