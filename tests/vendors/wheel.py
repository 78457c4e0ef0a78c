"""A vendor's wheel as files: taken with pip, pinned by hash, read from the archive, never imported."""

import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

_LIMIT_S = 300


@dataclass(frozen=True)
class Pin:
    """One file: what pip calls it, its name and its hash."""

    package: str
    version: str
    name: str
    sha256: str


TORCH_NPU = Pin(
    "torch_npu",
    "2.13.0",
    "torch_npu-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0",
)
FLASHINFER = Pin(
    "flashinfer-python",
    "0.6.14",
    "flashinfer_python-0.6.14-py3-none-any.whl",
    "d124369346a3d48eac67e31c42f7a3c813bcc0abc10e2e36db413b7b3dfd97df",
)


class NotRun(Exception):
    """The wheel can't be had here: what rests on it wasn't run, which is not the same as passed."""


def fetch(cache: Path, pin: Pin = TORCH_NPU) -> Path:
    """The wheel's path, downloaded into ``cache`` unless it's there. The hash is checked by pip in both cases."""
    cache.mkdir(parents=True, exist_ok=True)
    pinned = cache / "requirements.txt"
    pinned.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "-r", str(pinned)]
    # One file, whatever interpreter and system runs the test.
    command += ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--implementation", "cp"]
    command += ["--python-version", "3.11", "--abi", "cp311", "--disable-pip-version-check", "-q", "-d", str(cache)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotRun(f"pip didn't bring {pin.package} {pin.version} within {_LIMIT_S} s") from error
    path = cache / pin.name
    if done.returncode or not path.is_file():
        if "HASH" in done.stderr.upper() and "MISMATCH" in done.stderr.upper():
            raise AssertionError(f"{pin.package} {pin.version} isn't the file that was pinned: {done.stderr.strip()}")
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotRun(f"pip can't bring {pin.package} {pin.version}: {said}")
    return path


class Wheel:
    """Files of an unpacked wheel."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self.names = frozenset(self._archive.namelist())

    def text(self, name: str) -> str:
        return self._archive.read(name).decode("utf-8")

    def module_file(self, module: str) -> str | None:
        """The file of a module, None where there is none (a C extension, or no such module)."""
        base = PurePosixPath(*module.split("."))
        for name in (f"{base}.py", f"{base}/__init__.py"):
            if name in self.names:
                return name
        return None

    @cached_property
    def library(self) -> bytes:
        """libtorch_npu.so."""
        return self._archive.read("torch_npu/lib/libtorch_npu.so")

    def has_symbol(self, name: str) -> bool:
        """Whether the compiled library holds ``name`` as a whole string, as names of a C extension's methods are held."""
        return b"\0" + name.encode() + b"\0" in self.library

    @cached_property
    def registered(self) -> frozenset[str]:
        """Operators of torch, overload included, for which torch_npu's build registers a kernel of its own."""
        names = set()
        for name in ("npu_native_functions.yaml", "npu_native_functions_by_codegen.yaml"):
            text = self.text(f"torch_npu/csrc/aten/{name}")
            names.update(re.findall(r"^\s*(?:- )?(?:func: |- )([A-Za-z_][\w.]*)", text, re.MULTILINE))
        return frozenset(names)

    def schemas(self, operator: str) -> list[str]:
        """Schemas that the library registers for an operator, an overload included: what the dispatcher will hold calls
        against. torch_npu's YAML isn't the same in the names of arguments and outputs.
        """
        found = []
        start = 0
        needle = b"\0" + operator.encode() + b"("
        while (at := self.library.find(needle, start)) >= 0:
            end = self.library.index(b"\0", at + 1)
            text = self.library[at + 1 : end].decode("utf-8", "replace")
            if ") -> " in text:
                found.append(text)
            start = end
        return found


class Installed:
    """Files of an installed package, in the same form."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def text(self, name: str) -> str:
        return (self._root / name).read_text(encoding="utf-8")

    def module_file(self, module: str) -> str | None:
        base = PurePosixPath(*module.split("."))
        for name in (f"{base}.py", f"{base}/__init__.py"):
            if (self._root / name).is_file():
                return name
        return None
