"""Passes over panels as operators of torch, and the two ways to differentiate them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonloss.types import accumulation_dtype

# Kept when this module is reloaded, which registers its operators anew.
_libraries: dict[str, Any] = globals().get("_libraries", {})

HINT = (
    "compute the loss under tritonloss.use_backend('reference'), which is dense and differentiable in any way"
)


class Operator:
    """An operator `tritonloss::name`: what torch.compile sees of a function of tensors, numbers and strings.

    `torch.library.custom_op` would import torch._dynamo, and with it Triton, at the first call: seconds on every
    machine, and an error where Triton is installed but broken. The eager path needs neither.
    """

    def __init__(
        self, name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
    ) -> None:
        self.name, self.function = f"tritonloss::{name}", function
        if name in _libraries:
            _libraries.pop(name)._destroy()
        library_of: Any = torch.library.Library  # has no types
        self.library = _libraries[name] = library_of("tritonloss", "FRAGMENT")
        self.library.define(name + schema, tags=torch.Tag.needs_fixed_stride_order)
        self.library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, fake, lib=self.library)
        self.overload = getattr(torch.ops.tritonloss, name).default

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Declare the gradient."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context, lib=self.library)

    def __call__(self, *arguments: Any) -> Any:
        # Outside of torch.compile the dispatcher would only cost time.
        return self.overload(*arguments) if torch.compiler.is_compiling() else self.function(*arguments)


Inputs: TypeAlias = tuple[Tensor | None, ...]
Gradients: TypeAlias = tuple[Tensor | None, ...]
"""Of the inputs of a pass, in float32 or float64; None where none is needed."""


class Pass:
    """A walk over panels that gives results and, where asked, the gradients of its inputs.

    run(inputs, given, needs, *options) returns the `n_results` results and then a gradient for each input, in float32
    or float64, empty where `needs` is False. given: the upstream gradient of each result; without any, the walk does no
    gradient work. In eager mode it may be a function from the results to these gradients.

    A pass is differentiated in one of two ways. `once` serves a scalar whose derivative by the results is known before
    the walk ends: value and gradient come from one walk. A call gives results that autograd may use in any way, and
    walks once more in the backward pass.

    Under torch.compile it is an operator of two inputs, the second of which may be None; in eager mode of any number.
    """

    def __init__(
        self,
        name: str,
        options: str,
        run: Callable[..., tuple[Tensor, ...]],
        fake: Callable[..., Any],
        n_results: int,
    ) -> None:
        """options: their part of the schema. fake: from inputs, given and options to the results without data."""
        self.run, self.n_results = run, n_results
        outputs = ", ".join(["Tensor"] * (n_results + 2))

        def function(left: Tensor, right: Tensor | None, given: Any, *rest: Any) -> Any:
            return run((left, right), given, rest[:2], *rest[2:])

        def without_data(left: Tensor, right: Tensor | None, given: Any, *rest: Any) -> Any:
            return *fake((left, right), given, *rest[2:]), *map(_like, (left, right), rest[:2])

        inputs = "Tensor left, Tensor? right, Tensor[] given, bool left_needs, bool right_needs"
        schema = f"({inputs}, {options}) -> ({outputs})"
        self.operator = Operator(name, schema, function, without_data)
        self.operator.register_autograd(self._compiled_backward, self._compiled_context)

    def once(self, inputs: Inputs, given: Any, *options: Any) -> tuple[tuple[Tensor, ...], Gradients]:
        """The results, constant, and the gradients for `attach`. `given` is not read where no gradient is needed."""
        needs = tuple(map(needs_gradient, inputs))
        constants = tuple(map(_constant, inputs))
        results = self._walk(constants, given if any(needs) else (), needs, options)
        return results[: self.n_results], tuple(map(_if_needed, results[self.n_results :], needs))

    def __call__(self, inputs: Inputs, *options: Any) -> tuple[Tensor, ...]:
        """The results, differentiable once, in the inputs."""
        needs = [needs_gradient(tensor) for tensor in inputs]
        if torch.compiler.is_compiling() or not any(needs):
            return self._walk(inputs, (), (False,) * len(inputs), options)[: self.n_results]
        return cast(tuple[Tensor, ...], _Deferred.apply(self, options, *inputs))  # type: ignore[no-untyped-call]

    def _walk(self, inputs: Inputs, given: Any, needs: Sequence[bool], options: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            left, right = (*inputs, None)[:2]
            return cast(
                tuple[Tensor, ...], self.operator(left, right, list(given), *(*needs, False)[:2], *options)
            )
        return self.run(inputs, given, needs, *options)

    def gradients(
        self, inputs: Inputs, given: Sequence[Tensor], needs: Sequence[bool], options: Any
    ) -> Gradients:
        """The gradients for given ones of the results, in the dtypes of the inputs."""
        found = self._walk(inputs, given, needs, options)[self.n_results :]
        return tuple(
            grad.to(like.dtype) if need and like is not None else None
            for grad, like, need in zip(found, inputs, needs, strict=False)
        )

    def _compiled_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        left, right, _, _, _, *options = inputs
        tensors, ctx.rebuild = _take_tensors(options)
        ctx.save_for_backward(left, right, *tensors)
        ctx.mark_non_differentiable(*output[self.n_results :])

    def _compiled_backward(self, ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        left, right, *tensors = ctx.saved_tensors
        options = ctx.rebuild(tensors)
        given = [grad.contiguous() for grad in grads[: self.n_results]]
        # By the dispatcher: what traces a backward pass must see the operator, not what it does.
        found = self.operator.overload(left, right, given, *ctx.needs_input_grad[:2], *options)[
            self.n_results :
        ]
        cast_back = (
            grad.to(like.dtype) if need else None
            for grad, like, need in zip(found, (left, right), ctx.needs_input_grad[:2], strict=True)
        )
        return *cast_back, [], None, None, *map(_no_gradient, options)


class OutsideGraph(Pass):
    """A pass that no operator serves, because it calls an object: torch.compile leaves its graph."""

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], n_results: int) -> None:
        self.run, self.n_results = run, n_results

    def __call__(self, inputs: Inputs, *options: Any) -> tuple[Tensor, ...]:
        return super().__call__(inputs, *options)

    def once(self, inputs: Inputs, given: Any, *options: Any) -> tuple[tuple[Tensor, ...], Any]:
        return super().once(inputs, given, *options)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
    once._torchdynamo_disable = True  # type: ignore[attr-defined]


def kept_for(kept: Any) -> dict[str, Any]:
    """The option of a backward block function for what the forward function of the block returned, if anything."""
    return {} if kept is None else {"kept": kept}


def _like(tensor: Tensor | None, needed: bool) -> Tensor:
    """A gradient without data, for the fakes."""
    if tensor is None:
        return torch.empty(0, device="cpu")  # whatever the default device is
    dtype = accumulation_dtype(tensor.dtype)
    if not needed:
        return tensor.new_empty(0, dtype=dtype)
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _no_gradient(option: Any) -> Any:
    """What torch expects of a backward for a constant: lists of tensors, and empty ones, keep their structure."""
    is_list = isinstance(option, (list, tuple)) and all(isinstance(entry, Tensor) for entry in option)
    return [None] * len(option) if is_list else None


def _take_tensors(options: Sequence[Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Any]]]:
    """The tensors among the options and in lists among them, and what puts others in their places."""
    sizes = [len(option) if isinstance(option, (list, tuple)) else None for option in options]
    tensors: list[Tensor] = []
    for option in options:
        entries = option if isinstance(option, (list, tuple)) else [option]
        tensors += [entry for entry in entries if isinstance(entry, Tensor)]
    others = [None if isinstance(option, Tensor) else option for option in options]
    are_tensors = [
        isinstance(option, Tensor)
        or (isinstance(option, (list, tuple)) and bool(option) and isinstance(option[0], Tensor))
        for option in options
    ]

    def rebuild(given: Sequence[Tensor]) -> list[Any]:
        left = iter(given)
        result: list[Any] = []
        for other, size, is_tensor in zip(others, sizes, are_tensors, strict=True):
            if not is_tensor:
                result.append(other)
            else:
                result.append(next(left) if size is None else [next(left) for _ in range(size)])
        return result

    return tensors, rebuild


def _constant(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _if_needed(gradient: Tensor, need: bool) -> Tensor | None:
    return gradient if need else None


def needs_gradient(tensor: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient. Raises where the answer would be a silent 0."""
    if tensor is None:
        return False
    if not torch.compiler.is_compiling():
        _refuse_transforms(tensor)
    return tensor.requires_grad and torch.is_grad_enabled()


