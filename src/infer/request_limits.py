"""Limits and defaults of requests, each number only once. `docs/reference/defaults.md` has them as a table."""

from typing import Final

# Default numbers of tokens of an answer.
NUM_TOKENS_OF_PARAMS: Final = 128  # in `SamplingParams`
NUM_TOKENS_OF_CALLS: Final = 512  # in calls of `LLM`, on the command line and in chats over HTTP
NUM_TOKENS_OF_COMPLETIONS: Final = 16  # in `/v1/completions`, as in OpenAI's API, `/v1/trace` and `/v1/branch`

MAX_TOKENS: Final = 2**31 - 1  # largest number that a body may request
MAX_CONTEXT: Final = 8192  # positions of a context, unless more are requested
MAX_FULL_CONTEXTS: Final = 8  # a model has pages for this many full contexts by default
DEFAULT_PREFIX_BYTES: Final = 8 * 10**9  # bytes of files with prefixes of prompts, on the command line
MAX_LOGPROBS: Final = 20  # alternatives per token
MAX_STOPS: Final = 64  # stop strings per body
MAX_BIAS: Final = 100  # of a token in a body
MAX_CHOICES: Final = 128  # largest n
MAX_ANSWERS: Final = 1024  # per body: prompts times n
MAX_TEXTS: Final = 2048  # per body of embeddings
MAX_TOOLS: Final = 128
MAX_DEPTH: Final = 64  # nested lists and objects of a body, and of a JSON file
MAX_VALUES: Final = 50_000  # of all lists and objects of a body, without lists of numbers
MAX_DIGITS: Final = 500  # characters of a number in a body
MAX_KEYS: Final = 256  # per object of parameters, and per tool
MAX_BUDGET: Final = 1 << 20  # tokens of reasoning
MAX_PRIORITY: Final = 9
NUM_DRAFT_TOKENS: Final = 15  # default per step
MAX_DRAFT_TOKENS: Final = 32
MAX_TRACED: Final = 256  # tokens per trace
NUM_CANDIDATES: Final = 10  # default per traced token
MAX_CANDIDATES: Final = 64
MAX_WARNINGS: Final = 32  # per answer
