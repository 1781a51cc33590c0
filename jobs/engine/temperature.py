"""The configuration that every task with TempNets has: their sizes, and the adjustment of ρ during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.engine.config import check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class TempNetSection:
    """Sizes and ablation switches of a TempNet, and the adjustment of ρ; each kind of task adds the loss that trains it.

    Fields that `tempnet.network_config.TempNetConfig` has too are passed on to it.
    """

    hidden_size: int = 256
    """d1, the width of the TempNet's transform layer."""
    num_prototypes: int = 256
    """d2, the width of the TempNet's projection layer."""
    phi_init: float = 1.0
    """Initial value of φ, the temperature inside the TempNet's pooling layer."""
    input_shift: Literal["none", "mean", "max"] = "none"
    """What is subtracted from the logits before the TempNet reads them: nothing, the mean of the row, or its maximum. A
    TempNet that reads embeddings accepts only none."""
    normalize_input: bool = True
    """Whether the TempNet divides its input by the L2 norm (ablation: Table 20)."""
    transform: bool = True
    """Whether the TempNet has the transform layer (ablation: Table 20)."""
    projection: bool = True
    """Whether the TempNet has the projection layer (ablation: Table 20)."""
    pooling: Literal["parametric", "linear"] = "parametric"
    """Pooling of the TempNet: parametrised, as in the paper, or one linear layer instead (ablation: Table 20)."""
    depth: Literal[3, 4] = 3
    """Depth of the TempNet; 4 adds a second transform layer (ablation: Tables 21 and 22)."""
    stop_gradient: bool = True
    """Whether the TempNet's input is detached, so that no gradient reaches the base model through it (ablation: Table 18)."""
    target_tau: float | None = None
    """Mean temperature that training should reach and keep by adjusting ρ, which starts at `rho`. Must lie between τ₀
    and τ_max. Meant for joint training of base model and TempNet. ρ is constant while the TempNet rests
    (rest_share_tempnet). None: ρ is always constant."""
    rho_gain: float = 5.0
    """Gain κ of the adjustment, in nats: how far ρ moves if the mean temperature is off by a factor of e. Must be
    positive; used only with target_tau."""

    def check_steering(self, *, has_learned_rho: bool, tau_min: float, tau_max: float) -> None:
        """Check that `target_tau` and `rho_gain` are possible for the loss.

        Args:
            has_learned_rho: whether the loss is a robust loss with a TempNet.

        Raises:
            ValueError: if they are not; the message names the field, the value and the legal values.
        """
        check_positive("temperature", self, "rho_gain")
        if self.target_tau is None:
            return
        if not has_learned_rho:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} steers the ρ of a robust loss with TempNets: choose "
                "temperature.loss dro (language models) or tempnet (contrastive), or None"
            )
        if not tau_min < self.target_tau < tau_max:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} must lie between τ₀ = {tau_min:g} and τ_max = {tau_max:g}"
            )
