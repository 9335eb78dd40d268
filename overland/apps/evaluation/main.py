"""The entry point for programs: `overland.evaluate`, `generate` and `load_model`. Their arguments
are also the options of the commands `eval` and `generate`.

Imports nothing heavy: a command checks its options before it starts ranks or loads a model.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.apps.arguments import integer_or_none, number, path_or_none
from overland.apps.progress import progress_bar
from overland.arguments import integer, path_of, refused, texts
from overland.errors import ArgumentError, OutOfMemoryError
from overland.words import any_of, size, visible
from overland.world import World

if TYPE_CHECKING:
    import torch

    from overland.apps.evaluation.generate import Completion
    from overland.apps.evaluation.model import OpenModel
    from overland.apps.evaluation.results import Record
    from overland.apps.evaluation.task_run import TaskOptions

LIMITS: dict[str, int | tuple[str, ...]] = {
    "step": 0, "context": 2, "stride": 1, "limit": 1, "batch_size": 1, "num_fewshot": 0,
    "prefix": ("auto", "bos", "eos", "none"), "dtype": ("float32", "bfloat16", "float16"),
}  # fmt: skip
"""The least number, or the choices."""
PATHS = ("base", "tokenizer", "config", "output", "include_path", "datasets")
FOR_DATA = ("stride", "joined", "prefix", "column", "subset", "split", "skip_bad")
FOR_TASKS = (
    "num_fewshot", "apply_chat_template", "chat_template", "fewshot_as_multiturn", "system",
    "gen_kwargs", "add_bos", "log_samples", "include_path", "datasets", "unsafe_code",
)  # fmt: skip


def evaluate(
    path: str | Path,
    *,
    data: str | Path | Sequence[str | Path] = (),
    tasks: str | Sequence[str] = (),
    step: int | None = None,
    steps: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    joined: bool = False,
    prefix: str = "auto",
    limit: int | None = None,
    column: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    skip_bad: bool = False,
    batch_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    base: str | Path | None = None,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
    output: str | Path | None = None,
    again: bool = False,
    quiet: bool = True,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    fewshot_as_multiturn: bool = True,
    system: str | None = None,
    gen_kwargs: str | None = None,
    add_bos: bool | None = None,
    log_samples: bool = False,
    include_path: str | Path | None = None,
    datasets: str | Path | None = None,
    unsafe_code: bool = False,
) -> list[Record]:
    """Measures perplexity and task scores, as `overland eval` does, in this process. Without data
    and tasks, a run is evaluated on its own validation data.

    Args:
        path: A run, a checkpoint of any format, or a Hugging Face folder.
        data: PATH, NAME or NAME=PATH to measure perplexity on; several are allowed.
        tasks: Tasks of lm-evaluation-harness: `a,b` or @LIST; several are allowed. `overland
            fetch tasks` fetches their datasets.
        step: Checkpoint of a run; default: the newest.
        steps: Checkpoints of a run to compare: all, or such as 1000,2000.
        context: Tokens per window; default: as in training, at most 4096.
        stride: Tokens between window starts; default: half of the context.
        joined: Join all documents into one text, as is usual for C4.
        prefix: Token that a document's first token is predicted from.
        limit: Evaluate only this many documents.
        column: Column of the data that holds the documents.
        subset: Subset of a dataset folder.
        split: Split of a dataset folder; default: validation or test.
        skip_bad: Skip and count documents that cannot be read.
        batch_size: Number of windows processed together.
        dtype: Type of the computation; default: float32 on a CPU, bfloat16 on a GPU.
        base: Base model of adapters, if they do not name it.
        tokenizer: A tokenizer, if the path has none.
        config: A config.json, if the path has none.
        output: Folder for results; default: next to the checkpoint.
        again: Recompute results that already exist.
        quiet: Suppress messages about saved results and progress.
        num_fewshot: Examples before each question of a task; default: the task's.
        apply_chat_template: Format prompts of tasks as conversations.
        chat_template: Name of the template, if there are several.
        fewshot_as_multiturn: Format few-shot examples as turns of the conversation.
        system: System message for tasks.
        gen_kwargs: Generation settings for tasks, such as max_gen_toks=64.
        add_bos: Begin prompts of tasks with BOS; default: as the tokenizer does.
        log_samples: Save every prompt and answer of the tasks.
        include_path: Folder with your own task definitions.
        datasets: Folder that the tasks' datasets were fetched to.
        unsafe_code: Let tasks run programs that the model writes.

    Returns:
        A record per dataset or group of tasks, as `overland eval --json` prints them.
    """
    return evaluate_here(checked(locals()), World(), quiet)


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `evaluate` (and those of the command alone, as they are), or raises
    an error for one that is not valid, contradicts another or would have no effect."""
    found = {**given, "path": path_of(given["path"], "path")}
    found["data"] = texts(given["data"] or (), "data", "a path or a list of paths", or_paths=True)
    found["tasks"] = texts(given["tasks"] or (), "tasks")
    found |= {name: path_or_none(given[name], name) for name in PATHS}
    for name, limit in LIMITS.items():
        if isinstance(limit, int):
            found[name] = integer_or_none(given[name], name, limit)
    if given["prefix"] not in LIMITS["prefix"]:  # type: ignore[operator]
        raise refused("prefix", given["prefix"], any_of(LIMITS["prefix"]))  # type: ignore[arg-type]
    if given["step"] is not None and given["steps"] is not None:
        raise ArgumentError("give either --step or --steps, not both")
    unread, needed = (FOR_DATA, "data") if found["tasks"] else (FOR_TASKS, "tasks")
    usual = inspect.signature(evaluate).parameters
    for name in () if found[needed] else unread:
        if found[name] != usual[name].default:
            option = name.replace("_", "-")
            raise ArgumentError(f"--{option} has no effect without --{needed}: give both")
    return found


