"""The losses as stateless functions, in the manner of `torch.nn.functional`."""

from tritonloss.losses.pnp import pnp_loss

__all__ = ["pnp_loss"]
