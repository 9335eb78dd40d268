"""The work that trainers are compared on: Llama 3 shapes, random tokens, AdamW, one GPU."""

from __future__ import annotations

from dataclasses import dataclass

PEAK_FLOPS = 989e12  # dense bfloat16, H100 and H200, by the datasheet


@dataclass(frozen=True)
class Shape:
    name: str
    rows: int
    limit: int  # tokens/s if every part ran at the machine's own measured rate, see performance.md
    goal: int  # 0: there is none, nor a limit
    peer_recompute: str  # the least that fits for the peer; empty: there is no peer
    seq_len: int = 8192
    float8: str = "off"
    lora_rank: int = 0
    lora_base: str = "auto"
    # The peer knows no tied embeddings, so ours are untied too: the same matrices on both sides.
    overrides: tuple[tuple[str, object], ...] = (("tie_word_embeddings", False),)

    @property
    def flavor(self) -> str:
        return self.name.partition("-")[0]

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    def flops_per_token(self) -> float:
        from overland.config.schema import Lora, Model
        from overland.models.flops import flops_per_token
        from overland.models.registry import model_config

        model = Model(name="llama3", flavor=self.flavor, overrides=dict(self.overrides))
        lora = Lora(rank=self.lora_rank, targets="all-linear")
        return flops_per_token(model_config(model), self.seq_len, lora)


SHAPES = {
    "1B": Shape("1B", rows=2, limit=63_000, goal=60_000, peer_recompute="none"),
    "3B": Shape("3B", rows=2, limit=25_600, goal=24_500, peer_recompute="none"),
    "8B": Shape("8B", rows=1, limit=11_900, goal=11_300, peer_recompute="selective"),
    "1B-fp8": Shape("1B-fp8", 2, 0, 0, peer_recompute="none", float8="tensorwise"),
    "3B-fp8": Shape("3B-fp8", 2, 0, 0, peer_recompute="none", float8="tensorwise"),
    "8B-fp8": Shape("8B-fp8", 1, 15_900, 13_800, peer_recompute="selective", float8="tensorwise"),
    "8B-lora": Shape("8B-lora", 8, 20_200, 17_100, "none", 2048, lora_rank=16),
    "8B-lora-64": Shape("8B-lora-64", 8, 0, 0, "none", 2048, lora_rank=64),
    "8B-lora-long": Shape("8B-lora-long", 1, 0, 0, "none", 8192, lora_rank=16),
    "8B-lora-nf4": Shape("8B-lora-nf4", 8, 0, 0, "", 2048, lora_rank=16, lora_base="nf4"),
    "debug-lora": Shape("debug-lora", 2, 0, 0, "none", 512, lora_rank=16, overrides=()),
    "debug-lora-nf4": Shape("debug-lora-nf4", 2, 0, 0, "", 512, "off", 16, "nf4", ()),
    "debug": Shape("debug", 2, 0, 0, "none", seq_len=512, overrides=()),
    "debug-fp8": Shape("debug-fp8", 2, 0, 0, "none", 512, "tensorwise", overrides=()),
}
STEPS = 10  # that warm up, and as many that are timed
