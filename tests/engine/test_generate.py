"""The decode loop with a scripted model: its answers, their ends, and the pieces that a caller receives."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from byte_tokenizer import END_OF_TURN, EOS, VOCAB_SIZE, write_byte_tokenizer
from infer.compute import ops
from infer.compute.operands.step import Chunk
from infer.engine.engine import Engine
from infer.engine.requests.stream import Stream
from infer.engine.runner.runner import Runner
from infer.engine.step.request import Request
from infer.engine.step.request_options import RequestOptions
from infer.engine.step.sequence import Sequence as Answering
from infer.models.transformer import Transformer
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams
from infer.text.tokenizer import Tokenizer
from looping import loop_of, open_stream
from recompute import CachelessRunner


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


class Rowwise(CachelessRunner):
    """A runner without a model. `logits` returns the logits after each chunk."""

    def __init__(self) -> None:
        backend = ops.backend_of(torch.device("cpu"))
        attributes = {"device": backend.device, "step_limits": backend.step_limits}
        super().__init__(Mock(spec=Transformer, backend=backend, max_seq_len=1000, rope_border=None, **attributes))
        self.chunks: list[list[int]] = []

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def logits_of(self, chunk: Chunk) -> Tensor:
        self.chunks.append(list(chunk.token_ids))
        lines = [self.logits(chunk.token_ids) for _ in range(chunk.num_logits)]
        return torch.stack(lines) if lines else torch.zeros(0, VOCAB_SIZE)


class Scripted(Rowwise):
    """Gives logits that make each of the scripted ids the likeliest in turn, and then always id 0."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__()
        self.script = list(script)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        said = sum(len(chunk) == 1 for chunk in self.chunks[1:])  # prompts here do not end in a chunk of one
        logits = torch.zeros(VOCAB_SIZE)
        logits[self.script[said] if said < len(self.script) else 0] = 10.0
        return logits


def make_stream(tokenizer: Tokenizer, runner: Any, prompt: Sequence[int] = (1, 2, 3), **values: Any) -> Stream:
    """Return a stream of a scripted answer, or of a runner's."""
    limit, made = values.pop("limit", 1000), runner if isinstance(runner, Runner) else Scripted(runner)
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 50, "seed": 0} | values)
    options = RequestOptions(prefill_chunk=4)
    request = Request(tokenizer, tuple(prompt), params, limit, tokenizer.vocab_size, options)
    return open_stream(loop_of(Engine(made)), Answering(request))


def run(tokenizer: Tokenizer, script: Sequence[int], **values: Any) -> GenerationResult:
    return make_stream(tokenizer, script, **values).run()


def test_greedy_decoding_samples_the_likeliest_tokens_up_to_the_length(tokenizer: Tokenizer) -> None:
    result = run(tokenizer, b"hello world", max_new_tokens=5)
    assert (result.text, result.token_ids) == ("hello", list(b"hello"))
    assert (result.finish_reason, result.stop_reason) == ("length", "max_new_tokens")
    assert (result.prompt_tokens, result.generated_tokens, result.seed) == (3, 5, 0)


@pytest.mark.parametrize("end", [EOS, END_OF_TURN])
def test_any_end_of_sequence_id_ends_the_answer_and_is_not_in_the_text(tokenizer: Tokenizer, end: int) -> None:
    result = run(tokenizer, [*b"abc", end, *b"def"])
    assert (result.text, result.finish_reason, result.stop_reason) == ("abc", "eos", end)
    assert result.token_ids == [*b"abc", end]


def test_ignore_eos_continues_but_stop_token_ids_still_stop(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [*b"ab", EOS, *b"cd"], ignore_eos=True, max_new_tokens=5).text == "abcd"
    result = run(tokenizer, [*b"ab", EOS, *b"cd"], ignore_eos=True, stop_token_ids=[ord("c")])
    assert (result.text, result.finish_reason, result.stop_reason) == ("ab", "eos", ord("c"))


def test_a_stop_string_across_tokens_is_cut_and_never_shown(tokenizer: Tokenizer) -> None:
    stream = make_stream(tokenizer, b"one\nEN two END three", stop=["END", "\n\n"])
    seen = [piece.text for piece in stream]
    assert "".join(seen) == stream.result.text == "one\nEN two "
    assert (stream.result.finish_reason, stream.result.stop_reason) == ("stop", "END")
    assert not any("END" in "".join(seen[:count]) for count in range(len(seen)))


def test_include_stop_str_in_output_keeps_it(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, b"one END", stop="END", include_stop_str_in_output=True).text == "one END"


def test_held_back_text_is_shown_when_the_stop_string_does_not_come(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [*b"one EN", EOS], stop="END").text == "one EN"
    assert run(tokenizer, b"one EN", stop="END", max_new_tokens=6).text == "one EN"


def test_stop_strings_and_end_of_sequence_wait_for_min_new_tokens(tokenizer: Tokenizer) -> None:
    for least, text in ((2, "a"), (3, "aXb")):
        assert run(tokenizer, b"aXbXc", stop="X", min_new_tokens=least).text == text
    result = run(tokenizer, [EOS, EOS, ord("a"), EOS], min_new_tokens=2)
    assert result.generated_tokens >= 2
    assert EOS not in result.token_ids[:2]


def test_end_of_sequence_wins_over_length_in_the_same_step(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [*b"ab", EOS], max_new_tokens=3).finish_reason == "eos"
    assert run(tokenizer, b"abX", max_new_tokens=3, stop="X").finish_reason == "stop"


def test_a_full_context_ends_the_answer_with_its_own_reason(tokenizer: Tokenizer) -> None:
    result = run(tokenizer, b"abcdefgh", limit=7, max_new_tokens=None)
    assert (result.text, result.finish_reason, result.stop_reason) == ("abcd", "length", "context")


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    text = "né 日本 🎉"
    pieces = list(make_stream(tokenizer, [*text.encode(), EOS]))
    assert "".join(piece.text for piece in pieces) == text
    assert not any("�" in piece.text for piece in pieces)


def test_half_a_character_at_the_end_is_replaced_not_lost(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, "a日".encode()[:-1], max_new_tokens=3).text == "a�"


def test_the_callback_sees_every_token_and_false_cancels(tokenizer: Tokenizer) -> None:
    seen: list[int] = []

    def on_token(token_id: int, text: str) -> bool | None:
        seen.append(token_id)
        return False if len(seen) == 3 else None

    result = make_stream(tokenizer, b"abcdef").run(on_token)
    assert seen == list(b"abc") == result.token_ids
    assert (result.text, result.finish_reason, result.stop_reason) == ("abc", "abort", "cancelled")


def test_a_prompt_runs_in_chunks_and_then_token_by_token(tokenizer: Tokenizer) -> None:
    context = Scripted(b"ab")
    make_stream(tokenizer, context, range(10), max_new_tokens=2).run()
    assert context.chunks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [ord("a")]]


def test_the_first_token_is_sampled_like_every_other(tokenizer: Tokenizer) -> None:
    """At temperature 2 a flat row gives many first tokens. If the prefill took the argmax, there would be one."""

    class Flat(Rowwise):
        def logits(self, token_ids: Sequence[int]) -> Tensor:
            return torch.zeros(VOCAB_SIZE)

    def first(seed: int) -> int:
        return make_stream(tokenizer, Flat(), temperature=2.0, seed=seed, max_new_tokens=1).run().token_ids[0]

    assert len({first(seed) for seed in range(30)}) > 15
    assert [first(seed) for seed in range(5)] == [first(seed) for seed in range(5)]
