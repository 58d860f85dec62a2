"""Collections, and what is left on disk after them."""

from pathlib import Path

from kvstore.gc.collect import GCResult, Policy
from kvstore.gc.collect import collect as collect_garbage
from kvstore.store import Store


def objects(store: Store) -> dict[Path, int]:
    """Every file of every domain, and its bytes."""
    return {path: path.lstat().st_size for path in store.layout.domains.rglob("*") if not path.is_dir()}


def collect(store: Store, dry_run: bool = False, **policy: float) -> GCResult:
    return collect_garbage(store, Policy(**policy), dry_run)  # type: ignore[arg-type]
