"""Elementwise rules at work: every shard of this rank, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from overland.optimizers.rule import Elementwise
from overland.optimizers.shard import Shard, Step, pair, unchanged


def update_in_pieces(rule: Elementwise, shards: Sequence[Shard], step: Step) -> None:
    for shard in shards:
        rates = shard.rates(step)
        for piece in shard.pieces():
            given, kept = piece.wide_parameter(), piece.wide_state()
            with unchanged(rule, "update", given, *kept.values()):
                result = rule.update(given, piece.wide_gradient(step), kept, rates)
            parameter, state = pair(rule, "update", result)
            piece.write_parameter(parameter, step)
            piece.write_state(state, step)
        shard.write_scalars(state, step)
