"""A batch whose decode step fails for several agents together: a warning, a count, and the same answers."""

import json
import os
import sys
from pathlib import Path

from tests.support.running import children

PLANTED = """
import sys
from amem_cli.__main__ import run
from amem_cli.engine.turns import scheduler
def fail(*_):
    raise RuntimeError("secret text")
scheduler.decode_together = fail
sys.argv = ["amem", "batch", "-", "--model", sys.argv[1]]
run()
"""


def test_a_decode_step_that_fails_is_a_warning_without_text(endless: Path, tmp_path: Path) -> None:
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("DATA", "CONFIG", "CACHE", "STATE")}
    environment = {**os.environ, **folders, "HOME": str(tmp_path), "AMEM_STORE": str(tmp_path / "store")}
    made = [{"id": f"make-{name}", "op": "prefill", "agent": name, "text": f"hello {name}"} for name in "ab"]
    said = [{"id": name, "op": "chat", "agent": name, "message": "well?", "max_tokens": 60} for name in "ab"]
    requests = "".join(f"{json.dumps(request)}\n" for request in [*made, *said]).encode()
    done = children.run(sys.executable, "-c", PLANTED, endless, stdin=requests, env=environment)
    result = json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1])
    assert done.returncode == 0 and result["done"] == 4 and result["row_by_row_steps"] > 1
    assert done.stderr.count("failed (RuntimeError)") == 1 and "secret" not in done.stderr + done.stdout
