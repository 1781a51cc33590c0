"""The configuration of `jobs.playground`, that is, its command line, and what the page asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from jobs.scoring.config import check_least
from jobs.scoring.generation.config import LocalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundConfig(LocalModel):
    """The model, its TempNet, and the port of the page."""

    port: int = 8765
    """Port on 127.0.0.1 at which the page is served; 0: any that is free."""
    max_new_tokens: int = 256
    """Maximum number of new tokens that the page may ask for."""

    def __post_init__(self) -> None:
        LocalModel.__post_init__(self)
        if not 0 <= self.port < 65536:
            raise ValueError(f"port = {self.port} must lie between 0 and 65535")
        check_least(self, max_new_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one click on the page asks for; three texts are generated from it, which use the same random numbers."""

    prompt: str
    num_tokens: int
    """Number of new tokens."""
    tau_max: float
    """τ_max of the TempNet, for the text at predicted temperatures."""
    constant: float
    """Temperature of the text at a constant temperature."""
    min_p: float
    """For the text of min-p at τ = 1: only tokens whose probability is at least this share of the largest are drawn."""
    seed: int

    def __post_init__(self) -> None:
        check_least(self, num_tokens=1)
        for name in ("tau_max", "constant"):
            value = getattr(self, name)
            if not (0.0 < value <= 100.0 and math.isfinite(value)):
                raise ValueError(f"{name} = {value:g} must lie in (0, 100]")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p = {self.min_p:g} must lie in [0, 1)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed} must lie in [0, 2⁶³)")

    @classmethod
    def parse(cls, values: Mapping[str, str], *, max_new_tokens: int) -> Settings:
        """Read the settings from the query of a request; ValueError names one that is missing or not legal."""
        kinds = {"int": int, "float": float, "str": str}
        parsed = {}
        for field in fields(cls):
            if field.name not in values:
                raise ValueError(f"{field.name} is missing")
            try:
                parsed[field.name] = kinds[str(field.type)](values[field.name])
            except ValueError:
                raise ValueError(f"{field.name} = {values[field.name]!r} is no number") from None
        settings = cls(**parsed)
        if settings.num_tokens > max_new_tokens:
            raise ValueError(
                f"num_tokens = {settings.num_tokens} is more than the {max_new_tokens} that the server allows"
            )
        return settings
