from infer.async_llm import AsyncLLM as AsyncLLM
from infer.engine.request_options import RequestOptions as RequestOptions
from infer.engine.stream import AsyncStream as AsyncStream
from infer.engine.stream import Stream as Stream
from infer.errors import InferError as InferError
from infer.errors import InvalidRequestError as InvalidRequestError
from infer.errors import ModelError as ModelError
from infer.llm import LLM as LLM
from infer.llm import load_model as load_model
from infer.llm import load_tokenizer as load_tokenizer
from infer.outputs import Classification as Classification
from infer.outputs import GenerationResult as GenerationResult
from infer.outputs import GenerationTiming as GenerationTiming
from infer.outputs import Piece as Piece
from infer.outputs import RankedDocument as RankedDocument
from infer.outputs import ReasoningDelta as ReasoningDelta
from infer.outputs import ToolCall as ToolCall
from infer.outputs import ToolCallDelta as ToolCallDelta
from infer.sampling.definition import sample_token as sample_token
from infer.sampling_params import SamplingParams as SamplingParams
from infer.session.session import Session as Session
from infer.tokenizer import Tokenizer as Tokenizer

__version__: str
