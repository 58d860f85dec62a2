"""Lines that `amem batch` reads, and those that it writes."""

import json
from typing import Any

Line = dict[str, Any]


def ndjson(*requests: Line) -> bytes:
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def prefill(agent: str, **more: Any) -> Line:
    return {"id": f"make-{agent}", "op": "prefill", "agent": agent, "text": f"hello {agent}", **more}


def chat(key: str, agent: str, message: Any = "well?", **more: Any) -> Line:
    return {"id": key, "op": "chat", "agent": agent, "message": message, "max_tokens": 4, **more}


def by_id(told: list[Line]) -> dict[str, Line]:
    return {line["id"]: line for line in told if line["type"] == "turn" and line["id"]}
