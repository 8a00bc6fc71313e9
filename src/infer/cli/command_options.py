"""The options of each command: one class per command, made of groups that commands share.

The options of a model's settings, and of a server's, are declared by `ModelSettings` and `ServerSettings`. If a command
only calls one function with its options, the docstring of their class is its help.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import click

from infer.cli.option_fields import Declared, Group, argument, option, settings_field
from infer.cli.option_files import read_named_file, read_schema
from infer.cli.prompts import PromptOptions, logprobs_options, sampling_options
from infer.compute.operands.limits import GPU_STEP
from infer.model_settings import ModelSettings, Overflow, Speculation
from infer.outputs import Pooling
from infer.request_limits import MAX_DRAFT_TOKENS, NUM_DRAFT_TOKENS

Decorators = tuple[Callable[..., Any], ...]
AT_LEAST_1 = click.IntRange(min=1)
FILE = click.Path(path_type=Path)


# fmt: off
class ModelArgument(Declared):
    """MODEL, another way to give --model."""

    named: str | None = argument(metavar="[MODEL]", required=False)
    model: str


class VerboseOption(Declared):
    verbose: bool = option("-v", "--verbose", help="Print a traceback with an error.")


class ProgressOptions(VerboseOption):
    quiet: bool = option("-q", "--quiet", help="Print no progress.")


class ManyPromptsOptions(Declared):
    prompts_file: Path | None = option(
        metavar="FILE",
        help="Answer many prompts: one per line, or JSON lines if the name ends in .jsonl, each a string or an object "
             "of prompt and its own sampling parameters; - is stdin. Answers are in the order of the prompts, with an "
             "empty line between them, or one JSON object per line with --json.")
    batch_size: int = option(type=click.IntRange(1, GPU_STEP.logits), default=8,
                             help="With --prompts-file: number of prompts answered together.")
    overflow: Overflow = option(default="error", help="For a prompt that is too long: refuse it, or cut its beginning.")


class ConstraintOptions(Declared):
    """Constraints, of which at most one may be given. They are fields of `SamplingParams`."""

    json_schema: str | None = option(
        metavar="FILE", callback=read_schema,
        help="The answer must be JSON of this schema: a file, or the schema itself, {…}.")
    regex: str | None = option(metavar="PATTERN", help="The answer must match this pattern as a whole.")
    grammar: str | None = option(type=FILE, metavar="FILE", callback=read_named_file,
                                 help="The answer must follow this grammar in Lark's notation.")
    choice: tuple[str, ...] = option(metavar="TEXT",
                                     help="The answer must be one of these. Repeatable, or as --choice yes no.")


class SamplingOptions(Declared):
    """All sampling options. `given_values` reads them."""

    decorators: ClassVar[Decorators] = (sampling_options(has_length=True),)


class PathOptions(Declared):
    """Options that change the speed of an answer, but never its tokens."""

    speculation: Speculation | None = option(
        help="Draft several tokens and verify them in one step: faster if the text repeats, with the same tokens.")
    num_draft_tokens: int = option(
        "--num-draft-tokens", "--draft-tokens", default=NUM_DRAFT_TOKENS, type=click.IntRange(1, MAX_DRAFT_TOKENS),
        help="With --speculation: limit of drafted tokens per step.")
    prefill_chunk: int | None = option(type=click.IntRange(1, GPU_STEP.tokens),
                                       help="Limit of prompt tokens per step.  [default: 512 on a CPU, 8192 on a GPU]")
    stats: bool = option(help="Print on stderr which path ran and what it did.")


class ModelOption(Declared):
    model: str = option("-m", "--model", default="smollm2", metavar="NAME|PATH",
                        help="An installed model, a folder, a .gguf file, or org/repo[@revision][:Q4_K_M] on the hub.")


class NumberOptions(Declared):
    """Options for threads and for number formats. `settings` has the values of all groups of the command."""

    numbers: ClassVar = Group(ModelSettings, "numbers")
    settings: ModelSettings = settings_field(ModelSettings)


class EvictionOptions(Declared):
    """Options for the format of keys and values, and for their eviction."""

    cache: ClassVar = Group(ModelSettings, "cache")


class CacheOptions(EvictionOptions):
    prefixes: ClassVar = Group(ModelSettings, "prefixes")


class DiskOption(Declared):
    """The option for prefixes on disk, for programs that answer many prompts."""

    disk: ClassVar = Group(ModelSettings, "disk")


class DraftOption(Declared):
    """The option for a draft model, for programs that generate."""

    draft: ClassVar = Group(ModelSettings, "draft")


class RerankerOption(Declared):
    reranker: ClassVar = Group(ModelSettings, "reranker")


class DeviceOption(Declared):
    device: ClassVar = Group(ModelSettings, "device")


class RunningOptions(DeviceOption):
    """Options for how a model runs, and for the reports next to the text."""

    running: ClassVar = Group(ModelSettings, "running")
    quiet: bool = option("-q", "--quiet", help="Print only the text.")
    verbose: bool = option("-v", "--verbose", help="Print counts, seed and finish reason; a traceback with an error.")


class LoadOptions(ModelOption, NumberOptions, CacheOptions, RunningOptions):
    """The options of a command that loads a model and generates."""


class ServedOptions(NumberOptions, EvictionOptions, DraftOption, RunningOptions, RerankerOption):
    """The options of a server's models. The server itself decides if prefixes are reused."""


