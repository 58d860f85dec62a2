"""`model check` and `model plan`: what agents of a model take, told from its config, equals what a model allocates."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from amem_cli.engine.cache.agent_cache import footprint
from amem_cli.engine.cache.latent_attention import absorb
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.models.plan import describe_config, layouts
from kvstore.errors import ModelMismatchError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from tests.support.models import kinds
from tests.support.models.base_config import WINDOW
from tests.support.running import children
from tests.support.running.amem import Amem, lines

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
BUDGET = int(10.2 * 2**30)  # bytes
Q4 = CODECS[DEFAULT_CODEC]

# float16, the paper's layout, amem: agents of 8,192 tokens in the budget
CAPACITY = {
    "gemma-3-12b-it": (3, 12, 37),
    "deepseek-coder-v2-lite": (4, 17, 147),
    "llama-3.1-8b": (10, 36, 35),
}
# the paper's counts, and the bytes of its 10.2 GB in the arithmetic that gives them
PUBLISHED = {
    "gemma-3-12b-it": (3, 12, BUDGET),
    "deepseek-coder-v2-lite": (4, 16, 10_200 << 20),
    "llama-3.1-8b": (9, 35, 10_200 << 20),
}


@pytest.mark.parametrize("name", CAPACITY)
def test_capacity_of_the_paper_s_models(name: str, amem: Amem) -> None:
    done = amem("model", "plan", str(CONFIGS / f"{name}.json"), "--memory", "10.2GiB", "--json")
    *rows, result = lines(done)
    assert tuple(row["agents"] for row in rows) == CAPACITY[name]
    assert tuple(result["paper"][key] for key in ("fp16", "q4", "memory")) == PUBLISHED[name]
    assert result["agents"] == CAPACITY[name][-1] and result["agent_bytes"] == rows[-1]["bytes"]


def test_no_one_memory_gives_all_of_the_paper_s_counts() -> None:
    """Each count says that there is room for so many agents, and none for one more."""
    least, limit = 0, sys.maxsize
    for name, (*counts, memory) in PUBLISHED.items():
        planned = layouts(json.loads((CONFIGS / f"{name}.json").read_text()), Q4, 8192, memory)[:2]
        assert [layout.agents for layout in planned] == counts
        least = max(least, *(layout.agents * layout.bytes for layout in planned))
        limit = min(limit, *((layout.agents + 1) * layout.bytes for layout in planned))
    assert (least, limit) == (10_368 << 20, 10_240 << 20), "twelve of Gemma's, and ten of Llama's in float16"


def test_sizes_follow_from_the_shapes_by_hand() -> None:
    """Gemma 3 12B: 48 layers of 8 heads, 256 wide; every sixth sees all, the others 1,024 tokens."""
    config = json.loads((CONFIGS / "gemma-3-12b-it.json").read_text())
    groups = describe_config(config).groups
    element = 4.5 / 8  # bytes
    full = 8 * 8 * 512 * 8192 * element
    window = 40 * 8 * 512 * 5 * 256 * element  # a ring of five blocks
    recent = 48 * 8 * 512 * 64 * 2
    refined = 8 * 8 * 512 * 64 * element  # the first 64 tokens of the layers that see all, once more
    assert footprint(groups, Q4, 8192) == full + window + recent + refined
    plain, paper, _ = layouts(config, Q4, 8192, BUDGET)
    assert plain.bytes == 48 * 8 * 512 * 8192 * 2
    assert paper.bytes == 48 * 8 * 512 * 8192 * element


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "deepseek_v2", "deepseek_v3", "qwen3_next", "gemma3n", "phi3"]
)
@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 64, 300, 1100])
def test_a_plan_is_what_a_model_allocates(kind: str, tokens: int) -> None:
    planned = describe_config(kinds.config_of(kind))
    model: Any = kinds.build(kind)
    absorb(model)
    spec = describe(model)
    assert planned == spec
    cache = spec.new_cache(Q4, SlabPool())
    while cache.offset < tokens:
        length = min(tokens - cache.offset, 256)
        mx.eval(model(mx.zeros((1, length), dtype=mx.int32), cache=cache.layers))
        cache.settle(length)
    assert cache.nbytes == footprint(planned.groups, Q4, tokens)


def test_no_weight_is_computed() -> None:
    """A model of 16 GB is described in a process that stays small."""
    script = (
        "import amem_cli.engine, json, pathlib, resource, sys\n"
        "from amem_cli.engine.models.plan import describe_config\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "describe_config(json.loads(pathlib.Path(sys.argv[1]).read_text()))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    path = CONFIGS / "llama-3.1-8b.json"
    done = children.run(sys.executable, "-c", script, path, check=True)
    assert int(done.stdout) < 64 << 10  # KiB


def test_check_says_how_a_model_is_served(amem: Amem, tmp_path: Path) -> None:
    folder = kinds.write("recurrent_gemma", tmp_path / "model")
    *rows, result = lines(amem("model", "check", str(folder), "--json"))
    groups = [row for row in rows if row["type"] == "group"]
    assert [(group["kind"], group["layers"], group["served"]) for group in groups] == [
        ("recurrent", 2, "states"),
        ("window", 2, "handle"),
    ]
    assert groups[0]["state_bytes"] == 2 * 4 * (3 * 256 + 256) and groups[1]["window"] == WINDOW
    sizes = [row for row in rows if row["type"] == "context"]
    assert [size["tokens"] for size in sizes] == [1024 << n for n in range(8)]
    assert sizes[0]["bytes"] == sizes[-1]["bytes"], "a window and a state do not grow"
    assert (result["model_type"], result["codec"], result["served"]) == (
        "recurrent_gemma",
        DEFAULT_CODEC,
        ["handle", "states"],
    )


def test_check_reads_well(amem: Amem) -> None:
    done = amem("model", "check", str(CONFIGS / "gemma-3-12b-it.json"))
    assert done.returncode == 0 and not done.stderr
    assert "window-0 of 1024" in done.stdout and "8 x 256/256" in done.stdout and "131,072" in done.stdout
    assert done.stdout.splitlines()[-1] == "supported; decode reads quantized codes"


def test_a_number_of_agents_is_an_exit_code(amem: Amem) -> None:
    path = str(CONFIGS / "llama-3.1-8b.json")
    fits = amem("model", "plan", path, "--memory", "10.2GiB", "--agents", "35")
    assert fits.returncode == 0 and "they fit" in fits.stderr
    too_many = amem("model", "plan", path, "--memory", "10.2GiB", "--agents", "36", "--json")
    assert (too_many.returncode, lines(too_many)[-1]["ok"]) == (1, False)
    told = amem("model", "plan", path, "--memory", "10.2GiB", "--agents", "36")
    assert told.returncode == 1 and "36 x 313 MB = 11.3 GB of 11 GB: only 35 fit" in told.stderr


@pytest.mark.parametrize("context", ["4096", "8192"])
def test_the_paper_s_figures_stand_only_where_they_hold(amem: Amem, context: str, tmp_path: Path) -> None:
    path = str(CONFIGS / "llama-3.1-8b.json")
    result = lines(amem("model", "plan", path, "--memory", "10G", "--context", context, "--json"))[-1]
    assert (result["paper"] is not None) == (context == "8192")
    other = kinds.write("llama", tmp_path / "model")
    assert lines(amem("model", "plan", str(other), "--memory", "10G", "--json"))[-1]["paper"] is None


def test_what_is_not_served_is_refused(amem: Amem, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kinds.config_of("deepseek_v41")))
    for command in (("check",), ("plan", "--memory", "1G")):
        done = amem("model", command[0], str(path), *command[1:], "--json")
        assert (done.returncode, lines(done)[-1]["code"]) == (6, "model-mismatch")
        assert "LayerCache" in lines(done)[-1]["message"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "names no model_type"),
        ({"model_type": 3}, "names no model_type"),
        ({"model_type": "no_such_model"}, "no model of the type 'no_such_model'"),
        ({"model_type": "base"}, "no model of the type 'base'"),
        ({"model_type": "qwen3", "hidden_size": 64}, "lacks num_hidden_layers, intermediate_size, "),
        ({**kinds.config_of("llama"), "hidden_size": 0}, "does not make a model of the type 'llama'"),
        ({**kinds.config_of("llama"), "num_hidden_layers": "4"}, "does not make a model of the type 'llama'"),
    ],
)
def test_a_config_that_is_none_is_told(config: dict[str, object], told: str) -> None:
    with pytest.raises(ModelMismatchError, match=told):
        describe_config(config)


@pytest.mark.parametrize(("kind", "expanded"), [("deepseek_v2", True), ("deepseek_v3", False)])
def test_latents_are_counted_as_mlx_lm_caches_them(kind: str, expanded: bool) -> None:
    float16 = layouts(kinds.config_of(kind), Q4, 8192, BUDGET)[0]
    assert float16.what.endswith("latents expanded") == expanded


def test_bad_arguments(amem: Amem, tmp_path: Path) -> None:
    path = str(CONFIGS / "llama-3.1-8b.json")
    assert amem("model", "plan", path, "--memory", "much").returncode == 2
    assert amem("model", "plan", path, "--memory=-1G").returncode == 2
    assert amem("model", "plan", path, "--memory", "1G", "--context", "0").returncode == 2
    assert amem("model", "plan", path, "--memory", "1G", "--context", str(2**31)).returncode == 2
    assert amem("model", "check", str(tmp_path / "none.json")).returncode == 4
    assert amem("model", "check", "org/not-here").returncode == 4
