"""Claims about the machine code of attention. Triton compiles it without a GPU.

INFER_TRITON names a folder with another version of Triton, which must fulfil the same claims.
"""

import pytest

from compiled_kernels import MAX_SHARED_BYTES, TARGETS, Kernels, code_of_kind, count

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="Triton is not installed")

# Most instructions of a warp per turn of 64 slots, by the size of heads. With float32 most of them are FFMA.
MOST_INSTRUCTIONS = {
    "f16": {64: 400, 128: 560, 256: 620},
    "bf16": {64: 450, 128: 640, 256: 700},
    "q8": {64: 1300, 128: 1300, 256: 2400},
    "q4": {64: 1500, 128: 1500, 256: 2700},
    "f32": {64: 1900, 128: 3200, 256: 3300},
}
# Number of parts of a query or weight with which tensor cores multiply each key and value.
PRODUCTS = {"f16": 2, "bf16": 3, "q8": 3, "q4": 3}
MOST_BARRIERS = 18


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return code_of_kind("attention", tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return code_of_kind("unusual attention", tmp_path_factory.mktemp("triton"))


def parts_of(name: str) -> tuple[str, int, int]:
    kv_type, dim, target = name.split()
    return kv_type, int(dim), int(target)


def size_of(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


def test_every_architecture_and_every_type_is_compiled(kernels: Kernels) -> None:
    types, dims, targets = (set(each) for each in zip(*map(parts_of, kernels), strict=True))
    assert types == set(MOST_INSTRUCTIONS)
    assert {64, 128, 256} <= dims
    assert set(map(int, TARGETS)) <= targets


def test_a_program_fits_the_registers_and_the_shared_memory_of_every_gpu(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        assert kernel["spilled"] <= (80 if name.startswith("f32") else 32), name  # a few words, outside of the loop
        assert not kernel["turn"].keys() & {"LDL", "STL"}, name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name
        kv_type, dim, _ = parts_of(name)
        if kv_type in ("f16", "bf16") and dim <= 128:  # four programs per multiprocessor, or three
            assert kernel["registers"] <= (128 if dim <= 64 else 168), name


def test_a_turn_of_64_slots_stays_within_its_budget(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        kv_type, dim, _ = parts_of(name)
        assert sum(kernel["turn"].values()) <= MOST_INSTRUCTIONS[kv_type][size_of(dim)], name
        assert kernel["turn"]["BAR"] <= MOST_BARRIERS, name
        if kv_type in ("f16", "bf16") and dim <= 128:
            assert kernel["turn"]["BAR"] <= 8, name


def test_tensor_cores_multiply_with_keys_and_values(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        kv_type, dim, _ = parts_of(name)
        if kv_type == "f32":
            assert kernel["turn"]["FFMA"] > 0, name
            continue
        warps = 8 if dim > 128 or (kv_type in ("q8", "q4") and dim > 64) else 4
        products = 2 * (64 // 8) * (size_of(dim) // 16) // warps  # scores and values, 16 × 8 × 16 at a time
        assert kernel["turn"]["HMMA"] == PRODUCTS[kv_type] * products, name


def test_keys_and_values_are_copied_while_others_are_multiplied(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        kv_type, dim, _ = parts_of(name)
        if kv_type in ("f16", "bf16"):
            warps = 8 if dim > 128 else 4
            assert count(kernel, r"cp\.async\.cg") > 0, name
            assert kernel["turn"]["LDGSTS"] == 2 * 64 * size_of(dim) * 2 // (16 * 32 * warps), name  # 16 bytes each
            assert kernel["turn"].get("LDG", 0) <= 1, name  # the page's number


def test_the_last_program_of_a_tile_sees_the_results_of_the_others(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        assert count(kernel, r"atom\.global\.gpu\.acq_rel\.add") == 1, name


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
    """The innermost loop is a quarter of the keys of a turn. Floats of 32 bits are multiplied without tensor cores."""
    found = {name: kernel for name, kernel in unusual.items() if name.split()[1] == "512"}
    assert {name.split()[2] for name in found} == TARGETS
    for name, kernel in found.items():
        kv_type = name.split()[0]
        most = {"f16": 32, "bf16": 64, "f32": 2560}.get(kv_type, 256)
        assert kernel["spilled"] <= most, name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name
        assert not kernel["turn"].keys() & {"LDL", "STL"}, name
        if kv_type != "f32":
            assert kernel["turn"]["HMMA"] == PRODUCTS[kv_type] * 8, name  # 64 / 8 by 128 / 16, on 8 warps
