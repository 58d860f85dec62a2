"""A fast BLAS under MLX on Linux without a GPU.

MLX's CPU package links the reference BLAS. A library that exports the same symbols and is loaded with RTLD_GLOBAL
before `import mlx.core` takes its place, since the dynamic linker takes the first definition that it finds. Measured
on two cores in float32: reference 3 GFLOP/s, OpenBLAS 39, MKL 245.

Nothing is set that would change other libraries of the process: MKL gave the same bits for equal shapes in every run
that was tried, at any alignment of its operands, so its reproducibility mode stays off.
"""

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_OPENBLAS = "libopenblas.so.0"


@dataclass(frozen=True)
class BlasInfo:
    """The BLAS that MLX calls: `mkl`, `openblas`, `reference`, or `own` where MLX brings what it needs (macOS, CUDA).

    `library` is a path, or a name that the dynamic linker resolved; None for `reference` and `own`.
    """

    name: str
    library: str | None = None


@cache
def preload() -> BlasInfo:
    """Load the fastest BLAS that is installed, once a process, and tell which one MLX will call.

    Must run before `import mlx.core`; after it there is nothing left to change, and `reference` is the answer.
    """
    if sys.platform != "linux" or _has_cuda():
        return BlasInfo("own")
    if "mlx.core" in sys.modules:
        return BlasInfo("reference")
    for name, library in (*(("mkl", str(path)) for path in mkl_libraries()), ("openblas", _OPENBLAS)):
        if _load(library):
            return BlasInfo(name, library)
    return BlasInfo("reference")


def advice(info: BlasInfo) -> str | None:
    """What would be faster and how to get it, or None where nothing would."""
    if info.name in ("reference", "openblas") and platform.machine() == "x86_64":
        return "Intel's MKL is several times as fast: pip install 'amem[cpu]'"
    if info.name == "reference":
        return "OpenBLAS is ten times as fast: apt install libopenblas0-pthread, or what your system calls it"
    return None


def mkl_libraries() -> list[Path]:
    """Every `libmkl_rt.so.N` of the `mkl` wheel, the newest first: in this environment, else where pip put it."""
    found = list(Path(sys.prefix, "lib").glob("libmkl_rt.so.*")) or _mkl_elsewhere()
    return sorted(found, key=lambda path: int(path.suffix[1:]), reverse=True)


def _mkl_elsewhere() -> list[Path]:
    from importlib.metadata import PackageNotFoundError, files  # slow to import, and mostly not needed

    try:
        return [Path(str(file.locate())) for file in files("mkl") or [] if file.name.startswith("libmkl_rt.so.")]
    except PackageNotFoundError:
        return []


def _has_cuda() -> bool:
    """Whether MLX was installed with its CUDA package: told by its metadata folder, without importing anything."""
    mlx = find_spec("mlx")
    places = (mlx and mlx.submodule_search_locations) or []
    return any(True for place in places for _ in Path(place).parent.glob("mlx_cuda*.dist-info"))


def _load(library: str) -> bool:
    """Make the symbols of `library` the first that the linker finds; False where it is no working BLAS."""
    try:
        return hasattr(ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL), "cblas_sgemm")
    except OSError:
        return False