def _refuse_transforms(tensor: Tensor) -> None:
    """torch.func and forward mode take a walk for a constant."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"tritonloss: the streamed backends have no forward mode, nor other transforms of torch.func; {HINT}"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise RuntimeError(f"tritonloss: the streamed backends have no forward mode derivative; {HINT}")


class _Deferred(torch.autograd.Function):
    """A pass now, and once more for the gradients."""

    @staticmethod
    def forward(ctx: Any, streamed: Pass, options: Any, *inputs: Tensor | None) -> Any:
        ctx.streamed, ctx.options = streamed, options
        ctx.save_for_backward(*inputs)
        return streamed.run(inputs, (), (False,) * len(inputs), *options)[: streamed.n_results]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors  # once: checkpointing unpacks it anew at every access
        streamed, options, needs = ctx.streamed, ctx.options, ctx.needs_input_grad[2:]

        def compute(*arguments: Any) -> Gradients:
            given = [grad.contiguous() for grad in arguments[len(inputs) :]]
            with torch.autocast(
                given[0].device.type, enabled=False
            ):  # that of the user, in the backward pass
                return cast(Gradients, streamed.gradients(arguments[: len(inputs)], given, needs, options))

        return None, None, *_Last.apply(compute, *inputs, *grads)  # type: ignore[no-untyped-call]


class _Last(torch.autograd.Function):
    """The gradients that `compute` gives of its arguments; they have no derivative, and say so."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *arguments: Any) -> Any:
        return compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        refuse_second_derivative(ctx, *grads)


