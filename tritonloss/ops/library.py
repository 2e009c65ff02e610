"""Registration of the primitives as operators of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


class Operator:
    """An operator `tritonloss::name`, to be called and completed like the result of `torch.library.custom_op`.

    `custom_op` itself imports torch._dynamo, and with it Triton, at the first call: seconds on every machine, and an
    error where Triton is installed but broken. The eager path needs neither.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = f"tritonloss::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(self.name, schema, tags=torch.Tag.needs_fixed_stride_order)
        torch.library.impl(self.name, "default", function)
        self.overload = getattr(torch.ops.tritonloss, name).default

    def __call__(self, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_tangents(arguments)
        return self.overload(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Declare shapes and strides of the outputs, for torch.compile."""
        torch.library.register_fake(self.name, function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Declare the gradient."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator: register a function of tensors, numbers and strings, which returns new tensors, as an operator."""
    return lambda function: Operator(name, function)


def _refuse_tangents(arguments: tuple[Any, ...]) -> None:
    """Forward mode, `torch.func.jvp` included, takes an operator of torch.library for a constant: it would give 0."""
    tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "tritonloss: the streamed backends have no forward mode derivative; compute the loss under "
            "tritonloss.use_backend('reference'), which is dense and has one"
        )


def refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    """The autograd formula of every backward operator."""
    raise RuntimeError(
        "tritonloss: the streamed backends have no second derivative (create_graph=True was differentiated again); "
        "compute the loss under tritonloss.use_backend('reference'), which is dense and twice differentiable"
    )
