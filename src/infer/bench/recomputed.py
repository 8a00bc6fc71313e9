"""An answer without a cache: the whole sequence is computed again for each token."""

from collections.abc import Sequence

from infer.engine.engine import Engine
from infer.engine.request import make_request
from infer.engine.sequence import Sequence as Answer
from infer.engine.stream import Stream
from infer.llm import LLM
from infer.outputs import GenerationResult
from infer.runner.recompute import RecomputeRunner
from infer.sampling_params import SamplingParams


def generate_recomputed(llm: LLM, prompt_token_ids: Sequence[int], params: SamplingParams) -> GenerationResult:
    """What `LLM.generate` gives, slowly: the oracle of every cache, and what a cache is measured against."""
    engine = Engine(RecomputeRunner(llm.model))
    request = make_request(llm.model, llm.tokenizer, prompt_token_ids, params)
    return Stream(engine, engine.submit(Answer(request))).run()
