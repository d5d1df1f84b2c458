"""The device that a product is compiled for."""

from typing import NamedTuple


class TargetDevice(NamedTuple):
    """A kind of device. An unknown device is assumed to be new enough."""

    platform: str  # "cpu", "cuda", "rocm", "tpu"
    device: str = ""  # the name of the device
    capability: float = 9.0  # the compute capability of an NVIDIA GPU
    kernel_refusal: str | None = None  # why the program cannot hold kernels
    exported: bool = False  # whether the program is exported
    compiles: bool = False  # whether JAX compiles for the device now; `explain_matmul` only asks
