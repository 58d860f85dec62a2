"""All benchmarks in turn, at their default sizes, and the page that shows them: `python -m benchmarks`."""

import subprocess
import sys

NAMES = ("restore", "turn", "store", "startup", "prefill", "latents", "fidelity", "ttft", "batch", "sharing")


def main() -> int:
    """Run each in a process of its own. Returns how many failed."""
    failed = 0
    for name in (*NAMES, "docs"):
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        print(" ".join(["python", *command[1:]]), flush=True)
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
