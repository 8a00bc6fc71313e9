"""Config → the intermediate size of dense feed-forwards."""

from infer.model.families.config_values import Config, count, flag, positive


def intermediate_size(config: Config) -> int:
    return count(config, "intermediate_size")


def llama4_size(config: Config) -> int:
    return count(config, "intermediate_size_mlp")


def lfm2_size(config: Config) -> int:
    """Return LFM2's size: two thirds of the given size, multiplied and rounded up, if `block_auto_adjust_ff_dim`."""
    size = count(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier") is not None:  # without a multiplier nothing is rounded
        size = int(positive(config, "block_ffn_dim_multiplier") * size)
        unit = count(config, "block_multiple_of")
        size = -(-size // unit) * unit
    return count({"intermediate_size, adjusted,": size}, "intermediate_size, adjusted,")
