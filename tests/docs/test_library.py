"""`import overland`: fast, typed, documented, and what its page says."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import overland
from overland.apps.evaluation.main import open_model
from overland.cli.eval import evaluate as command_evaluate
from overland.config.load import recipe_names
from overland.config.validate import validate_again
from overland.training import callbacks
from tests.cli.processes import ROOT, environment
from tests.cli.processes import overland as command
from tests.evaluation.texts import write_text_model

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
import json, pathlib, overland, overland.training.main as run
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
        alias.asname or alias.name: f"{one.module}:{alias.name}"
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
    after = "\n\nimport sys; print(sys.excepthook is sys.__excepthook__)"
    program = PRELUDE.format(settings=[TINY, *TEXTS]) + "\n\n".join(blocks) + after
    said = run_python(program, tmp_path)
    assert said.endswith("True\n"), "an error of the program afterwards is not one of [rank0]"
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


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny")


def test_evaluate_takes_what_the_command_takes(text_model: Path, tmp_path: Path) -> None:
    lines = [{"body": "def a(): pass", "n": "x"}, {"body": "def b(): pass", "n": "y"}, {"n": "z"}]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    how = {"data": path, "column": "body", "skip_bad": True, "output": tmp_path / "out"}
    (alone,) = overland.evaluate(text_model, **how)
    (joined,) = overland.evaluate(
        text_model, joined=True, prefix="eos", stride=16, context=16, **how
    )
    assert (alone["unscored"], joined["unscored"], joined["skipped_documents"]) == (2, 0, 1)
    assert joined["tokens"] == alone["tokens"] + 3  # the first ones, and EOS between
    for given, words in (
        ({"data": path}, "`column`"),
        ({"data": path, "column": "body"}, "use `skip_bad` to skip it"),
        ({**how, "stride": 9, "context": 8}, "`stride` 9 is longer than the context"),
        ({**how, "prefix": "bos"}, "`prefix` bos: "),
        ({**how, "prefix": "cls"}, "prefix = 'cls': expected auto, bos, eos or none"),
        ({"column": "body"}, "`column` has no effect without `data`"),
        ({"tasks": "quiz", "joined": True}, "`joined` has no effect without `data`"),
    ):
        with pytest.raises(overland.OverlandError) as error:
            overland.evaluate(text_model, **given)
        assert words in str(error.value)
        assert "--" not in str(error.value)


def test_evaluate_has_every_option_of_the_command() -> None:
    about_devices = {"ranks", "shard", "tensor_parallel"}
    options = inspect.signature(command_evaluate).parameters.keys() - {"as_json"}
    arguments = inspect.signature(overland.evaluate).parameters.keys() - {"quiet"}
    assert options - about_devices == arguments


def test_errors_of_functions_name_arguments_and_those_of_commands_options(
    text_model: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(text_model, tmp_path / "bare", ignore=lambda *_: ["tokenizer.json"])
    for call, words in (
        (lambda: overland.load_model(text_model, dtype="float31"), "`dtype` float31 is unknown"),
        (lambda: overland.load_model(text_model, base=text_model), "omit `base`"),
        (lambda: overland.convert(text_model, tmp_path / "x", "hff"), "`to` hff is unknown"),
        (lambda: overland.generate(bare, "a"), "with `tokenizer` of load_model"),
    ):
        with pytest.raises(overland.OverlandError) as error:
            call()
        assert words in str(error.value)
    with pytest.raises(overland.OverlandError, match="--dtype float31"):
        open_model(text_model, dtype="float31")
    assert pickle.loads(pickle.dumps(overland.evaluate)) is overland.evaluate


def of_quickstart(key: str, value: object) -> overland.JobConfig:
    """Returns a config with a value that was changed after it was loaded."""
    config = overland.load_config("quickstart")
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    return config


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: overland.train(of_quickstart("training.steps", -5)),
         "the config: training.steps = -5: expected a positive whole number"),
        (lambda: overland.open_dataset(of_quickstart("training.seq_len", "x")),
         'the config: training.seq_len = "x": expected a positive whole number'),
        (lambda: overland.train("quickstart", ranks=0), "ranks = 0: expected an integer of 1 or"),
        (lambda: overland.train("quickstart", ranks=-1), "ranks = -1: expected an integer of 1"),
        (lambda: overland.train("quickstart", ranks="2"), "ranks = '2': expected an integer of 1"),
        (lambda: overland.train("quickstart", ranks=True), "ranks = True: expected an integer"),
        (lambda: overland.train(3), "config = 3: expected what overland.load_config returned"),
        (lambda: overland.train(Path("quickstar.toml")), '"quickstar.toml": no such file'),
        (lambda: overland.load_config(None), "source = None: expected a path"),
        (lambda: overland.load_config(""), "source = '': expected a path"),
        (lambda: overland.load_config({"a": 1}), "source = {'a': 1}: expected a path"),
        (lambda: overland.load_config("quickstart", {"training.steps": 3}),
         "settings = {'training.steps': 3}: expected strings such as 'training.steps=20'"),
        (lambda: overland.load_config("quickstart", 3), "settings = 3: expected strings such as"),
        (lambda: overland.open_dataset(None), "source = None: expected a path"),
        (lambda: overland.load_model(None), "path = None: expected a path"),
        (lambda: overland.load_model("x", step="3"), "step = '3': expected an integer of 0 or"),
        (lambda: overland.load_model("x", dtype=torch.int8), "int8 is unknown"),
        (lambda: overland.open_checkpoint(3), "path = 3: expected a path"),
        (lambda: overland.convert(None, "x", "hf"), "source = None: expected a path"),
        (lambda: overland.convert("x", "y", "hf", dtype=torch.int8), "int8 is unknown"),
        (lambda: overland.save_model(None, "x"), "model = None: expected what overland.load_mod"),
        (lambda: overland.save_model(torch.nn.Linear(1, 1), 3), "target = 3: expected a path"),
        (lambda: overland.generate(3, "a"), "model = 3: expected a path"),
        (lambda: overland.generate("x", {"a": 1}), "prompts = {'a': 1}: expected a string or a "),
        (lambda: overland.generate("x", [3]), "[3]: expected a string or a list of strings"),
        (lambda: overland.generate("x", b"hi"), "prompts = b'hi': expected a string or a list"),
        (lambda: overland.generate("x", Path("hi")), "Path('hi'): expected a string or a list"),
        (lambda: overland.generate("x", "a", seed="x"), "seed = 'x': expected an integer"),
        (lambda: overland.generate("x", "a", temperature="x"), "temperature = 'x': expected a num"),
        (lambda: overland.generate("x", "a", num_tokens=1.5), "num_tokens = 1.5: expected an int"),
        (lambda: overland.generate("x", "a", num_tokens=-1), "num_tokens = -1: expected an int"),
        (lambda: overland.evaluate(None), "path = None: expected a path"),
        (lambda: overland.evaluate("x", limit=-1), "limit = -1: expected an integer of 1 or more"),
        (lambda: overland.evaluate("x", data={"a": "b"}), "data = {'a': 'b'}: expected a path or"),
        (lambda: overland.evaluate("x", limt=4), "no argument 'limt'; did you mean 'limit'?"),
        (lambda: overland.evaluate("x", num_fewshot=4), "`num_fewshot` has no effect without"),
        (lambda: overland.evaluate("x", datasets="y"), "`datasets` has no effect without `tasks`"),
        (lambda: overland.evaluate("x", joined="no"), "joined = 'no': expected True or False"),
        (lambda: overland.evaluate("x", column=3), "column = 3: expected a text"),
        (lambda: overland.evaluate("x", step=1, steps="all"), "either `step` or `steps`, not both"),
        (lambda: overland.generate("x", "a", chat="no"), "chat = 'no': expected True or False"),
        (lambda: overland.generate("x", "a", system="b"), "system has no effect without chat"),
        (lambda: overland.train("x", steps=3), "train has no argument 'steps'"),
        (lambda: overland.register_callback(3), "= 3: expected a subclass of overland.Callback"),
        (lambda: overland.register_callback(dict), "expected a subclass of overland.Callback"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused_by_name(
    call: Callable[[], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(overland.OverlandError) as caught:
        call()
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_function_that_makes_something_else_than_a_callback_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callbacks, "_factories", [])
    overland.register_callback(lambda run: None)
    assert callbacks.user_callbacks(None) == []
    overland.register_callback(lambda run: 3)
    with pytest.raises(
        overland.OverlandError, match=r"= 3: expected an overland\.Callback, or None"
    ):
        callbacks.user_callbacks(None)


@pytest.mark.parametrize("name", recipe_names())
def test_a_config_as_it_was_loaded_is_still_valid_in_train(name: str) -> None:
    config = overland.load_config(name)
    assert validate_again(config, "the config") == config


ACCEPTED = """
import torch
config = overland.load_config("quickstart", ["training.steps=2", "training.seq_len=32"])
assert config.training.steps == 2
result = overland.train(config, quiet=True)
again = overland.train(result.folder, quiet=True)
assert (again.folder, again.step, again.finished) == (result.folder, 2, True)
model = overland.load_model(result.folder, dtype=torch.bfloat16)
assert model.dtype is torch.bfloat16
overland.save_model(model, "saved", dtype=torch.float16)
overland.convert(result.folder, "converted", "hf", dtype=torch.float16)
for folder in ("saved", "converted"):
    checkpoint = overland.open_checkpoint(folder)
    assert checkpoint.read("model.model.norm.weight").dtype is torch.float16
