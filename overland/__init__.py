"""Trains and fine-tunes large models on any machine; runs stop at any point and resume exactly.

The same features as the command, from Python (docs/library.md):

    import overland

    config = overland.load_config("quickstart", "training.steps=20")
    result = overland.train(config)
    model = overland.load_model(result.folder)
    print(overland.generate(model, "def ")[0].text)

The names in `__all__` are public. Each is imported when it is first used, so that `import overland`
takes only milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from overland.apps.convert.convert import Conversion, convert
    from overland.apps.convert.formats import Format, LazyCheckpoint, register_format
    from overland.apps.convert.formats import open_any as open_checkpoint
    from overland.apps.convert.save import save_model
    from overland.apps.data.loader import build_train_loader
    from overland.apps.dataset import TrainingSet, open_dataset
    from overland.apps.evaluation.generate import Completion
    from overland.apps.evaluation.main import evaluate, generate
    from overland.apps.evaluation.main import open_model as load_model
    from overland.apps.evaluation.model import OpenModel
    from overland.config.errors import ConfigError
    from overland.config.schema import JobConfig
    from overland.data.registry import register_source
    from overland.errors import OverlandError
    from overland.models.registry import model_names, register_model
    from overland.models.sparse import register_mask
    from overland.models.transform import register_transform
    from overland.objectives.registry import register_objective
    from overland.optimizers.registry import register_optimizer
    from overland.parallel.plans import register_plan
    from overland.training.callbacks import Callback, register_callback
    from overland.training.main import Trained, load_config, train

__all__ = [
    "Callback",
    "Completion",
    "ConfigError",
    "Conversion",
    "Format",
    "JobConfig",
    "LazyCheckpoint",
    "OpenModel",
    "OverlandError",
    "Trained",
    "TrainingSet",
    "__version__",
    "build_train_loader",
    "convert",
    "evaluate",
    "generate",
    "load_config",
    "load_model",
    "model_names",
    "open_checkpoint",
    "open_dataset",
    "register_callback",
    "register_format",
    "register_mask",
    "register_model",
    "register_objective",
    "register_optimizer",
    "register_plan",
    "register_source",
    "register_transform",
    "save_model",
    "train",
]

# The module of each name, and its name there if it differs.
_PLACES = {
    "Callback": "overland.training.callbacks",
    "Completion": "overland.apps.evaluation.generate",
    "ConfigError": "overland.config.errors",
    "Conversion": "overland.apps.convert.convert",
    "Format": "overland.apps.convert.formats",
    "JobConfig": "overland.config.schema",
    "LazyCheckpoint": "overland.apps.convert.formats",
    "OpenModel": "overland.apps.evaluation.model",
    "OverlandError": "overland.errors",
    "Trained": "overland.training.main",
    "TrainingSet": "overland.apps.dataset",
    "build_train_loader": "overland.apps.data.loader",
    "convert": "overland.apps.convert.convert",
    "evaluate": "overland.apps.evaluation.main",
    "generate": "overland.apps.evaluation.main",
    "load_config": "overland.training.main",
    "load_model": "overland.apps.evaluation.main:open_model",
    "model_names": "overland.models.registry",
    "open_checkpoint": "overland.apps.convert.formats:open_any",
    "open_dataset": "overland.apps.dataset",
    "register_callback": "overland.training.callbacks",
    "register_format": "overland.apps.convert.formats",
    "register_mask": "overland.models.sparse",
    "register_model": "overland.models.registry",
    "register_objective": "overland.objectives.registry",
    "register_optimizer": "overland.optimizers.registry",
    "register_plan": "overland.parallel.plans",
    "register_source": "overland.data.registry",
    "register_transform": "overland.models.transform",
    "save_model": "overland.apps.convert.save",
    "train": "overland.training.main",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'overland' has no attribute {name!r}")
    module, _, there = _PLACES[name].partition(":")
    found = getattr(import_module(module), there or name)
    if isinstance(found, FunctionType):
        from overland.apps.arguments import naming_arguments

        found = naming_arguments(found, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
