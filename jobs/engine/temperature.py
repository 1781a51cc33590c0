"""The configuration that every task with TempNets has: their sizes, and the adjustment of ρ during training."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.engine.checks import check_positive
from tempnet.network_config import TempNetOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TempNetSection(TempNetOptions):
    """Sizes and ablation switches of a TempNet, and the adjustment of ρ; each kind of task adds the loss that trains it."""

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