def evaluate_here(given: Mapping[str, Any], world: World, quiet: bool = False) -> list[Record]:
    """Evaluates with checked arguments, in this process or as one rank of several; the first rank's
    results are complete."""
    import torch

    from overland.apps.convert.formats.lazy import given_dtype
    from overland.apps.evaluation.evaluate import (
        EvaluationRequest,
        evaluate_set,
        open_session,
        sets_for,
        settings_of,
        wait_long,
    )
    from overland.apps.evaluation.model import steps_of
    from overland.config.schema import Comm
    from overland.parallel.comm import process_group
    from overland.world.devices import device_type

    def report(message: str) -> None:
        if world.is_first and not quiet:
            print(visible(message), file=sys.stderr, flush=True)

    names = {one.name for one in fields(EvaluationRequest)}
    asked = EvaluationRequest(**{name: one for name, one in given.items() if name in names})
    asked = replace(asked, dtype=given_dtype(asked.dtype))
    tasks = asked_tasks(given)
    some = [asked]
    if given["steps"] is not None:
        some = [replace(asked, step=step) for step in steps_of(asked.path, given["steps"])]
    group: AbstractContextManager[torch.device] = nullcontext(torch.device(device_type()))
    if world.size > 1:
        backend = os.environ.get("COMM_BACKEND") or "auto"
        # Ranks of a large model may read its weights at very different speeds.
        comm = Comm.model_validate({"backend": backend, "init_timeout_seconds": 1800})
        group = process_group(comm, world, device_type())
    results = []
    with group as device:
        wait_long()
        for one in some:
            session = open_session(one, world, device, report)
            if one.data or tasks is None:
                settings = settings_of(session)
                results += [evaluate_set(session, each, settings) for each in sets_for(session)]
            if tasks is not None:
                from overland.apps.evaluation.tasks import evaluate_tasks

                results.append(evaluate_tasks(session, tasks))
    return results


def asked_tasks(given: Mapping[str, Any]) -> TaskOptions | None:
    """Returns the requested tasks, or None if there are none. Network access is disabled before
    libraries that could open connections are imported."""
    if not given["tasks"]:
        return None
    from overland.apps.evaluation.task_data import task_names
    from overland.apps.evaluation.task_run import TaskOptions, no_network
    from overland.plugins import need

    no_network()
    need("lm_eval", "--tasks", "eval")
    alike = ("num_fewshot", "system", "gen_kwargs", "add_bos", "log_samples", "unsafe_code")
    include, usual = given["include_path"], "default" if given["apply_chat_template"] else None
    return TaskOptions(
        tasks=task_names(given["tasks"]),
        chat_template=given["chat_template"] or usual,
        multiturn=given["fewshot_as_multiturn"],
        include_path=None if include is None else str(include.absolute()),
        **{name: given[name] for name in alike},
    )


