"""The OpenCL devices of this machine, and the choice of one by name."""

from collections.abc import Iterator

import pyopencl as cl

from infer.errors import InvalidRequestError

_NO_PLATFORM = (
    "device opencl: no OpenCL platform is installed: install the device's driver (Debian: intel-opencl-icd, "
    "mesa-opencl-icd, pocl-opencl-icd), or use --device cpu"
)
_ONLY_SIMULATORS = (
    "device opencl: only a simulator is installed ({}), which must be chosen by name: install a device's driver, name "
    "it (--device opencl:{}), or use --device cpu"
)
_SIMULATORS = ("oclgrind",)  # parts of the names of platforms that are slow and made to find faults in kernels
ITEMS = 64  # of a work group, in all kernels
_FULL_NAMES = {"pocl": "portable computing language"}  # of platforms whose short name is no part of their own


def all_devices() -> list[cl.Device]:
    try:
        return [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error:  # the loader has found none
        return []


def choose(name: str = "") -> cl.Device:
    """Return the first device that can be used, GPUs before CPUs. A simulator is only chosen by its name.

    `name` is a part of the platform's name or, if no platform has it, of the device's own name. Raises
    InvalidRequestError, with the reason, if no device can be used.
    """
    found = sorted(all_devices(), key=lambda device: bool(device.type & cl.device_type.CPU))
    if not found:
        raise InvalidRequestError(_NO_PLATFORM)
    if not name and all(map(is_simulator, found)):
        raise InvalidRequestError(_ONLY_SIMULATORS.format(full_name(found[0]), found[0].platform.name.lower().strip()))
    if not name:
        found = [device for device in found if not is_simulator(device)]
    part = _FULL_NAMES.get(name.lower(), name.lower())
    named = [device for device in found if part in device.platform.name.lower()]
    named = named or [device for device in found if part in device.name.lower()]
    if not named:
        known = "; ".join(map(full_name, found))
        raise InvalidRequestError(f"device opencl:{name}: no such device; there are: {known}")
    usable = next((device for device in named if not any(troubles(device))), None)
    if usable is None:
        whys = "; ".join(f"{full_name(device)} {next(troubles(device))}" for device in named)
        raise InvalidRequestError(f"device opencl: {whys}: use another device, or --device cpu")
    return usable


def is_simulator(device: cl.Device) -> bool:
    platform = device.platform.name.lower()
    return any(part in platform for part in _SIMULATORS)


def describe() -> list[str]:
    return [", but it ".join([full_name(device), *troubles(device)]) for device in all_devices()]


def full_name(device: cl.Device) -> str:
    return f"{device.platform.name.strip()}: {device.name.strip()}"


def troubles(device: cl.Device) -> Iterator[str]:
    """Yield the reasons why the device cannot be used."""
    if not device.available:
        yield "is not available"
    if not device.compiler_available:
        yield "has no compiler"
    if device.profile != "FULL_PROFILE":
        yield "has OpenCL's embedded profile, without 64-bit integers"
    if not device.endian_little:
        yield "is big-endian"
    if device.max_work_group_size < ITEMS:
        yield f"has work groups of {device.max_work_group_size} items, and the kernels need {ITEMS}"
