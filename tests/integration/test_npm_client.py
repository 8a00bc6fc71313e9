"""npm's `openai` against a served SmolLM2."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from idle import until_idle
from infer import LLM
from served import SECONDS, serving

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "openai_client.mjs"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_npm_s_client_gets_the_library_s_answers(smollm2_path: Path, openai_package: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    with LLM(smollm2_path, max_seq_len=1024) as llm, serving(llm, model="smollm2") as served:
        command = [node, str(SCRIPT), str(openai_package), f"{served.url}/v1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        until_idle(served)
        expected = llm.chat(MESSAGES, temperature=0, max_new_tokens=24).text
    found = json.loads(done.stdout)
    assert [found[way] for way in ("whole", "streamed", "collected")] == [expected] * 3
    assert found["parsed"]["name"] in ("Paris", "Rome")
    assert found["refusal"] == {"isBadRequest": True, "param": "temperature", "status": 400}
