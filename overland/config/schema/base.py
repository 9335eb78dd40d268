"""The base class of the sections, and types with bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[int, Field(gt=0, le=31_536_000)]  # a year; torch counts nanoseconds
Seed = Annotated[int, Field(ge=0, lt=2**63)]
BatchSize = Annotated[int, Field(ge=-1)]
Degree = Annotated[int, Field(gt=0)]
HOLDS_A_PATH = "path"
PathText = Annotated[str, HOLDS_A_PATH]  # may hold variables and ~: see paths.py


class Section(BaseModel):
    """A TOML section: unknown keys are errors, and types are never coerced."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_by_name=True,
    )
