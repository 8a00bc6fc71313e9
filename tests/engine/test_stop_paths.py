"""Stop strings in the real loop: any tokens, stops, chunks, chains and drafts against a search of the decoded text."""

import codecs
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from extent import IS_SHORT, usual_or_all
from infer.sampling_params import SamplingParams
from path_cases import DRAFTS, EOS, Case, Outcome, Place, Way, World, make_sequence, run_alone
from test_stop_strings import naive

NUM_TOKENS = 24
# Letters, tokens of several letters, and the bytes of é, so that tokens can be parts of characters.
ALLOWED = [*b"ab c", *range(256, EOS), *"é".encode()]

SETTINGS = [DRAFTS, (1, 7, 512), (1, 8, 64), (True, True, True, False)]  # of a way
ways = st.builds(Way, *map(st.sampled_from, SETTINGS))
stops = st.lists(st.text(alphabet='abc é"', min_size=1, max_size=4), min_size=1, max_size=4)


def expected_of(world: World, token_ids: list[int], stop: list[str], include: bool) -> Outcome:
    """Return the outcome up to the first token after which the decoded text contains a stop string."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for count, token_id in enumerate(token_ids, 1):
        text += decoder.decode(world.tokenizer.token_bytes[token_id], final=count == len(token_ids))
        shown, matched = naive(text, stop, include)
        if matched is not None:
            return Outcome(token_ids[:count], shown, "stop", matched, None, None, None)
    return Outcome(token_ids, text, "length", "max_new_tokens", None, None, None)


@settings(max_examples=15 if IS_SHORT else usual_or_all(30, 300), deadline=None)
@given(st.integers(0, 40), st.sampled_from([0.6, 1.0, 2.0]), stops, st.booleans(), ways)
def test_the_text_ends_where_a_search_of_the_decoded_text_says(
    world: World, seed: int, temperature: float, stop: list[str], include: bool, way: Way
) -> None:
    values = {"allowed_token_ids": ALLOWED, "max_new_tokens": NUM_TOKENS, "frequency_penalty": 0.2}
    params = SamplingParams(temperature=temperature, seed=seed, **values)
    prompt = tuple(b"ab abc ab c"[: 1 + seed % 11])
    whole = run_alone(world, Case("whole", prompt, params), Way()).token_ids
    expected = expected_of(world, whole, stop, include)

    case = Case("stopped", prompt, replace(params, stop=stop, include_stop_str_in_output=include))
    place = Place(world, way)
    stream = place.stream(make_sequence(world, case, way, whole))  # the drafts continue after the stop
    pieces = list(stream)
    assert Outcome.of(stream.result) == expected
    said = [piece.token_id for piece in pieces], "".join(piece.text for piece in pieces)
    assert said == (expected.token_ids, expected.text)

    # Tokens after the stop are in neither cache nor history, so the same context continues like a new one.
    then = Case("then", (*prompt, *expected.token_ids, ord("b")), replace(params, max_new_tokens=6))
    assert place.length == len(then.prompt) - 2
    gone_on = run_alone(world, then, way, (), place)
    assert gone_on.token_ids == run_alone(world, then, Way()).token_ids
