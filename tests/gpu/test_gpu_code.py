"""Claims about the machine code of the kernels, attention's too. Triton compiles it without a GPU.

INFER_TRITON names a folder with another version of Triton. An older one moves the activations of a gated `matvec`
between its warps, which takes two barriers in a trip and some registers.
"""

import os
import re
import struct

import pytest

from compiled_kernels import MAX_SHARED_BYTES, NUM_TARGETS, TARGETS, Kernels, Kinds, code_of_kinds, count
from extent import IS_WHOLE
from infer.compute.sampling import noise

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.slow
STEP = ("rotate", "advance", "accept", "take")
IS_OLDER = "INFER_TRITON" in os.environ
MOST_REGISTERS = dict.fromkeys(STEP, 96) | {"matvec": 104 if IS_OLDER else 96}
MOST_BARRIERS = 2 if IS_OLDER else 0  # in a trip of a gated matvec
MOST_STATE_REGISTERS = {"mix_runs": 255, "multiply_keys": 168}  # others: 64
# Names that ptxas gives to the instructions of these claims.
LISTED = {r"dp4a": r"IDP\.4A", r"ld\.global\.v4": r"LDG\.E\.128", r"w?g?mma\S*\.s8": "IMMA|IGMMA"}
LISTED |= {r"w?g?mma\S*\.(bf16|tf32)": "HMMA|HGMMA", r"bar\.sync": r"BAR\.SYNC"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Return the kernels by their kinds. One process compiles all. A GPU of AMD has compiled some, too."""
    return code_of_kinds(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def kernels(compiled: Kinds) -> Kernels:
    """Return those of products and of a step."""
    return compiled["weights"] | compiled["steps"]


def kernels_of(kind: str) -> object:
    return pytest.fixture(scope="module")(lambda compiled: compiled[kind])


experts, states, attention, unusual = map(kernels_of, ("experts", "states", "attention", "unusual attention"))


def test_nothing_is_spilled_on_any_architecture(kernels: Kernels) -> None:
    products = [name for name in kernels if name.startswith(("matvec", "matmul", "dense"))]
    assert {name.split()[-1] for name in products} == TARGETS
    for kind in ("matvec", "matmul", "dense"):
        assert len({name.split()[-1] for name in products if name.startswith(kind)}) == NUM_TARGETS
    for name, kernel in kernels.items():
        assert kernel["spilled"] == 0, name
        assert kernel["registers"] <= MOST_REGISTERS.get(name.split()[0], 255), name


def test_addresses_in_weights_have_64_bits(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        if name.split()[0] not in STEP:
            assert kernel["has_wide_offsets"], name


def test_products_compile_to_the_expected_instructions(kernels: Kernels) -> None:
    listed = {name: kernel for name, kernel in kernels.items() if kernel["listed"]}
    assert len(listed) == 3
    found = set()
    for name, kernel in listed.items():
        for pattern, meant in LISTED.items():
            is_there = count(kernel, pattern) > 0
            assert is_there == (count(kernel, meant, "listed") > 0), (name, pattern)
            found |= {pattern} if is_there else set()
    assert found == set(LISTED)


def test_a_matvec_streams_wide_words_into_integer_products_without_a_barrier(kernels: Kernels) -> None:
    matvecs = {name: kernel for name, kernel in kernels.items() if name.startswith("matvec")}
    assert len(matvecs) >= 6
    for name, kernel in matvecs.items():
        rows = 4 if "gated" in name else 2  # of a warp
        assert count(kernel, "dp4a") == rows * 16, name  # 8 words of 4 inputs, in two planes
        has_narrow_codes = re.search("Q2_K|Q3_K|Q2_0|TQ", name) is not None  # words of 2-bit codes are read in pairs
        codes = 0 if has_narrow_codes else 4 if "Q8_0" in name else 2  # of two rows
        wide = rows // 2 * (4 + codes) + 4 * MOST_BARRIERS  # activations are read once for the rows of a loop
        assert rows * 2 <= count(kernel, r"ld\.global\.v4\.b32") <= wide, name
        assert count(kernel, r"bar\.", "loop") <= (MOST_BARRIERS if "gated" in name else 0), name


def test_products_of_many_tokens_are_made_by_tensor_cores(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        if name.startswith("matmul"):
            assert count(kernel, r"w?g?mma\S*\.s8") > 0, name
        elif name.startswith("dense F32"):
            assert count(kernel, r"fma\.rn\.f32") > 0, name


def test_few_rows_of_floats_are_read_ahead_and_multiplied_by_fused_operations(kernels: Kernels) -> None:
    """A program has one row of one token, or 8 of each, and a trip 16 inputs or 4 of each lane."""
    for name, kernel in kernels.items():
        if name.startswith("few rows 0"):
            assert (count(kernel, r"ld\.global", "loop"), count(kernel, r"fma\.rn", "loop")) == (32, 16), name
            assert count(kernel, r"bar\.") == 0, name
        elif name.startswith("few rows 1"):
            assert sum(kernel["loop"].values()) <= 240, name
            assert kernel["registers"] <= 128, name


def test_a_trip_of_a_quantised_product_is_four_blocks_that_are_copied_ahead(kernels: Kernels) -> None:
    found = {name: kernel for name, kernel in kernels.items() if name.startswith("matmul")}
    assert len(found) >= 4
    for name, kernel in found.items():
        halves = 2 if re.search("Q2_K|Q3_K|Q6_K|NVFP4|IQ1_M|IQ2_XS|IQ2_S", name) else 1
        assert count(kernel, r"(wgmma\.mma_async|mma)\.sync\S*k32\S*\.s8", "loop") >= 8 * halves, name
        assert count(kernel, r"cp\.async\.c[ag]\.shared\.global", "loop") >= 8, name
        assert count(kernel, r"bar\.sync", "loop") <= 24, name
        assert sum(kernel["loop"].values()) <= (2400 if halves == 2 else 1900), name
        assert 65_536 // kernel["threads"] // kernel["registers"] >= 2, name


def test_floats_of_16_bits_are_copied_ahead_and_multiplied_as_they_are(kernels: Kernels) -> None:
    """Tiles of a type have one instruction on a device, whose depth is 16 inputs, so they have one order of sums."""
    found = {name: kernel for name, kernel in kernels.items() if re.match("dense B?F16", name)}
    assert len(found) >= 6
    for name, kernel in found.items():
        float_type = "bf16" if "BF16" in name else "f16"
        family = r"wgmma\.mma_async\.\S*k16" if name.endswith("90") else r"mma\.sync\.\S*m16n8k16"
        products = count(kernel, r"w?g?mma\S*k\d", "loop")
        assert products == count(kernel, rf"{family}\S*\.{float_type}\.{float_type}", "loop") > 0, name
        assert count(kernel, r"cp\.async\.c[ag]\.shared\.global", "loop") >= 4, name
        assert count(kernel, r"cvt\.\S*f16", "loop") == 0, name
        assert count(kernel, r"bar\.sync", "loop") <= 5, name
        assert sum(kernel["loop"].values()) <= 240, name  # 64 inputs
        assert kernel["shared"] >= 24_000, name  # all stages but one are being loaded
        if re.match(r"dense B?F16 \d+$", name):  # the kernel for one token
            assert 65_536 // kernel["threads"] // kernel["registers"] >= 4, name


def test_the_tiles_that_a_gpu_is_asked_about_are_instructions_of_different_shapes(compiled: Kinds) -> None:
    sums = compiled["sums"]
    for name, depth in (("bf16", 16), ("f16", 16), ("tf32", 8)):
        for tokens in (16, 128):
            assert sums[f"{name} 64x{tokens}"] == [f"wgmma m64n{tokens}k{depth}"]
        assert sums[f"{name} 16x16"] == [f"mma m16n8k{depth}"]


@pytest.mark.parametrize("name", ["advance 90", "accept 90", "take 90"])
def test_the_kernel_after_the_sampler_is_one_warp_without_a_barrier(kernels: Kernels, name: str) -> None:
    assert count(kernels[name], r"bar\.") == 0


def test_the_sampler_fuses_nothing_that_must_round(compiled: Kinds) -> None:
    """The interpreter cannot show the compiler's choices: constants in full precision, true division, no fma."""
    assembly = compiled["sampler"]
    for name, ptx in assembly.items():
        assert "fma.rn.f64" not in ptx, name
        assert "div.full" not in ptx or name == "score_blocks", name  # only rough scores may divide roughly
        assert "ftz" not in ptx.replace("lg2.approx.ftz", ""), name
        assert ("fma.rn.f32" in ptx) == (name == "score_blocks"), name
    for name, literal_of, constants in (
        (
            "weigh_blocks",
            double_literal,
            (noise.LOG2_E, noise.LN2_HIGH_64, noise.LN2_LOW_64, noise.TAYLOR[0]),
        ),
        ("choose_plain", single_literal, (*noise.LOG_COEFFICIENTS[:3], noise.LN2_LOW_32)),
    ):
        for constant in constants:
            literals = (literal_of(constant), literal_of(-constant))  # x − y × c is x + y × −c
            assert any(literal in assembly[name].upper() for literal in literals), (name, constant)
    # Each token of a thread takes two rough logarithms, and fuses in two places on purpose.
    logarithms, fused = (len(re.findall(name, assembly["score_blocks"])) for name in (r"lg2\.approx", r"fma\.rn\.f32"))
    assert fused == 2 * (logarithms // 2)


def test_nothing_is_spilled_for_heads_of_128_and_256(states: Kernels) -> None:
    names = {"prepare_tokens", "multiply_keys", "mix_runs", "gate_heads", "convolve_tokens"}
    assert ({name.split()[0] for name in states}, len({name.split()[2] for name in states})) == (names, NUM_TARGETS)
    for name, kernel in states.items():
        assert kernel["spilled"] == 0, name
        assert kernel["registers"] <= MOST_STATE_REGISTERS.get(name.split()[0], 64), name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name


def test_twelve_warps_of_the_recurrence_fit_a_multiprocessor(states: Kernels) -> None:
    for kernel in (kernel for name, kernel in states.items() if name.startswith("mix_runs 128")):
        assert kernel["threads"] == 32
        assert kernel["registers"] <= 168
        assert sum(kernel["instructions"].values()) <= 1400


def double_literal(value: float) -> str:
    return "0D" + struct.pack(">d", value).hex().upper()


def single_literal(value: float) -> str:
    return "0F" + struct.pack(">f", value).hex().upper()


# Most instructions of a warp per turn of 64 slots, by the size of heads. With float32 most of them are FFMA.
MOST_INSTRUCTIONS = {"f16": {64: 400, 128: 560, 256: 620}, "bf16": {64: 450, 128: 640, 256: 700}}
MOST_INSTRUCTIONS |= {"q8": {64: 1300, 128: 1300, 256: 2400}, "q4": {64: 1500, 128: 1500, 256: 2700}}
MOST_INSTRUCTIONS |= {"f32": {64: 1900, 128: 3200, 256: 3300}}
# Number of parts of a query or weight with which tensor cores multiply each key and value.
PRODUCTS = {"f16": 2, "bf16": 3, "q8": 3, "q4": 3}


def parts_of(name: str) -> tuple[str, int, int]:
    kv_type, dim, target = name.split()
    return kv_type, int(dim), int(target)


def size_of(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


def test_every_architecture_and_every_type_is_compiled(attention: Kernels) -> None:
    types, dims, targets = (set(each) for each in zip(*map(parts_of, attention), strict=True))
    assert types == set(MOST_INSTRUCTIONS)
    assert {64, 128, 256} <= dims
    assert len(targets) >= NUM_TARGETS


def test_a_program_fits_the_registers_and_the_shared_memory_of_every_gpu(attention: Kernels) -> None:
    for name, kernel in attention.items():
        assert kernel["spilled"] <= (80 if name.startswith("f32") else 32), name  # a few words, outside of the loop
        assert not kernel["turn"].keys() & {"LDL", "STL"}, name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name
        kv_type, dim, _ = parts_of(name)
        if kv_type in ("f16", "bf16") and dim <= 128:  # four programs per multiprocessor, or three
            assert kernel["registers"] <= (128 if dim <= 64 else 168), name


def test_a_turn_of_64_slots_stays_within_its_budget(attention: Kernels) -> None:
    for name, kernel in attention.items():
        kv_type, dim, _ = parts_of(name)
        assert sum(kernel["turn"].values()) <= MOST_INSTRUCTIONS[kv_type][size_of(dim)], name
        assert kernel["turn"]["BAR"] <= 18, name
        if kv_type in ("f16", "bf16") and dim <= 128:
            assert kernel["turn"]["BAR"] <= 8, name


def test_tensor_cores_multiply_with_keys_and_values(attention: Kernels) -> None:
    for name, kernel in attention.items():
        kv_type, dim, _ = parts_of(name)
        if kv_type == "f32":
            assert kernel["turn"]["FFMA"] > 0, name
            continue
        warps = 8 if dim > 128 or (kv_type in ("q8", "q4") and dim > 64) else 4
        products = 2 * (64 // 8) * (size_of(dim) // 16) // warps  # scores and values, 16 × 8 × 16 at a time
        assert kernel["turn"]["HMMA"] == PRODUCTS[kv_type] * products, name


def test_keys_and_values_are_copied_while_others_are_multiplied(attention: Kernels) -> None:
    for name, kernel in attention.items():
        kv_type, dim, _ = parts_of(name)
        if kv_type in ("f16", "bf16"):
            warps = 8 if dim > 128 else 4
            assert count(kernel, r"cp\.async\.cg") > 0, name
            assert kernel["turn"]["LDGSTS"] == 2 * 64 * size_of(dim) * 2 // (16 * 32 * warps), name  # 16 bytes each
            assert kernel["turn"].get("LDG", 0) <= 1, name  # the page's number


def test_the_last_program_of_a_tile_sees_the_results_of_the_others(attention: Kernels) -> None:
    for name, kernel in attention.items():
        assert count(kernel, r"atom\.global\.gpu\.acq_rel\.add") == 1, name


if IS_WHOLE:  # they compile for a minute

    def test_products_of_experts_fit_the_registers_of_every_architecture(experts: Kernels) -> None:
        for name, kernel in experts.items():
            is_tile = name.startswith("matmul") and "gated" in name
            assert kernel["spilled"] <= (8 if is_tile else 0), name  # 8 bytes on sm_80, outside the loop
            assert kernel["registers"] <= MOST_REGISTERS.get(name.split()[0], 176), name
            if re.match("matvec|matmul|dense|add_pairs", name):
                assert kernel["has_wide_offsets"], f"{name}: an address in results or weights of gigabytes"

    def test_products_of_experts_are_those_of_other_matrices(experts: Kernels) -> None:
        for name, kernel in experts.items():
            if name.startswith("matvec"):
                assert count(kernel, "dp4a", "loop") == 32, name
                assert count(kernel, r"bar\.", "loop") <= (MOST_BARRIERS if "gated" in name else 0), name
            elif name.startswith("matmul"):
                assert count(kernel, r"(wgmma\.mma_async|mma)\.sync\S*k32\S*\.s8", "loop") >= 8, name
                assert count(kernel, r"cp\.async\.c[ag]\.shared\.global", "loop") >= 8, name
                assert sum(kernel["loop"].values()) <= 1400, name
            elif name.startswith("dense"):
                family = r"wgmma\.mma_async\.\S*k16" if name.endswith("90") else r"mma\.sync\.\S*m16n8k16"
                assert count(kernel, family, "loop") > 0, name
                assert count(kernel, r"cp\.async\.c[ag]\.shared\.global", "loop") >= 4, name
                assert sum(kernel["loop"].values()) <= 240, name  # 64 inputs

    def test_the_choice_of_experts_is_one_short_program_for_a_token(experts: Kernels) -> None:
        """Two thirds are the choice. The others quantise, in programs beside it."""
        assert sum(experts["choose_experts 90"]["instructions"].values()) <= 400

    def test_sinks_and_gates_cost_nothing_in_a_turn(unusual: Kernels) -> None:
        found = {name: kernel for name, kernel in unusual.items() if len(name.split()) == 4}
        assert len(found) >= 2
        for name, kernel in found.items():
            kv_type, dim, _, _ = name.split()
            assert sum(kernel["turn"].values()) <= MOST_INSTRUCTIONS[kv_type][int(dim)], name
            assert kernel["spilled"] <= 48, name
            assert not kernel["turn"].keys() & {"LDL", "STL"}, name
            assert kernel["shared"] <= MAX_SHARED_BYTES, name

    def test_heads_of_512_dimensions_fit_every_gpu(unusual: Kernels) -> None:
        """The innermost loop is a quarter of the keys of a turn. Tensor cores multiply no floats of 32 bits."""
        found = {name: kernel for name, kernel in unusual.items() if name.split()[1] == "512"}
        assert len({name.split()[2] for name in found}) == NUM_TARGETS
        for name, kernel in found.items():
            kv_type = name.split()[0]
            most = {"f16": 32, "bf16": 64, "f32": 2560}.get(kv_type, 256)
            assert kernel["spilled"] <= most, name
            assert kernel["shared"] <= MAX_SHARED_BYTES, name
            assert not kernel["turn"].keys() & {"LDL", "STL"}, name
            if kv_type != "f32":
                assert kernel["turn"]["HMMA"] == PRODUCTS[kv_type] * 8, name  # 64 / 8 by 128 / 16, on 8 warps