(record,) = overland.evaluate(result.folder, data=pathlib.Path("texts.jsonl"), limit=2)
assert record["documents"] == 2
try:
    checkpoint.read("model.model.norm.wieght")
except overland.OverlandError as error:
    print(error)
with overland.open_dataset(config) as data:
    for step in (0, -1, 1.5, 10**12, 10**30):
        try:
            data.batch(step)
        except overland.OverlandError as error:
            print(error)
"""


def test_paths_lists_and_types_of_torch_are_accepted(tmp_path: Path) -> None:
    said = run_python(PRELUDE.format(settings=[TINY, *TEXTS]) + ACCEPTED, tmp_path).splitlines()
    assert said[0].endswith("no tensor 'model.model.norm.wieght'; did you mean "
                            "'model.model.norm.weight'?")  # fmt: skip
    bounds = "expected an integer from 1 to 1,000,000,000,000"
    assert said[1:4] == [f"step = {step}: {bounds}" for step in (0, -1, 1.5)]
    assert "epochs into the data" in said[4]
    assert said[5] == f"step = {10**30}: {bounds}"


SIGNALLED = """
import os, signal


@overland.register_callback
class Signal(overland.Callback):
    def on_step(self, run):
        os.kill(os.getpid(), signal.{name})


before = signal.getsignal(signal.{name})
config = overland.load_config("quickstart", "training.steps=50", "training.seq_len=32")
result = overland.train(config, quiet=True)
assert signal.getsignal(signal.{name}) is before
print(result.step, result.finished, result.checkpoint.name)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_makes_train_save_and_return(name: str, tmp_path: Path) -> None:
    program = PRELUDE.format(settings=[TINY, *TEXTS]) + SIGNALLED.format(name=name)
    step, finished, checkpoint = run_python(program, tmp_path).split()
    assert int(step) < 50
    assert (finished, checkpoint) == ("False", f"step_{step}.preempt")


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
