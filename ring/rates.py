"""How fast accelerators compute and talk to their neighbours, by their vendors' figures.

One table for whoever needs it: utilisation of a run, and what a plan expects of devices that are
not here. What a program reaches of these figures is for a measurement to say.
"""

from typing import NamedTuple


class Rates(NamedTuple):
    """Of one device.

    Attributes:
        bfloat16: dense operations a second with bfloat16 operands.
        float32: the same with float32 operands at JAX's default precision, which rounds them:
            to TF32 on GPUs, to bfloat16 on TPUs.
        link: bytes a second, in one direction, to the next device of a ring within a slice, or
            within a host of GPUs.
        network: bytes a second between a GPU and one of another host; for TPUs as `link`.
    """

    bfloat16: float
    float32: float
    link: float
    network: float


# NVIDIA's data sheets. NVLink is stated in both directions together: 600 GB/s of the A100, 900 GB/s
# of the H100 and H200. The network is that of DGX A100 and DGX H100: an InfiniBand adapter of 200
# or 400 Gb/s for every GPU.
_A100 = Rates(312e12, 156e12, 300e9, 25e9)
_HOPPER = Rates(989e12, 494.5e12, 450e9, 50e9)

# Google Cloud's pages of each TPU. They state the bandwidth of all of a chip's links in both
# directions together, v4 and v5p have six of them and v5e and v6e four. A message to a neighbour
# takes one.
RATES: dict[str, Rates] = {
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "v4": Rates(275e12, 275e12, 50e9, 50e9),
    "v5e": Rates(197e12, 197e12, 50e9, 50e9),
    "v5p": Rates(459e12, 459e12, 100e9, 100e9),
    "v6e": Rates(918e12, 918e12, 100e9, 100e9),
}
"""By the kind of a `ring.targets.Target`; CPUs have no such figures."""

# What JAX calls them; the first that a device's kind contains.
_NAMES = {
    "A100": "a100-80",
    "H100 80GB HBM3": "h100",  # on cards for PCIe it is slower
    "H200": "h200",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5p": "v5p",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


class Known(NamedTuple):
    """A device that the table has."""

    name: str
    rates: Rates


def of_device(kind: str) -> Known | None:
    """The device that JAX calls `kind` (`jax.Device.device_kind`); None if it is not known."""
    for name, target in _NAMES.items():
        if name in kind:
            return Known(name, RATES[target])
    return None