def attach(total: Tensor, inputs: Inputs, gradients: Gradients) -> Tensor:
    """`total`, a scalar, with these derivatives by the inputs, float32 or float64."""
    if all(gradient is None for gradient in gradients):
        return total
    if torch.compiler.is_compiling():
        (left, right), found = (*inputs, None)[:2], (*gradients, None)[:2]
        return cast(Tensor, _attach(total, left, right, *found))
    return cast(Tensor, _Attach.apply([total], gradients, *inputs))  # type: ignore[no-untyped-call]


def _scaled(grad: Tensor, gradients: Gradients, inputs: Inputs) -> Gradients:
    """grad times the gradients, cast last: their product with a loss scale may fit float16 where they do not."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(
        None if gradient is None or like is None else (gradient * grad).to(like.dtype)
        for gradient, like in pairs
    )


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: list[Tensor], gradients: Gradients, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*gradients)
        # Not saved: their values are not used, and may change.
        ctx.inputs = inputs
        return total[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, *_scaled(grad, gradients, ctx.inputs)

        def compute(grad: Tensor, *inputs: Tensor | None) -> Gradients:
            return _scaled(grad, gradients, inputs)

        # The inputs, so that a second derivative by them is asked for, and refused.
        return None, None, *_Last.apply(compute, grad, *ctx.inputs)  # type: ignore[no-untyped-call]


def _attach_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, queries, keys, *gradients = inputs
    ctx.save_for_backward(*gradients)
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (queries, keys)]


def _attach_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    found = (None if gradient is None else (gradient * grad).to(dtype) for gradient, dtype in pairs)
    return None, *found, None, None


_attach = Operator(
    "attach",
    "(Tensor total, Tensor queries, Tensor? keys, Tensor? grad_queries, Tensor? grad_keys) -> Tensor",
    lambda total, queries, keys, grad_queries, grad_keys: total.clone(),
    lambda total, queries, keys, grad_queries, grad_keys: torch.empty_like(total),
)
_attach.register_autograd(_attach_backward, _attach_context)


def refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    """The autograd formula of what has no derivative."""
    raise RuntimeError(
        "tritonloss: the streamed backends have no second derivative (create_graph=True was differentiated again); "
        f"{HINT}"
    )