def generate(
    model: OpenModel | str | Path,
    prompts: str | Sequence[str],
    *,
    num_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
    batch_size: int = 16,
    parse_specials: bool = True,
) -> list[Completion]:
    """Returns a completion for each prompt, as `overland generate` prints it.

    Args:
        model: What `overland.load_model` returned, or the path of a run or checkpoint.
        prompts: One text, or several.
        num_tokens: Maximum number of tokens to generate.
        temperature: 0 always takes the most likely token.
        top_k: Sample from this many of the most likely tokens; 0: from all.
        top_p: Sample from the most likely tokens whose probabilities add up to this.
        min_p: Sample from tokens whose probability is at least this fraction of the highest.
        repetition_penalty: Above 1, tokens that occurred before become less likely.
        stop: Texts that end a completion; they are not part of it.
        seed: The same seed gives the same texts.
        chat: Whether prompts are questions, formatted with the model's chat template.
        system: The system message, if prompts are questions (chat).
        batch_size: Number of prompts processed together.
        parse_specials: Whether names of special tokens in texts to continue stand for the tokens,
            as in transformers. In questions (`chat`) they are always text.
    """
    if system is not None and not chat:
        raise ArgumentError("system has no effect without chat=True: give both")
    from overland.apps.evaluation.chat import Asking
    from overland.apps.evaluation.model import OpenModel
    from overland.apps.evaluation.prompts import Prompt, check_prompts
    from overland.apps.evaluation.sampling import Sampling

    sampling = Sampling(
        number(temperature, "temperature"),
        integer(top_k, "top_k"),
        number(top_p, "top_p"),
        number(min_p, "min_p"),
        number(repetition_penalty, "repetition_penalty"),
        integer(seed, "seed"),
    )
    given = [Prompt(text) for text in texts(prompts, "prompts")]
    check_prompts(given)
    num_tokens = integer(num_tokens, "num_tokens", least=1)
    batch_size = integer(batch_size, "batch_size", least=1)
    stop = texts(stop, "stop")
    opened = model
    if not isinstance(opened, OpenModel):
        opened = open_model(path_of(opened, "model"), needs_tokenizer=True)
    asking = Asking(opened, sampling, num_tokens, stop, chat, system, parse_specials)
    return list(asking.answers(given, batch_size))


def open_model(
    path: str | Path,
    *,
    base: str | Path | None = None,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    step: int | None = None,
    needs_tokenizer: bool = False,
) -> OpenModel:
    """Opens the model at `path`, in eval mode, whole, on one device.

    Args:
        path: A run folder or one of its checkpoints, a Hugging Face folder, adapters, or a
            checkpoint of any format that `overland convert` reads.
        base: Base model of adapters, if they do not name it.
        tokenizer: Tokenizer file or folder, if the path has none.
        config: A config.json or its folder, if the path has none.
        dtype: float32, bfloat16 or float16; default: float32 on a CPU, bfloat16 on a GPU.
        device: cpu, cuda, cuda:1, …; default: the GPU if there is one.
        step: Checkpoint of a run; default: the newest.
        needs_tokenizer: Whether to refuse a model without a tokenizer here. Otherwise only what
            needs one does, such as `generate`.
    """
    import torch

    from overland.apps.evaluation.model import Given, OpenModel, device_of, dtype_of, find_model
    from overland.models.init import cast_floats, init_buffers, whole
    from overland.models.structure import tie

    place = device_of(device)
    kind = dtype_of(dtype, place)
    given = Given(
        path_or_none(base, "base"),
        path_or_none(tokenizer, "tokenizer"),
        path_or_none(config, "config"),
        integer_or_none(step, "step", least=0),
        needs_tokenizer,
    )
    found = find_model(path_of(path, "path"), given)
    with torch.device("meta"):
        built = cast_floats(found.build(), kind)
    total = sum(one.nbytes for one in built.parameters())
    try:
        built.to_empty(device=place)
    except torch.OutOfMemoryError:
        raise OutOfMemoryError(
            f"{found.path} takes {size(total)} in {str(kind).removeprefix('torch.')}, but {place} "
            "does not have that much free memory: free some, or use a narrower --dtype or "
            "--device cpu"
        ) from None
    tie(built)
    init_buffers(built, place)
    with progress_bar("reading weights", "bytes", total) as bar:
        found.fill(built, whole, bar.advance)
    return OpenModel(
        built.eval(), found.tokenizer, found.config, found.context, found.path, found.step,
        found.end_ids, kind, place,
    )  # fmt: skip
