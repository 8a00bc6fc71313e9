"""Limits and defaults of requests: each number once. `docs/reference/defaults.md` has them as a table."""

from typing import Final

# Tokens of an answer, for a caller who names no other number.
NUM_TOKENS_OF_PARAMS: Final = 128  # of `SamplingParams`
NUM_TOKENS_OF_CALLS: Final = 512  # of the calls of `LLM`, the command line and chats over HTTP
NUM_TOKENS_OF_COMPLETIONS: Final = 16  # of `/v1/completions`, as OpenAI has it, and of `/v1/trace` and `/v1/branch`

MAX_TOKENS: Final = 2**31 - 1  # that a body may ask for
MAX_CONTEXT: Final = 8192  # positions of a context, unless more are asked for
MAX_FULL_CONTEXTS: Final = 8  # for which a model has pages, unless their number is given
DEFAULT_PREFIX_BYTES: Final = 8 * 10**9  # of files that keep prefixes of prompts, for the command line
MAX_LOGPROBS: Final = 20  # alternatives of a token
MAX_STOPS: Final = 64  # stop strings of a body
MAX_BIAS: Final = 100  # of a token, in a body
MAX_CHOICES: Final = 128  # n
MAX_ANSWERS: Final = 1024  # of a body: prompts times n
MAX_TEXTS: Final = 2048  # of a body of embeddings
MAX_TOOLS: Final = 128
MAX_BUDGET: Final = 1 << 20  # tokens of reasoning
MAX_PRIORITY: Final = 9
NUM_DRAFT_TOKENS: Final = 15  # of a step, unless another number is given
MAX_DRAFT_TOKENS: Final = 32
MAX_TRACED: Final = 256  # tokens of a trace
NUM_CANDIDATES: Final = 10  # of a traced token, unless another number is given
MAX_CANDIDATES: Final = 64
MAX_WARNINGS: Final = 32  # of an answer