class GenerateOptions(
    PromptOptions, ManyPromptsOptions, ConstraintOptions, SamplingOptions, PathOptions, DraftOption, LoadOptions
):
    decorators: ClassVar[Decorators] = (logprobs_options,)
    logprobs: int | None
    as_json: bool = option("--json", help="Print JSON instead of text: one object per answer.")
    as_lines: bool = option(
        "--json-lines",
        help="Print one JSON object per token, then the result; with many prompts, only results, as they end.")
    permalink: bool = option(help="Print on stderr a link to this answer, for infer replay and the server's page.")


class BatchOptions(SamplingOptions, DraftOption, LoadOptions, RerankerOption):
    source: Path = argument(metavar="IN.jsonl")
    output: Path = argument(metavar="OUT.jsonl")
    workers: int = option(type=AT_LEAST_1, default=1, help="Number of processes, each with the model.")
    batch_size: int = option(type=click.IntRange(1, GPU_STEP.logits), default=16,
                             help="Number of rows that each process answers together.")
    retry_errors: bool = option(help="Answer again the rows whose line is an error.")
    seed: int | None


class EmbedOptions(LoadOptions):
    """Convert the lines of FILE, or of stdin, to vectors.

    The lines of a .jsonl file are strings, or objects {"text": …, "id": …}.
    """

    source: Path = argument(metavar="[FILE]", default="-")
    output: Path | None = option("-o", "--output", metavar="OUT",
                                 help="A .npy file for all vectors, or JSON lines.  [default: JSON lines on stdout]")
    prompt_name: str | None = option(metavar="NAME",
                                     help="Name of a prompt in the model's files, such as query, for each text.")
    pooling: Pooling | None = option(help="How to make one vector of a text's states.  [default: the model's own]")
    dimensions: int | None = option(type=AT_LEAST_1, help="Number of first dimensions to keep.")
    no_normalize: bool = option(help="Do not scale vectors to length 1.")
    truncate: bool = option(help="Cut texts that do not fit the context.")


class RerankOptions(LoadOptions, RerankerOption):
    """Rank the lines of FILE, or of stdin, by their relevance to a QUERY, with a reranker."""

    query: str = argument(metavar="QUERY")
    source: Path = argument(metavar="[FILE]", default="-")
    top_n: int | None = option("-n", "--top-n", type=AT_LEAST_1, help="Number of documents to show.  [default: all]")
    instruction: str | None = option(metavar="TEXT", help="The task, in a sentence.  [default: the model's own]")
    truncate: bool = option(help="Cut documents that do not fit the context.")
    as_json: bool = option("--json", help="Print one JSON object per document, with its place in FILE.")


