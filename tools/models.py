"""Write the table of docs/reference/models.md: `python -m tools.models`. It builds every model file of mlx-lm, tiny.

Each model is stopped, saved, loaded again and resumed, and compared bit for bit with a run that was not stopped.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from amem_cli.engine.cache.latent_attention import absorb
from amem_cli.engine.cache.probe import ModelCacheSpec, describe
from amem_cli.engine.models.plan import report
from kvstore.commit.journal import Actor
from kvstore.errors import ModelMismatchError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.store import Store
from tests.support.engine import resuming
from tests.support.models import kinds

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- python -m tools.models writes this -->\n", "<!-- until here -->\n"
LENGTHS, STEPS = [65, 300], 22
HEADER = ("| layers hold | decode reads | model files of mlx-lm |", "|---|---|---|")
_WORDS = {"full": "keys and values", "window": "a window", "recurrent": "states"}


@dataclass(frozen=True)
class Finding:
    """How one model file is served: what its layers hold, and how decode reads it. `refused` says why it is not."""

    kind: str
    holds: str
    read: str
    refused: str | None = None


def look(kind: str, folder: Path) -> Finding:
    """Build a model, and run it with a stop and without. Raises ValueError where the two differ."""
    try:
        built = kinds.build(kind)
        absorb(built)
        spec = describe(built)
    except ModelMismatchError as error:
        return Finding(kind, "", "", error.message)
    model = kinds.write(kind, folder / kind)
    straight = _run("straight", folder, model)
    _run("stop", folder, model)
    resumed = _run("resume", folder, model)
    if any(resumed[name.removesuffix("-fork")] != straight[name.removesuffix("-fork")] for name in resumed):
        raise ValueError(f"{kind} does not resume exactly")
    return Finding(kind, _holds(spec), _read(spec))


def _run(role: str, folder: Path, model: Path) -> resuming.Digests:
    store = Store.open_or_create(folder / f"{model.name}-{role == 'straight'}", Actor.here("models", "0"))
    return resuming.run(role, store, model, STEPS, LENGTHS)


def _holds(spec: ModelCacheSpec) -> str:
    words = []
    for group in report(spec, CODECS[DEFAULT_CODEC]):
        words.append("latents" if group.latent else _WORDS[group.kind])
    return ", ".join(sorted(set(words)))


def _read(spec: ModelCacheSpec) -> str:
    return ", ".join(sorted({group.served for group in report(spec, CODECS[DEFAULT_CODEC])}))


def table(findings: Iterable[Finding]) -> str:
    """The table: a row for each way to be served, then what is refused."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    refused = {name: f"cannot be built here: {why}" for name, why in kinds.NOT_BUILT.items()}
    for finding in findings:
        if finding.refused:
            refused[finding.kind] = finding.refused
        else:
            rows[finding.holds, finding.read].append(finding.kind)
    served = [f"| {holds} | {read} | {', '.join(names)} |" for (holds, read), names in sorted(rows.items())]
    count = sum(map(len, rows.values()))
    lines = [f"{count} model files are served, and each resumes bit for bit:", "", *HEADER, *served]
    lines += ["", "Not served:", "", "| model file | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in sorted(refused.items())]
    return "\n".join(lines) + "\n"


def page(findings: Iterable[Finding]) -> str:
    """docs/reference/models.md with the table of these findings."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table(findings)}\n{END}{after}"


def survey() -> list[Finding]:
    """All model files."""
    with TemporaryDirectory() as folder:
        return [look(kind, Path(folder)) for kind in kinds.kinds()]


if __name__ == "__main__":
    PAGE.write_text(page(survey()), "utf-8")
