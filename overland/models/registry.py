"""The registry of models: adds your own, finds the config that `[model]` describes (a flavor or
config.json, with overrides), and calls its builder. To add your own:

    # my_models.py, named in [job] custom_import
    from dataclasses import dataclass
    from overland.models import register_model

    @dataclass(frozen=True)
    class TinyConfig:
        vocab_size: int = 256
        width: int = 64

    def build(config, attention):       # runs only when the model is needed: import torch here
        from my_network import Tiny
        return Tiny(config)

    register_model("tiny", flavors={"base": TinyConfig()}, config_class=TinyConfig, build=build)

A config class is a dataclass. Optional methods make it more capable: `from_hf(path)` (for
`config_path`), `override(dict)`, `to_hf()` and `parameter_shapes()` (to read and write Hugging Face
folders). The module is called like `Decoder`: `module(tokens_BS, positions_BS=, documents_BS=,
labels_BS=)` returns logits, or with labels the summed loss; `module.init_rule(name)` returns how
each parameter starts (see `init.py`), and `init_buffers()` of a module fills its buffers (see
there). Nothing here imports torch before `build_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.config.schema import Model
from overland.errors import ModelError
from overland.models.config import DecoderConfig
from overland.models.flavors import FLAVORS
from overland.models.hf_config import contents_of
from overland.models.vit_mae_config import FLAVORS as VIT_MAE_FLAVORS
from overland.models.vit_mae_config import ViTMAEConfig
from overland.words import did_you_mean

if TYPE_CHECKING:
    from torch import nn

BUILT_IN = (DecoderConfig, ViTMAEConfig)

Build = Callable[[Any, str], "nn.Module"]


@dataclass(frozen=True)
class ModelEntry:
    name: str
    flavors: Mapping[str, Any]
    config_class: type
    build: Build


def register_model(
    name: str,
    *,
    flavors: Mapping[str, Any],
    config_class: type = DecoderConfig,
    build: Build | None = None,
) -> None:
    """Registers a model. `build(config, attention)` returns the module; it can be omitted for new
    flavors of a config class that is already registered, such as DecoderConfig."""
    if name in _MODELS:
        raise ModelError(f"a model named '{name}' is already registered")
    if not is_dataclass(config_class):
        raise ModelError(f"config_class {config_class.__name__} of '{name}' must be a dataclass")
    for flavor, config in flavors.items():
        if type(config) is not config_class:
            raise ModelError(
                f"flavor '{flavor}' of '{name}' is a {type(config).__name__}, expected "
                f"{config_class.__name__}"
            )
    known = _build_of(config_class)
    build = build or known
    if build is None:
        raise ModelError(f"'{name}' needs a build function for {config_class.__name__}")
    if known not in (None, build):
        # build_model finds the builder by the config's class, so a class has exactly one.
        raise ModelError(
            f"{config_class.__name__} already has a build function; give '{name}' a subclass of it"
        )
    _MODELS[name] = ModelEntry(name, dict(flavors), config_class, build)


def model_names() -> list[str]:
    """Returns the names of all registered models: the values of `model.name`."""
    return sorted(_MODELS)


def flavor_names(name: str) -> list[str]:
    return list(_entry(name).flavors)


def resolve_config(
    name: str,
    flavor: str | None = None,
    config_path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the model's config: a named flavor, or a config.json (file or its folder), then
    overrides.

    The name 'hf' stands for any supported model_type in the config.json.
    """
    entry = _entry(name)
    if config_path is not None:
        if flavor is not None:
            raise ModelError(
                f"model '{name}' got both flavor '{flavor}' and config file '{config_path}'; "
                "give one of them"
            )
        config = _config_from_file(entry, config_path)
    else:
        config = _config_of_flavor(entry, flavor)
    return _with_overrides(config, overrides) if overrides else config


def model_config(section: Model) -> Any:
    """Returns the config that `[model]` describes. If it names a config.json, its model_type
    determines the family."""
    if section.config is None:
        return resolve_config(section.name, section.flavor, None, section.overrides)
    unnamed = section.name == Model.model_fields["name"].default
    path = Path(section.config).expanduser()
    return resolve_config("hf" if unnamed else section.name, None, path, section.overrides)