class ClassifyOptions(LoadOptions):
    """Label the lines of FILE, or of stdin, with a classifier.

    The lines of a .jsonl file are strings, or objects {"text": …, "text_pair": …, "id": …}.
    """

    source: Path = argument(metavar="[FILE]", default="-")
    output: Path | None = option("-o", "--output", metavar="OUT",
                                 help="Output: a file of JSON lines.  [default: stdout]")
    truncate: bool = option(help="Cut texts that do not fit the context.")


class PerplexityOptions(ModelArgument, LoadOptions):
    """The options of a command that lets models predict a text."""

    text: Path = option("-f", "--text", default="-", metavar="FILE", show_default=False,
                        help="The text to predict.   [default: stdin]")
    context: int = option(type=click.IntRange(4), default=512, help="Tokens of a window; the second half is predicted.")
    as_json: bool = option("--json", help="Print one JSON object instead of a table.")


class CompareOptions(PerplexityOptions):
    reference: str = argument()
    html: Path | None = option(metavar="FILE",
                               help="Also write a page: the divergence over the text, the weights' errors by layer.")


class ImatrixOptions(ProgressOptions):
    """Collect the importance matrix of a MODEL over texts, for quantisation, as llama.cpp does.

    Without texts, it adds the matrices of --in-file. Ctrl-C writes nothing.
    """

    model: str = argument()
    texts: tuple[Path, ...] = argument(metavar="[TEXT]...", type=FILE)
    output: Path = option("-o", "--output", metavar="OUT", required=True,
                          help="Write the matrix to a .gguf file, or to a .dat file in llama.cpp's older format.")
    in_files: tuple[Path, ...] = option("--in-file", type=FILE, metavar="FILE",
                                        help="An earlier importance matrix to add. Repeatable.")
    chunk_size: int = option("-c", "--chunk-size", type=AT_LEAST_1, default=512,
                             help="Tokens of a chunk; each chunk begins with an empty context.")
    parse_special: bool = option(help="Read control tokens in the texts as control tokens, not as text.")
    force: bool = option(help="Replace OUT if it exists.")
    threads: int | None = option(type=AT_LEAST_1, help="Number of threads that compute.  [default: all cores]")


class ChatOptions(ModelArgument, SamplingOptions, DraftOption, LoadOptions, DiskOption):
    system: str | None = option(metavar="TEXT", help="System message before the conversation.")
    plain: bool = option(help="Show answers without styles for their Markdown.")
    no_generation_config: bool


class ReplayOptions(LoadOptions):
    permalink: str = argument()


class TraceOptions(PromptOptions, LoadOptions):
    decorators: ClassVar[Decorators] = (sampling_options(has_length=False),)
    step: int = option(type=AT_LEAST_1, default=1, help="Number of the token to trace; 1 follows the prompt.")
    num_candidates: int = option(type=click.IntRange(1, 50), default=10, help="Number of tokens to show.")
    as_json: bool = option("--json", help="Print one JSON object instead of a table.")


class InspectionOptions(VerboseOption):
    """The options of a command that reports on a model without generating."""

    as_json: bool = option("--json", help="Print one JSON object instead of a table.")


class BenchOptions(ModelArgument, ModelOption, NumberOptions, CacheOptions, DeviceOption, InspectionOptions):
    prompt_tokens: int = option("-p", "--prompt-tokens", type=AT_LEAST_1, default=512, help="Tokens to prefill.")
    num_tokens: int = option("-n", "--num-tokens", "--max-new-tokens", type=AT_LEAST_1, default=128,
                             help="Tokens to generate, the first of them by the prefill.")
    context: int | None = option(type=AT_LEAST_1, help="Tokens before the decoded ones.  [default: --prompt-tokens]")
    suite: Literal["quick", "standard", "full"] | None = option(
        help="Measure configs of several sizes instead: quick, two greedy ones; standard, also a long prompt, a long "
             "answer and a sampled one; full, seven.")
    repeats: int = option("--repeats", "--trials", type=AT_LEAST_1, default=3, help="Number of measured runs.")
    warmup: int = option(type=click.IntRange(min=0), default=2, help="Number of runs before the measured ones.")
    seed: int = option(type=click.IntRange(min=0, max=2**53), default=42, help="Seed of the prompts and of sampling.")
    report: Path | None = option(metavar="PATH",
                                 help="Also write the figures as JSON, to a file or to a new file in a folder.")
    compare: Path | None = option(metavar="REPORT", help="Also show ratios to the figures of a report.")
    profile: bool = option(help="Show the time of each operation and layer instead, as a table and bars.")


