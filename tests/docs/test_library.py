"""`import overland`: fast, typed, documented, and what its page says."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import overland
from tests.cli.processes import ROOT, environment
from tests.cli.processes import overland as command

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
NOTEBOOK = json.loads((ROOT / "examples" / "overland.ipynb").read_text(encoding="utf-8"))
TINY = (
    "model.overrides={hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, "
    "num_attention_heads = 4, num_key_value_heads = 4, vocab_size = 300}"
)
TEXTS = ["training.dataset_path=texts.jsonl", "data.holdout=0.2", "data.vocab_size=300",
         "training.local_batch_size=2", "validation.steps=1"]  # fmt: skip
# What makes data and models of page and notebook small: settings that come before theirs.
PRELUDE = """
import json, pathlib, overland, overland.tools.run as run
texts = [f"def square_{{i}}(): return {{i}} * {{i}}" for i in range(400)]
lines = "".join(json.dumps({{"text": text}}) + chr(10) for text in texts)
pathlib.Path("texts.jsonl").write_text(lines)
load = run.load_config
overland.load_config = lambda source, *settings: load(source, *{settings!r}, *settings)
"""
QUICK = """
import sys, overland
assert not {"torch", "numpy", "pydantic", "rich"} & set(sys.modules)
assert set(overland.__all__) <= set(dir(overland))
overland.load_config
assert "torch" not in sys.modules
"""


def run_python(program: str, cwd: Path) -> str:
    done = Path(cwd / "program.py")
    done.write_text(program)
    return command("program.py", cwd=cwd, NGPU="1").stdout


def test_the_import_is_fast_and_brings_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", QUICK], env=environment(), check=True)


def test_every_public_name_is_there_typed_and_documented() -> None:
    for name in overland.__all__:
        found = getattr(overland, name)
        if name == "__version__":
            continue
        assert inspect.getdoc(found), name
        if inspect.isfunction(found):
            hints = found.__annotations__  # mypy has resolved them
            assert hints.keys() >= inspect.signature(found).parameters.keys(), name
            assert "return" in hints, name
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        overland.trian  # noqa: B018
    assert (ROOT / "overland" / "py.typed").is_file()


def test_type_checkers_see_what_is_there_at_run_time() -> None:
    """The names for type checkers, the list of public ones and the table of places are three."""
    tree = ast.parse((ROOT / "overland" / "__init__.py").read_text())
    (hints,) = [one for one in tree.body if isinstance(one, ast.If)]
    seen = {
        alias.asname: f"{one.module}:{alias.name}"
        for one in hints.body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    }
    table = {
        name: place if ":" in place else f"{place}:{name}"
        for name, place in overland._PLACES.items()
    }
    assert seen == table
    assert {*table, "__version__"} == set(overland.__all__)


def test_the_page_names_every_public_function() -> None:
    for name in overland.__all__:
        if name[0].islower():
            assert re.search(rf"\b{name}\b", PAGE), name


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    said = run_python(PRELUDE.format(settings=[TINY, *TEXTS]) + "\n\n".join(blocks), tmp_path)
    assert "runs/quickstart 4 True" in said
    assert "'tokens_BS': (2, 32)" in said
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "weights" / "config.json").is_file()


def test_the_notebook_runs_and_holds_no_outputs(tmp_path: Path) -> None:
    code = [one for one in NOTEBOOK["cells"] if one["cell_type"] == "code"]
    assert all(not one["outputs"] and one["execution_count"] is None for one in code)
    cells = ["".join(one["source"]) for one in code]
    program = "\n\n".join(cells)
    for large, small in (("steps=20", "steps=2"), ("steps=40", "steps=4"), ("1024", "300")):
        assert large in program
        program = program.replace(large, small)
    program = PRELUDE.format(settings=TEXTS) + program + "\n\nprint(result.step)"
    said = run_python(program, tmp_path)
    assert said.endswith("\n4\n")


REFUSED = """
import overland
for make in (
    lambda: overland.load_config("quickstart", "training.stepz=3"),
    lambda: overland.load_model("nowhere"),
    lambda: overland.open_checkpoint("nowhere"),
    lambda: overland.save_model(None, "x", to="gguf"),
    lambda: overland.train(overland.load_config("quickstart", "training.dataset_path=nowhere.txt")),
):
    try:
        make()
    except overland.OverlandError as error:
        print(str(error).splitlines()[0])
    else:
        raise AssertionError
"""


def test_mistakes_are_errors_in_a_sentence(tmp_path: Path) -> None:
    said = run_python(REFUSED, tmp_path).splitlines()
    assert len(said) == 5
    assert "did you mean training.steps?" in said[0]
    assert "nowhere" in said[1]
    assert "nowhere does not exist" in said[2]
    assert "to = 'gguf' is unknown" in said[3]
    assert "nowhere.txt" in said[4]
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


TWO_RANKS = """
import overland
config = overland.load_config(
    "quickstart", {tiny!r}, "training.dataset=random", "training.seq_len=32", "training.steps=2",
    "training.local_batch_size=2", "validation.enable=false", "data.vocab_size=300",
)
result = overland.train(config, ranks=2, quiet=True)
print(result.step, result.finished, result.checkpoint)
"""


def test_several_ranks_are_started_and_waited_for(tmp_path: Path) -> None:
    said = run_python(TWO_RANKS.format(tiny=TINY), tmp_path)
    assert said == "2 True runs/quickstart/checkpoint/step_2\n"
    assert "sharded over 2 devices" in (tmp_path / "runs/quickstart/README.md").read_text()
