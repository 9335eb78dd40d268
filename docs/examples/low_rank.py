"""Low-rank adapters (Hu et al. 2021): the model's own weights are frozen, and two small matrices
are trained next to each one of a block. The config: [model.transforms.low_rank] rank = 4."""

from functools import cache

from overland.models.transform import Transform, register_transform


class LowRank(Transform):
    only_new = True  # train what is added, freeze the rest

    def __init__(self, rank: int = 8, scale: float = 1.0):
        self.rank, self.scale = rank, scale

    def apply(self, model):
        from torch import nn

        from overland.models.structure import Role, walk_roles

        for name, role in list(walk_roles(model)):
            if role in (Role.COLUMN, Role.ROW):
                linear = model.get_submodule(name)
                linear.__class__ = adapted_class()  # its weight and its name stay
                linear.down = nn.Linear(linear.in_features, self.rank, bias=False)
                linear.up = nn.Linear(self.rank, linear.out_features, bias=False)
                linear.scale, linear.enabled = self.scale, True

    def init_rule(self, name):
        from overland.models.init import Constant, Normal

        if name.endswith(".down.weight"):
            return Normal(0.02, name)
        return Constant(0.0) if name.endswith(".up.weight") else None


@cache
def adapted_class():
    from torch import nn

    from overland.models.structure import Role

    class Adapted(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out + self.up(self.down(x)) * self.scale if self.enabled else out

        def roles(self, role):
            """What the small matrices do, by what the large one does: where its output can be
            split, so can that of `up`; where its input can be, so can that of `down`."""
            if role is Role.COLUMN:
                return {"down": Role.REPLICATED, "up": Role.COLUMN}
            return {"down": Role.ROW, "up": Role.REPLICATED}

    return Adapted


register_transform("low_rank", LowRank)
