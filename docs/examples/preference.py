"""Preference pairs (Rafailov et al. 2023): of two consecutive rows, the first should become more
likely than the second, compared with a reference: here the same model without its adapters."""

from contextlib import contextmanager

from overland.objectives import register_objective


def make(beta: float = 0.1):
    from torch.nn import functional as F

    from overland.objectives.objective import Objective

    class Preference(Objective):
        rows_per_sample = 2  # a pair
        metrics = ("accuracy", "margin")
        passes = ("reference_Bk",)  # a first pass without gradient makes this field of the batch

        def loss(self, terms_Bk, fields):
            # terms: Σ -log p of each row's tokens, over the whole row wherever its tokens are.
            gained_B = fields["reference_Bk"][:, 0] - terms_Bk[:, 0]
            chosen, rejected = gained_B[0::2], gained_B[1::2]
            margin = beta * (chosen - rejected)
            accuracy = (margin > 0).to(margin.dtype)
            return -F.logsigmoid(margin), {"accuracy": accuracy, "margin": margin}

        @contextmanager
        def during(self, field, parts):
            """The reference is the model without its adapters."""
            modules = [module for part in parts for module in part.modules()]
            adapted = [module for module in modules if hasattr(module, "enabled")]
            for module in adapted:
                module.enabled = False
            try:
                yield
            finally:
                for module in adapted:
                    module.enabled = True

    return Preference()


register_objective("preference", make)
