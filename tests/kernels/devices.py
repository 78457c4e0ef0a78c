"""Facts of devices as their runtimes and data sheets give them: for what is computed without one."""

from outrider_triton.tiles.facts import DeviceFacts


def _facts(architecture, processors, shared, processor_shared, l2, bandwidth, *, registers=65536, warp=32):
    return DeviceFacts(
        architecture=architecture,
        processors=processors,
        shared_bytes=shared << 10,
        processor_shared=processor_shared << 10,
        l2_bytes=l2 << 20,
        registers=registers,
        warp=warp,
        bandwidth=bandwidth * 1e9,
    )


DEVICES = {
    "A100": _facts("sm_80", 108, 163, 164, 40, 2039),
    "RTX 3090": _facts("sm_86", 82, 99, 100, 6, 936),
    "L4": _facts("sm_89", 58, 99, 100, 48, 300),
    "RTX 4090": _facts("sm_89", 128, 99, 100, 72, 1008),
    "H100": _facts("sm_90", 132, 227, 228, 50, 3350),
    "H200": _facts("sm_90", 132, 227, 228, 50, 4400),
    "H20": _facts("sm_90", 78, 227, 228, 60, 4000),
    "B200": _facts("sm_100", 148, 227, 228, 126, 8000),
    "RTX 5090": _facts("sm_120", 170, 99, 100, 96, 1792),
    "MI300X": _facts("gfx942", 304, 64, 64, 4, 5300, registers=131072, warp=64),
}
SMALL = _facts("sm_80", 4, 99, 100, 1, 100)
"""For the interpreter: so small that splits stay few."""
