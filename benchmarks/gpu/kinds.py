"""Where the time of a step goes: milliseconds on the device by kind of kernel."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The first pattern that is found in a kernel's name decides.
KINDS = {
    "communication": r"nccl|^local_|^network_",
    "elementwise": r"^triton_",
    "cast": r"^_cast",
    "loss": r"_cross_entropy|softmax|nll_loss|^_scaled$",
    "optimizer": r"^_update|^_sum_of_squares|adam|[lL]p[nN]orm|multi_tensor_apply(?!.*CopyF)",
    "attention": r"sdpa|flash|fmha|cudnn::fusion",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|splitKreduce",
    "copy": r"Memcpy|Memset|[cC]opy|CatArray|chunk_cat|split_with_sizes|fill|FillFunctor",
    "other": r"",
}


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel))


def device_time(work: Callable[[], object], steps: int) -> dict[str, Any]:
    """Milliseconds per step by kind, the time no kernel ran ("idle"), the time in which nothing but
    communication ran ("exposed"), and the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary(events, steps)


def summary(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    idle, busy_until, before = 0.0, spans[0][0], ""
    gaps: list[tuple[float, str, str]] = []
    for start, end, name in spans:
        idle += max(0.0, start - busy_until)
        gaps.append((start - busy_until, before[:60], name[:60]))
        before = name
        busy_until = max(busy_until, end)
        by_kind[kind_of(name)] += end - start
        by_name[name[:110]] += end - start
        calls[name[:110]] += 1
    scale = 1e-3 / steps
    work = [span for span in spans if kind_of(span[2]) != "communication"]
    return {
        "per_step_ms": {kind: round(time * scale, 2) for kind, time in by_kind.most_common()},
        "idle_ms": round(idle * scale, 2),
        "exposed_ms": round((covered(spans) - covered(work)) * scale, 2),
        "span_ms": round((busy_until - spans[0][0]) * scale, 2),
        "num_kernels": len(spans) // steps,
        "gaps": [[round(gap * 1e-3, 3), a, b] for gap, a, b in sorted(gaps, reverse=True)[:12]],
        "longest": [
            [name, round(time * scale, 3), calls[name] // steps]
            for name, time in by_name.most_common(40)
        ],
    }


def covered(spans: list[tuple[float, float, str]]) -> float:
    """The time in which any of these sorted spans runs."""
    total, until = 0.0, -math.inf
    for start, end, _ in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
