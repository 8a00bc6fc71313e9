"""Generate an answer without a cache: the whole sequence is computed again for each token."""

from collections.abc import Sequence

import torch

from infer.engine.engine import Engine
from infer.engine.request import limits_of, make_request
from infer.engine.sequence import Sequence as Answer
from infer.llm import LLM
from infer.outputs import GenerationResult
from infer.runner.recompute import RecomputeRunner
from infer.sampling_params import SamplingParams


def generate_recomputed(llm: LLM, prompt_token_ids: Sequence[int], params: SamplingParams) -> GenerationResult:
    """Return the result of `LLM.generate`, computed slowly.

    Every cache is tested and measured against it.
    """
    engine, answer = (
        Engine(RecomputeRunner(llm.model)),
        Answer(make_request(limits_of(llm.model, llm.tokenizer), llm.tokenizer, prompt_token_ids, params)),
    )
    engine.submit(answer)
    with llm.model.backend.threads(), torch.inference_mode():
        while not answer.has_ended:
            engine.step()
    return answer.result()
