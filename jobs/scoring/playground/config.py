"""The configuration of `jobs.playground`, that is, its command line, and what the page asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from jobs.scoring.config import check_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundConfig:
    """The model, its TempNet, and the port of the page."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM, such as an export of training (with `tempnet/` in it)."""
    tempnet: str = ""
    """Directory, URI or hub name of the TempNet. Default: the one beside the model."""
    port: int = 8765
    """Port on 127.0.0.1 at which the page is served; 0: any that is free."""
    max_new_tokens: int = 256
    """Maximum number of new tokens that the page may ask for."""
    dtype: Literal["float32", "bfloat16", "float16", "int8", "fp8"] = "float32"
    """Data type of the base model; int8, fp8: weights in eight bits, products in bfloat16, by torchao.
    A TempNet always computes in float32."""
    device: str = "auto"
    """PyTorch device: cpu, cuda, cuda:1, …; auto: a GPU if there is one, else the CPU."""
    device_map: Literal["auto"] | None = None
    """auto: spread the model over all GPUs of this machine, layer by layer, and over the CPU's memory if they are too
    small. None: the model is on `device`."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that is shipped with the model."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port = {self.port} must lie between 0 and 65535")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens} must be at least 1")
        check_precision("dtype", self.dtype)
        if self.device_map and self.device != "auto":
            raise ValueError(f"device_map = {self.device_map} chooses the devices: leave out device = {self.device}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one click on the page asks for; three texts are generated from it, which use the same random numbers."""

    prompt: str
    """The text to continue."""
    num_tokens: int
    """Number of new tokens."""
    tau_max: float
    """τ_max of the TempNet, for the text at predicted temperatures."""
    constant: float
    """Temperature of the text at a constant temperature."""
    min_p: float
    """For the text of min-p at τ = 1: only tokens whose probability is at least this share of the largest are drawn."""
    seed: int
    """Random seed."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens = {self.num_tokens} must be at least 1")
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
        """Read the settings from the query of a request.

        Raises:
            ValueError: if one is missing or not legal; the message names it, its value and what is legal.
        """
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
