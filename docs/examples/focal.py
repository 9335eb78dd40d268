"""A loss per token: tokens that are already likely count less (focal loss, Lin et al. 2017)."""

from overland.objectives import register_objective


@register_objective("focal")
def make_focal(gamma: float = 2.0):
    from overland.objectives.objective import Objective

    class Focal(Objective):
        counts = "tokens"  # the loss is a mean over the tokens of the global batch

        def terms(self, losses_BS, fields):
            likely_BS = (-losses_BS).exp()
            return super().terms((1 - likely_BS) ** gamma * losses_BS, fields)

    return Focal()
