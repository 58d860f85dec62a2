"""A fast BLAS under MLX on Linux without a GPU.

MLX's CPU package links the reference BLAS. A library that exports the same symbols and is loaded with RTLD_GLOBAL
before `import mlx.core` replaces it, since the dynamic linker uses the first definition that it finds. Measured on two
cores in float32: reference 3 GFLOP/s, OpenBLAS 39, MKL 245.

No setting of other libraries in the process is changed. MKL gave the same bits for equal shapes in all runs tried, at
any alignment of its operands, so its reproducibility mode stays off.
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
    """The BLAS that MLX calls: `mkl`, `openblas`, `reference`, or `own` if MLX needs none (macOS, CUDA).

    `library` is a path, or a name that the dynamic linker resolved; None for `reference` and `own`.
    """

    name: str
    library: str | None = None


@cache
def preload() -> BlasInfo:
    """Load the fastest installed BLAS, once in a process; return the one that MLX will call.

    Must run before `import mlx.core`; later it changes nothing and returns `reference`.
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
    """A faster BLAS and how to install it, or None."""
    if info.name in ("reference", "openblas") and platform.machine() == "x86_64":
        return "Intel's MKL is several times as fast: pip install 'amem[cpu]'"
    if info.name == "reference":
        return "OpenBLAS is ten times as fast: apt install libopenblas0-pthread, or what your system calls it"
    return None


def mkl_libraries() -> list[Path]:
    """Every `libmkl_rt.so.N` of the `mkl` wheel, newest first: of this environment, else of pip's other folders."""
    found = list(Path(sys.prefix, "lib").glob("libmkl_rt.so.*")) or _mkl_elsewhere()
    return sorted(found, key=lambda path: int(path.suffix[1:]), reverse=True)


def _mkl_elsewhere() -> list[Path]:
    from importlib.metadata import PackageNotFoundError, files  # slow to import, and rarely needed

    try:
        return [Path(str(file.locate())) for file in files("mkl") or [] if file.name.startswith("libmkl_rt.so.")]
    except PackageNotFoundError:
        return []


def _has_cuda() -> bool:
    """Whether MLX's CUDA package is installed. Looks for its metadata folder and imports nothing."""
    mlx = find_spec("mlx")
    places = (mlx and mlx.submodule_search_locations) or []
    return any(True for place in places for _ in Path(place).parent.glob("mlx_cuda*.dist-info"))


def _load(library: str) -> bool:
    """Make the symbols of `library` the first that the linker finds; False if it is no working BLAS."""
    try:
        return hasattr(ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL), "cblas_sgemm")
    except OSError:
        return False
