"""Claims about the noise: a pinned function, distributed as Gumbel, independent. CPU kernels have the same bits."""

import hashlib
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from infer.compute.sampling import noise
from infer.compute.sampling.constants import MAX_NOISE

# Each statistical test fails by chance with this probability; seeds are fixed, so a pass is repeatable.
FALSE_ALARM = 1e-6

MIX32_ANSWERS = [0x00000000, 0x688990C0, 0x6768824A]
GUMBEL_42_7 = [0x3F0DD72D, 0x3F8591BB, 0xBDA2C82D, 0x3FC21525]
# Of the noise where branches meet, and of some rows
DIGEST = "817e37b52f515d9c5bb3dbda0c4972620949b75c427aafaf1a34ff82a9610027"
GUMBEL_LAST = [0xBEF7F694, 0xBE247C05, 0xBF4A2E8D, 0xBF13D4BE]

EDGES = [0, 1, 2, 255, 256, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1]
NEAR_SQRT_HALF = [round((1 - math.sqrt(0.5)) * 2**32) + offset for offset in range(-200, 200)]


def words(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.int32))


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    return noise.gumbel_at(seed, position, torch.arange(vocab_size))


def bits(values: torch.Tensor | np.ndarray) -> list[int]:
    array: np.ndarray = np.ascontiguousarray(values)
    return list(array.view(np.uint32).tolist())


def test_known_answers() -> None:
    assert [int(x) & 2**64 - 1 for x in noise.mix64(torch.tensor([0, 1]))] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert [int(x) & 2**32 - 1 for x in noise.mix32(words([0, 1, 2**32 - 1]))] == MIX32_ANSWERS
    assert bits(gumbel(42, 7, 4)) == GUMBEL_42_7
    assert bits(gumbel(2**64 - 1, 100_000, 4)) == GUMBEL_LAST
    digest = hashlib.sha256(noise.gumbel_of(words(EDGES + NEAR_SQRT_HALF)).numpy().tobytes())
    for seed, position in product((0, 1, 42, 2**63 - 1, 2**63, 2**64 - 1), (0, 1, 131_071)):
        digest.update(gumbel(seed, position, 10_000).numpy().tobytes())
    assert digest.hexdigest() == DIGEST


def test_noise_is_accurate_and_finite_over_the_whole_range() -> None:
    generator = np.random.default_rng(0)
    hashes = EDGES + NEAR_SQRT_HALF + generator.integers(0, 2**32, 100_000).tolist()
    values = noise.gumbel_of(words(hashes)).double().numpy()
    exact = -np.log(-np.log1p(-(np.array(hashes) + 0.5) / 2**32))
    assert np.isfinite(values).all()
    assert values.min() > -3.14, "above −ln(33 ln 2)"
    assert values.max() < MAX_NOISE
    assert (np.abs(values - exact) / np.maximum(np.abs(exact), 1)).max() < 3e-7


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 300_000), min_size=1, max_size=20))
def test_a_token_has_the_same_noise_alone_in_any_order_and_any_batch(seed: int, position: int, ids: list[int]) -> None:
    token_ids = torch.tensor(ids)
    row = noise.gumbel_at(seed, position, token_ids)
    signed = seed - 2**64 if seed >= 2**63 else seed
    batch = noise.gumbel_rows(torch.tensor([7, signed]), torch.tensor([0, position]), token_ids.flip(0))
    assert torch.equal(batch[1].flip(0), row)
    assert torch.equal(noise.gumbel_at(seed, position, token_ids[:1]), row[:1])


def test_a_row_never_repeats_a_hash() -> None:
    hashes = noise.hash_tokens(torch.tensor([123456789]), torch.arange(262_144))
    assert len(hashes.unique()) == 262_144


def test_noise_is_gumbel_distributed() -> None:
    values = gumbel(7, 11, 262_144).double().numpy()
    assert stats.kstest(values, "gumbel_r").pvalue > FALSE_ALARM


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_noise_of_neighbouring_seeds_and_positions_is_gumbel_distributed(vary: str) -> None:
    count = torch.arange(20_000)
    fixed = torch.full_like(count, 5)
    seeds, positions = (count, fixed) if vary == "seed" else (fixed, count)
    for token_id in (0, 1, 49_151):
        values = noise.gumbel_rows(seeds, positions, torch.tensor([token_id]))[:, 0].double().numpy()
        assert stats.kstest(values, "gumbel_r").pvalue > FALSE_ALARM / 3


LAGS = {"seed": (1, 0, 0), "position": (0, 1, 0), "token": (0, 0, 400)}
LAGS |= {"seed and position": (1, -1, 0), "high half of the seed": (2**32, 0, 0)}


@pytest.mark.parametrize("lag", LAGS)
def test_neighbours_are_independent(lag: str) -> None:
    """The test is chi-square on the 16 × 16 table of the two uniforms, with 500 × 400 pairs."""
    seeds, positions, token_ids = torch.arange(500) * 977, torch.arange(500) % 64, torch.arange(400)
    first = noise.gumbel_rows(seeds, positions, token_ids)
    of_seed, of_position, of_token = LAGS[lag]
    second = noise.gumbel_rows(seeds + of_seed, positions + of_position, token_ids + of_token)
    uniforms = [torch.exp(-torch.exp(-values.double())).flatten() for values in (first, second)]
    ranks = [(uniform * 16).long().clamp(max=15) for uniform in uniforms]
    table = torch.bincount(ranks[0] * 16 + ranks[1], minlength=256).double()
    expected = table.sum() / 256
    assert stats.chi2.sf(float(((table - expected) ** 2 / expected).sum()), 255) > FALSE_ALARM / 5


def test_every_bit_of_seed_position_and_token_flips_half_of_the_hash() -> None:
    """For 4,000 keys × 32 bits, the share of flipped bits is within 0.5 ± 0.01 (7 standard deviations)."""
    seeds = torch.arange(4000) * 7919
    keys = noise.mix64(noise.mix64(seeds) + 3)
    base = noise.hash_tokens(keys, torch.tensor([1000]))
    of_seeds = [noise.mix64(noise.mix64(seeds ^ flip) + 3) for flip in [*(1 << bit for bit in range(63)), -(1 << 63)]]
    of_positions = [noise.mix64(noise.mix64(seeds) + (3 ^ 1 << bit)) for bit in range(18)]
    changed = [noise.hash_tokens(moved, torch.tensor([1000])) for moved in of_seeds + of_positions]
    changed += [noise.hash_tokens(keys, torch.tensor([1000 ^ 1 << bit])) for bit in range(18)]
    for each in changed:
        assert flipped_share(base, each) == pytest.approx(0.5, abs=0.01)


def flipped_share(a: torch.Tensor, b: torch.Tensor) -> float:
    changed = (a ^ b).numpy().view(np.uint32).astype(np.uint64)
    return float(np.bitwise_count(changed).sum()) / (changed.size * 32)


def test_argmax_of_logits_plus_noise_draws_from_the_softmax() -> None:
    """The test is chi-square on 40,000 draws over 50 tokens."""
    logits = torch.linspace(-3, 3, 50)
    positions, ids = torch.arange(10_000), torch.arange(50)
    noisy = [logits + noise.gumbel_rows(torch.full((10_000,), seed), positions, ids) for seed in range(4)]
    draws = torch.cat(noisy).argmax(1)
    expected = logits.double().softmax(0) * len(draws)
    statistic = float(((torch.bincount(draws, minlength=50) - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, 49) > FALSE_ALARM
