"""What `overland check` prints about a run: its size and layout, the fake step, and whether this
machine has the memory for it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from overland.apps.check.fake_step import (
    KEPT,
    NOT_FOR_FAKES,
    RANKS_PER_NODE,
    fake_steps,
    fake_world,
)
from overland.apps.check.rehearsal import known_steps
from overland.apps.console.opening import binary_size, lines_of_plan, run_in_words
from overland.apps.console.readme import all_and_trained, strategy_in_words
from overland.checks.own_model import left_out, require_order
from overland.config.derived import model_name, resolve_degrees, resolve_dtype, rows_per_step
from overland.config.schema import JobConfig, Parallelism
from overland.errors import TrainingError
from overland.models.flops import causal_flops_per_token, measure_of
from overland.models.registry import model_config
from overland.parallel.apply import build_parts
from overland.parallel.mesh import build_mesh
from overland.run_folder import RunFolder
from overland.training.fit import WORDS, held_bytes, require_memory
from overland.training.memory import RECOMPUTE, can_estimate, step_memory
from overland.words import any_of, number_of
from overland.world.devices import device_type

Facts = dict[str, Any]

# Building the mesh and sharding take about 2 ms of CPU time per device: 30 s for this many.
LARGEST_FAKE_WORLD = 16_384
MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    KEPT: "activations kept for the backward pass",
}


class PlannedRun:
    """A config on a number of devices."""

    def __init__(self, config: JobConfig, world_size: int) -> None:
        training = config.training
        self.config, self.world_size = config, world_size
        self.degrees = resolve_degrees(config.parallelism, world_size, RANKS_PER_NODE)
        self.architecture = model_config(config.model)
        self.rows = rows_per_step(training, self.degrees.dp)
        self.passes = self.rows // (training.local_batch_size * self.degrees.dp)
        self.steps = known_steps(config, self.rows)
        changes = training.seq_len, config.lora, config.model.freeze
        self.measure = measure_of(self.architecture, *changes)
        self.causal_flops: float | None = None
        if self.measure.unit == "tokens":
            self.causal_flops = causal_flops_per_token(self.architecture, *changes)

    def lines(self, devices: str) -> dict[str, str]:
        """Returns the lines that `overland train` would print first, but for the last ones."""
        stage = self.config.parallelism.sharding_stage or ""
        if stage.endswith("hybrid") and self.world_size > RANKS_PER_NODE:
            devices += f", {RANKS_PER_NODE} per node"
        found = lines_of_plan(self.config, self.degrees, self.architecture, devices, self.steps)
        if self.passes > 1:
            found["batch"] += f"; accumulated over {self.passes:,} passes"
        if self.measure.flops is not None:
            found["compute"] = f"{flop_in_words(self.measure.flops)} per {self.measure.unit[:-1]}"
            if self.causal_flops is not None:
                causal = flop_in_words(self.causal_flops)
                found["compute"] += f"; {causal} without the attention that the causal mask hides"
        return found

    def run_line(self) -> dict[str, str]:
        return {"run": run_in_words(self.config, RunFolder(self.config))}

    def to_json(self) -> Facts:
        config, measure, steps = self.config, self.measure, self.steps
        unit, per_step = measure.unit, self.rows * measure.per_row
        total, trained = all_and_trained(config, self.architecture)
        shared = config.comm.ranks_per_device
        flops = {
            f"flops_per_{unit[:-1]}": measure.flops,
            "flops_per_token_causal": self.causal_flops,
        }
        return {
            "model": model_name(config),
            "parameters": total,
            **({"trained_parameters": trained} if trained != total else {}),
            **{name: int(flop) for name, flop in flops.items() if flop is not None},
            "devices": -(-self.world_size // shared),
            **({"ranks": self.world_size} if shared > 1 else {}),
            "layout": strategy_in_words(self.degrees),
            **({"sequences_per_step": self.rows} if unit == "tokens" else {}),
            f"{unit}_per_step": per_step,
            "accumulated_passes": self.passes,
            "steps": "counted when training starts" if steps is None else steps,
            **({} if steps is None else {f"{unit}_in_all": per_step * steps}),
            "run_folder": config.job.dump_folder,
        }

    def notes(self) -> list[str]:
        """Refuses a custom model whose blocks do not run in the order that it declares; returns
        which matrices are left out of what the config asks for."""
        is_split = self.degrees.pp > 1
        note = require_order(self.architecture, self.config, self.degrees) if is_split else None
        return [*([note] if note else []), *left_out(self.architecture, self.config)]

    def fake_step(self, is_here: bool) -> tuple[Facts, dict[str, str]]:
        """Returns the memory and collectives of rank 0, for scripts and as lines; with a pipeline,
        of whichever of its two ends needs more memory."""
        # Runs worth checking elsewhere use GPUs.
        where = device_type(self.config.training.device) if is_here else "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about fake tensors
            try:
                steps = fake_steps(self.config, self.world_size, device_type=where)
            except NOT_FOR_FAKES as error:
                none = f"none: the model reads values, and fake tensors have none ({error})"
                return {"fake_step": none}, {"fake step": none}
        worst = max(steps, key=lambda one: one.total_bytes)
        gib = {**worst.num_bytes, "in_all": worst.total_bytes}
        counts = {name: count for name, count in worst.collectives.items() if count}
        facts = {
            "parameters_per_device": worst.parameters,
            **{f"gib_per_device_{name}": round(size / 2**30, 3) for name, size in gib.items()},
            **{f"{name}s_per_pass": count for name, count in counts.items()},
            "fake_step_seconds": round(sum(one.seconds for one in steps), 1),
        }
        split = [f"{MEMORY[name]} {binary_size(size)}" for name, size in worst.num_bytes.items()]
        per = ("GPU" if where == "cuda" else "rank") if is_here else "device"
        per = "rank" if self.config.comm.ranks_per_device > 1 else per
        lines = {"memory": f"{binary_size(worst.total_bytes)} per {per}: {any_of(split, 'and')}"}
        if not is_here and can_estimate(self.architecture):
            peak, how = self.estimate_on_gpu()
            facts["gib_per_device_estimated"] = round(peak / 2**30, 3)
            lines["estimate"] = f"about {binary_size(peak)} per {per} at the peak, {how}"
        if counts:
            sent = [number_of(count, name) for name, count in counts.items()]
            lines["communication"] = f"{any_of(sent, 'and')} per pass"
        return facts, lines

    def estimate_on_gpu(self) -> tuple[float, str]:
        """Returns the bytes of a step at its peak as a run on NVIDIA GPUs takes it, and how that
        is: the fake step has neither the compiler nor our kernels, which save memory."""
        config = resolve_dtype(self.config, "cuda")
        compiled, mode = bool(config.compile.enable), config.activation_checkpoint.mode
        recompute = mode if mode in RECOMPUTE else "none"
        kernels = config.training.kernels == "auto"
        memory = step_memory(self.architecture, config, self.degrees, recompute, compiled, kernels)
        how = ["compiled" if compiled else "not compiled"]
        how += ["with our kernels"] * kernels
        others = {"auto": "nothing recomputed unless it must be"}
        how += [WORDS[mode] if mode in WORDS else others.get(mode, f"no savings by {mode} counted")]
        return memory.peak, f"{any_of(how, 'and')} (tensors, without the allocator's own overhead)"

    def lack_of_memory(self) -> list[str]:
        """Returns a note if `overland train` would refuse to start on this machine. What ranks hold
        is the mean over them, which is known from a whole model on the meta device."""
        device = torch.device(device_type(self.config.training.device))
        config = resolve_dtype(self.config, device.type)
        undivided = config.model_copy(update={"parallelism": Parallelism()})
        whole = undivided.having({"compile.enable": False, "activation_checkpoint.mode": "none"})
        with fake_world(0, 1):
            mesh = build_mesh(resolve_degrees(whole.parallelism, 1), "cpu")
            held = held_bytes(build_parts(self.architecture, mesh, whole), config)
        held *= self.degrees.dp_replicate / self.degrees.world_size
        try:
            require_memory(config, self.architecture, self.degrees, device, held, self.world_size)
        except TrainingError as error:
            return [f"`overland train` would refuse to start here: {error}"]
        return []


def flop_in_words(flop: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flop >= size:
            return f"{flop / size:,.1f} {unit}FLOP"
    return f"{flop:,.0f} FLOP"