class NamedModel(Declared):
    model: str = argument(default="smollm2")


class ExplainOptions(NamedModel, InspectionOptions):
    """Describe a model from its headers: its layers, tokenizer, defaults and memory."""


class DoctorOptions(NamedModel, InspectionOptions):
    """Search a model's files for faults: the tokenizer, the chat template, and the values of all tensors.

    With --machine, report on this machine instead.

    Exit status: 0 without faults, 1 with faults, 2 or 3 if the files cannot be read.
    """

    html: Path | None = option(metavar="FILE", help="Also write a page with the sizes and values by layer.")
    machine: bool = option(help="Show this machine instead: cores, memory, kernels, extras, and which models fit.")


class QuantizeOptions(VerboseOption):
    """Write a MODEL as a GGUF file of another type, with llama.cpp's mixture of types.

    Only a few rows are in memory at a time. OUT.gguf appears when it is complete.
    """

    source: str = argument(metavar="MODEL")
    output: Path = argument(metavar="OUT.gguf")
    type: str = option("-t", "--type", default="Q4_K_M", metavar="TYPE",
                       help="F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q4_0, IQ4_XS, Q3_K_M, Q2_K and others; "
                            "any other word lists all.")
    tensor_type: tuple[str, ...] = option(
        metavar="PATTERN=TYPE", help="Type of tensors whose names match, as in ffn_down=Q6_K. Repeatable.")
    output_tensor_type: str | None = option(metavar="TYPE", help="Type of the output matrix.")
    token_embedding_type: str | None = option(metavar="TYPE", help="Type of the token embedding.")
    pure: bool = option(help="Use one type for all matrices, not the mixture of --type.")
    imatrix: Path | None = option(metavar="FILE",
                                  help="An importance matrix, from infer imatrix or llama.cpp.")
    requantize: bool = option(help="Also quantise tensors that are already quantised: more precision is lost.")
    dry_run: bool = option(help="Show the sizes and types without writing the file.")
    force: bool = option("-f", "--force", help="Replace the output if it exists.")
    threads: int | None = option(type=AT_LEAST_1, help="Number of threads that compute.  [default: all cores]")
    quiet: bool = option("-q", "--quiet", help="Print nothing.")


class EstimateOptions(NamedModel, CacheOptions, DraftOption, NumberOptions, InspectionOptions):
    """Estimate from headers how much memory a model and its cache need, whether they fit here, and the speed."""

    max_seq_len: int | None = option(type=AT_LEAST_1, help="Tokens of a row.  [default: the model's own, at most 8192]")
    batch: int = option(type=AT_LEAST_1, default=1, help="Number of rows in the cache.")
    pool_pages: int | None = option(type=AT_LEAST_1,
                                    help="Pages of 64 tokens that the rows share.  [default: enough for full rows]")
    device: Literal["cpu", "cuda"] = option(default="cpu")


class CompileOptions(NamedModel, ProgressOptions):
    """Compile the CPU kernels that a model needs, so that its first use is fast: for images and Dockerfiles."""

    is_all: bool = option("--all", help="Compile for every kv type and precision, not only the usual ones.")


class PullOptions(ProgressOptions):
    """Download a model, or its missing files, from the Hugging Face hub into the hub's local cache."""

    model: str = argument(metavar="ORG/REPO[:Q4_K_M]")


class RemovalOptions(PullOptions):
    """Remove a model from the hub's local cache."""


class ListOptions(Declared):
    """List the models on this machine: installed packages, the hub's local cache, and the folder $INFER_MODELS."""

    as_json: bool = option("--json", help="Print one JSON array instead of a table.")
    supported: bool = option("--supported", help="List the families of models that load, with a tested model each.")
    verbose: bool = option("-v", "--verbose", help="Also list the names for --device; a traceback with an error.")
# fmt: on