def lacks_hf_form(config: Any) -> bool:
    """Returns whether no config.json describes the model: a user's own class without `to_hf()`, or
    with an inherited one, which describes a model that computes something else."""
    inherited = (None, *(kind.to_hf for kind in BUILT_IN))
    return own_model_name(config) is not None and getattr(type(config), "to_hf", None) in inherited


def own_model_name(config: Any) -> str | None:
    """Returns the name of a user's own config class; None for Overland's models."""
    return None if type(config) in BUILT_IN else type(config).__name__


def has_builder(config: Any) -> bool:
    """Whether a model is registered for a config."""
    return _build_of(type(config)) is not None


def read_hf_config(source: Mapping[str, Any] | str | Path) -> Any:
    """Returns the config that a config.json describes, by its model_type."""
    is_vit_mae = contents_of(source)[0].get("model_type") == "vit_mae"
    return ViTMAEConfig.from_hf(source) if is_vit_mae else DecoderConfig.from_hf(source)


def build_model(config: Any, attention: str = "auto") -> nn.Module:
    """Builds the module on the default device; use `with torch.device("meta")` for a large one."""
    build = _build_of(type(config))
    if build is None:
        raise ModelError(f"no model is registered for a {type(config).__name__}")
    model = build(config, attention)
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the build function of {type(config).__name__} returned {model!r:.60}, expected a "
            "torch.nn.Module (docs/extending.md)"
        )
    return model


def _build_decoder(config: DecoderConfig, attention: str) -> nn.Module:
    from overland.models.decoder import Decoder

    return Decoder(config, attention)


def _build_vit_mae(config: ViTMAEConfig, attention: str) -> nn.Module:
    from overland.models.vit_mae import ViTMAE

    return ViTMAE(config)


_MODELS: dict[str, ModelEntry] = {}


def _build_of(config_class: type) -> Build | None:
    if config_class is DecoderConfig:
        return _build_decoder
    return next((e.build for e in _MODELS.values() if e.config_class is config_class), None)


def _entry(name: str) -> ModelEntry:
    if name not in _MODELS:
        raise ModelError(f"there is no model '{name}'{did_you_mean(name, _MODELS)}")
    return _MODELS[name]


def _config_of_flavor(entry: ModelEntry, flavor: str | None) -> Any:
    if flavor is None:
        if len(entry.flavors) == 1:
            return next(iter(entry.flavors.values()))
        choices = ", ".join(entry.flavors) or "it has none, so give the path of a config.json"
        raise ModelError(f"model '{entry.name}' needs a flavor: {choices}")
    if flavor not in entry.flavors:
        raise ModelError(
            f"model '{entry.name}' has no flavor '{flavor}'{did_you_mean(flavor, entry.flavors)}"
        )
    return entry.flavors[flavor]


def _config_from_file(entry: ModelEntry, path: str | Path) -> Any:
    reader = getattr(entry.config_class, "from_hf", None)
    if entry.name == "hf":
        reader = read_hf_config
    if reader is None:
        raise ModelError(f"model '{entry.name}' cannot be read from a config.json ({path})")
    config = reader(path)
    kinds = {getattr(flavor, "model_type", None) for flavor in entry.flavors.values()}
    found = getattr(config, "model_type", None)
    if kinds and found not in kinds:
        raise ModelError(
            f"model '{entry.name}' was asked for, but {path} has model_type '{found}'; "
            "use name = 'hf' to accept any supported model_type"
        )
    return config


def _with_overrides(config: Any, overrides: Mapping[str, Any]) -> Any:
    if hasattr(config, "override"):
        return config.override(overrides)
    valid = {item.name for item in fields(config)}
    for name in overrides:
        if name not in valid:
            raise ModelError(
                f"'{name}' is not a field of {type(config).__name__}{did_you_mean(name, valid)}"
            )
    return replace(config, **overrides)


for _name, _flavors in FLAVORS.items():
    register_model(_name, flavors=_flavors)
register_model("hf", flavors={})
register_model("vit_mae", flavors=VIT_MAE_FLAVORS, config_class=ViTMAEConfig, build=_build_vit_mae)
