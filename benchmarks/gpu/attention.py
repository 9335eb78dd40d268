"""On a GPU: every attention backend against a float32 dense reference, alone and in a compiled
layer, with timings. Not a test (CI has no GPU): `python benchmarks/gpu/attention.py`."""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.models import DecoderConfig, ModelError, build_model
from overland.models.attention import Attention, Mask, build_mask
from overland.models.init import Normal, fill_random, init_weights
from overland.models.loss import OutputMatrix
from overland.parallel.context import pieces_of_rank

GPU = torch.device("cuda")


def documents(batch: int, seq_len: int, num: int) -> Tensor:
    cuts = torch.rand(batch, seq_len, device=GPU) < num / seq_len
    return cuts.cumsum(1)


def seconds(run: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def check_backends() -> None:
    batch, heads, kv_heads, seq_len, dim = 2, 8, 2, 1024, 64
    shape_q, shape_k = (batch, heads, seq_len, dim), (batch, kv_heads, seq_len, dim)
    exact = [torch.randn(s, device=GPU) for s in (shape_q, shape_k, shape_k)]
    out_grad = torch.randn(shape_q, device=GPU)
    numbers = documents(batch, seq_len, 6)
    for window in (None, 100):
        for docs in (None, numbers):
            answers: dict[str, list[Tensor]] = {}
            for backend, dtype in [("sdpa", torch.float32)] + [
                (b, d)
                for d in (torch.bfloat16, torch.float32)
                for b in ("sdpa", "auto", "cudnn", "flash", "flex")
            ]:
                inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
                label = (
                    f"{backend:5} {str(dtype)[6:]:8} window={window} documents={docs is not None}"
                )
                try:
                    mask = build_mask(backend, batch, seq_len, GPU, dtype, window, docs)
                except ModelError as error:
                    print(f"{label}: refused: {error}")
                    continue
                out = Attention()(*inputs, mask)
                out.backward(out_grad.to(dtype))
                result = [out.detach().float(), *(x.grad.float() for x in inputs)]
                if not answers:
                    answers["reference"] = result
                    continue
                errors = [
                    ((a - b).abs().max() / b.abs().max()).item()
                    for a, b in zip(result, answers["reference"], strict=True)
                ]
                bound = 2e-2 if dtype == torch.bfloat16 else 5e-3
                verdict = "ok" if max(errors) < bound else "WRONG"
                print(f"{label}: {mask.form:6} {verdict} " + " ".join(f"{e:.1e}" for e in errors))


def check_compiled_layers() -> None:
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "use_sliding_window": True,
            "sliding_window": 100,
            "max_window_layers": 1,
        }
    )
    for backend in ("auto", "flash", "flex", "sdpa"):
        torch._dynamo.reset()
        model = build_model(config, backend).to(GPU, torch.bfloat16)
        init_weights(model, 0)
        batches = [
            (torch.randint(0, 512, (2, 1024), device=GPU), documents(2, 1024, n))
            for n in (3, 5, 9, 20)
        ]
        losses = [model(t, None, d, t).item() for t, d in batches]
        for layer in model.model.layers.values():
            layer.compile(fullgraph=True)
        compiled = []
        for t, d in batches:
            loss = model(t, None, d, t)
            loss.backward()
            compiled.append(loss.item())
        worst = max(abs(a / b - 1) for a, b in zip(losses, compiled, strict=True))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.utils.counters.clear()
        print(f"compiled {backend}: relative loss difference {worst:.1e}, graphs {graphs}")


def time_backends() -> None:
    for seq_len in (2048, 8192, 32768):
        batch, heads, kv_heads, dim = 32768 // seq_len, 32, 8, 128
        q = torch.randn(batch, seq_len, heads, dim, device=GPU, dtype=torch.bfloat16)
        k = torch.randn(batch, seq_len, kv_heads, dim, device=GPU, dtype=torch.bfloat16)
        inputs = [x.transpose(1, 2).requires_grad_() for x in (q, k, k.clone())]
        for docs in (None, documents(batch, seq_len, 8)):
            for backend in ("auto", "sdpa", "cudnn", "flash", "flex"):
                if not (backend == "sdpa" and docs is not None and seq_len > 8192):
                    time_backend(backend, inputs, docs)


