"""``pytest -p rocm_on_nvidia``: the plugin ``rocm`` on an NVIDIA GPU, to run on a device what it shares with HIP's names.

The one thing that is overridden is how HIP is told. torch's CUDA build fills the architecture's name with the device's.
"""

from outrider_rocm import plugin

plugin.hip_version = lambda: "none: this is an NVIDIA GPU, and HIP is pretended"
