"""Regenerate man/ and completions/: `python -m tools`, or `make shell`. A test compares them with the repository."""

from pathlib import Path

from tools import manual, shells

ROOT = Path(__file__).parents[1]


def generated() -> dict[Path, str]:
    """The text of every generated file."""
    texts = {ROOT / "man" / name: text for name, text in manual.pages().items()}
    return texts | {ROOT / "completions" / name: text for name, text in shells.scripts().items()}


def main() -> None:
    """Write all files, and delete those of removed commands."""
    texts = generated()
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    for folder in {path.parent for path in texts}:
        for path in set(folder.iterdir()) - texts.keys():
            path.unlink()
            print(f"removed {path.relative_to(ROOT)}")
    print(f"{len(texts)} files")


if __name__ == "__main__":
    main()
