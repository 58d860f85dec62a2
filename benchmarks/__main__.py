"""All benchmarks in turn, at their default sizes: `python -m benchmarks`. Each runs in a process of its own."""

import subprocess
import sys

NAMES = ("restore", "turn", "prefill", "fidelity", "ttft")


def main() -> int:
    """The number of benchmarks that failed."""
    failed = 0
    for name in NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        print(" ".join(["python", *command[1:]]), flush=True)
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
