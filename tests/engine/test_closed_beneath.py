"""A model is closed while another part of the program uses it, or a task ends after its reader has gone."""

import asyncio
import gc
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from infer import AsyncLLM, InvalidRequestError, SamplingParams
from infer.errors import ClosedError
from infer.serving.server.asking import while_connected
from infer.serving.server.endpoint import ClientGoneError
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState

ANSWER = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)


@pytest.fixture
def llm(folder: Path) -> AsyncLLM:
    return AsyncLLM(folder)


def test_a_server_whose_model_is_closed_continues_and_reports_the_failure(llm: AsyncLLM) -> None:
    state = ServerState(ServerSettings())
    state.become_ready(llm)
    state.tick(0.0)
    assert state.phase == "ready"
    llm.llm.close()
    state.tick(0.0)
    assert (state.phase, str(state.failure)) == ("failed", "the model was closed")
    assert (state.step_began, state.has_engine_failed) == (None, False)


def test_a_thread_that_prepares_a_request_sees_that_the_model_closes(llm: AsyncLLM) -> None:
    llm.host.close()
    with pytest.raises(ClosedError):
        _ = llm.host.system_fingerprint


def test_no_answer_continues_after_the_error_that_ends_all(llm: AsyncLLM) -> None:
    refuse = Mock(side_effect=InvalidRequestError("enough"))
    params = [SamplingParams(max_new_tokens=1), ANSWER]

    async def ask() -> list[Any]:
        before = asyncio.all_tasks()
        with pytest.raises(InvalidRequestError, match="enough"):
            await llm.generate_all(["a", "b"], params, batch_size=2, on_result=refuse)
        return [task for task in asyncio.all_tasks() - before if not task.done()]

    assert asyncio.run(ask()) == []
    llm.llm.close()


def test_errors_for_a_disconnected_client_are_not_logged() -> None:
    logged, gone = list[Any](), Mock(receive=AsyncMock(return_value={"type": "http.disconnect"}))

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("nobody asks") from None

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        with pytest.raises(ClientGoneError):
            await while_connected(gone, fail_when_cancelled())
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(ask())
    assert logged == []