def time_backend(backend: str, inputs: list[Tensor], docs: Tensor | None) -> None:
    batch, heads, seq_len, dim = inputs[0].shape

    def make() -> Mask:
        return build_mask(backend, batch, seq_len, GPU, torch.bfloat16, None, docs)

    try:
        mask = make()
    except ModelError:
        return
    core = Attention()

    def run() -> None:
        out = core(*inputs, mask)
        out.backward(out)

    took, making = seconds(run), seconds(make)
    flops = 3.5 * 4 * batch * heads * seq_len * seq_len * dim / 2
    print(
        f"S={seq_len} documents={docs is not None} {backend:5} {mask.form:6} {took * 1e3:7.2f} ms, "
        f"{flops / took / 1e12:5.0f} causal TFLOP/s, mask {making * 1e3:.2f} ms"
    )


def check_pieces() -> None:
    """The share of one context-parallel rank of four, as flash and as flex compute it."""
    batch, heads, kv_heads, seq_len, dim = 2, 8, 2, 1024, 64
    numbers = documents(batch, seq_len, 6)
    for rank in range(4):
        pieces = pieces_of_rank(seq_len, rank, 4)
        length = sum(stop - start for start, stop in pieces)
        shapes = (batch, heads, length, dim), (batch, kv_heads, seq_len, dim)
        exact = [torch.randn(s, device=GPU) for s in (*shapes, shapes[1])]
        out_grad = torch.randn(shapes[0], device=GPU)
        for window, docs in itertools.product((None, 100), (None, numbers)):
            results = []
            for backend, dtype in (("sdpa", torch.float32), ("flash", torch.bfloat16)):
                inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
                mask = build_mask(backend, batch, seq_len, GPU, dtype, window, docs, pieces)
                out = Attention()(*inputs, mask)
                out.backward(out_grad.to(dtype))
                results.append([out.detach().float(), *(x.grad.float() for x in inputs)])
            pairs = zip(*results, strict=True)
            worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
            verdict = "ok" if worst < 2e-2 else "WRONG"
            print(f"pieces of rank {rank} window={window} documents={docs is not None}: "
                  f"{mask.form} {verdict} {worst:.1e}")  # fmt: skip
    for seq_len in (8192, 65536):
        pieces = pieces_of_rank(seq_len, 1, 8)
        q = torch.randn(1, 32, seq_len // 8, 128, device=GPU, dtype=torch.bfloat16)
        k = torch.randn(1, 8, seq_len, 128, device=GPU, dtype=torch.bfloat16)
        inputs = [x.requires_grad_() for x in (q, k, k.clone())]
        for backend in ("flash", "flex"):
            mask = build_mask(backend, 1, seq_len, GPU, torch.bfloat16, pieces=pieces)

            def run(mask: Mask = mask, inputs: list[Tensor] = inputs) -> None:
                out = Attention()(*inputs, mask)
                out.backward(out)

            print(f"share of one rank of 8, S={seq_len} {backend}: {seconds(run) * 1e3:.2f} ms")


def check_loss_and_init() -> None:
    on_cpu, on_gpu = torch.empty(3000, 1000), torch.empty(3000, 1000, device=GPU)
    for tensor in (on_cpu, on_gpu):
        fill_random(tensor, 0, Normal(0.02, "w"), (0, 0), tensor.shape)
    print(f"init: {(on_gpu.cpu() != on_cpu).sum().item()} of {on_cpu.numel()} differ CPU/GPU")
    big = torch.empty(128256, 4096, device=GPU, dtype=torch.bfloat16)
    took = seconds(lambda: fill_random(big, 0, Normal(0.02, "w"), (0, 0), big.shape), 2)
    print(f"init: {big.numel() / took / 1e9:.1f} G elements/s")

    hidden = torch.randn(1, 8192, 4096, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = big.requires_grad_()
    labels = torch.randint(0, 128256, (1, 8192), device=GPU)

    def chunked() -> None:
        OutputMatrix(weight).weighted_sum(hidden, labels)[0].backward()

    def plain() -> None:
        logits = (hidden @ weight.t()).flatten(0, 1).float()
        torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum").backward()

    for name, run in (("chunked", chunked), ("plain", plain)):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        took = seconds(run, 3)
        peak = torch.cuda.max_memory_allocated() - before
        print(f"loss {name}: {took * 1e3:.1f} ms, {peak / 2**30:.1f} GiB above the inputs")
    torch.use_deterministic_algorithms(True)
    chunked()
    torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.__version__, torch.cuda.get_device_name())
    for check in (
        check_backends,
        check_pieces,
        check_compiled_layers,
        check_loss_and_init,
        time_backends,
    ):
        try:
            check()
        except Exception:
            traceback.print_exc()
