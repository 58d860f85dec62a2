import sys

import pytest

from amem_cli.engine.backend import blas
from tests.support.running import children

LINUX_CPU = sys.platform == "linux" and blas.preload().name != "own"


def run(code: str) -> str:
    return children.run(sys.executable, "-c", code, check=True).stdout.strip()


def test_engine_loads_a_blas_before_mlx_and_not_mlx_itself() -> None:
    code = (
        "import sys, amem_cli.engine as e; print(e.preload().name, 'mlx.core' in sys.modules, 'numpy' in sys.modules)"
    )
    name, mlx, numpy = run(code).split()
    assert name in ("mkl", "openblas", "reference", "own")
    assert (mlx, numpy) == ("False", "False")


@pytest.mark.skipif(not (LINUX_CPU and blas.mkl_libraries()), reason="the mkl wheel is for x86-64 Linux")
def test_mkl_is_what_mlx_calls() -> None:
    # MKL loads the library of its kernels at the first call: it is in the process only if MLX's matmul went there
    code = (
        "import amem_cli.engine as e, mlx.core as mx\n"
        "def kernels(): return any('libmkl_core' in line for line in open('/proc/self/maps'))\n"
        "before = kernels(); mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64))); print(e.preload().name, before, kernels())"
    )
    assert run(code) == "mkl False True"


@pytest.mark.skipif(not LINUX_CPU, reason="MLX brings its own BLAS here")
def test_after_mlx_nothing_can_be_changed_and_that_is_said() -> None:
    assert run("import mlx.core, amem_cli.engine as e; print(e.preload().name)") == "reference"


def test_a_library_that_is_no_blas_is_passed_over() -> None:
    assert not blas._load("libm.so.6")
    assert not blas._load("/nonexistent/libmkl_rt.so.9")


def test_advice_says_how_to_get_a_faster_one_only_where_there_is_one() -> None:
    assert "install" in (blas.advice(blas.BlasInfo("reference")) or "")
    assert blas.advice(blas.BlasInfo("mkl", "libmkl_rt.so.3")) is None
