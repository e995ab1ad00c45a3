"""Watch code at work: every tensor operation, in which part it ran, and what fed what.

In: a module or function and a real batch. Out: a `Trace`, which is all that a picture is drawn
from. Nothing is known beforehand about what runs: operations are caught where Python calls torch,
and the part they belong to is read off the call stack.

    Value   one tensor: its shape, and the operation that made it
    Op      one operation: its operands and results
    Scope   one call of a module or function, inside the call that it was made from
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map


@dataclass(eq=False)
class Value:
    """One tensor. Without a maker it came from outside: an argument, a weight, a buffer."""

    shape: tuple[int, ...]
    maker: "Op | None" = None
    name: str = ""
    is_input: bool = False
    is_weight: bool = False


@dataclass(eq=False)
class Scope:
    """One call of a module or a function."""

    name: str  # the attribute that held it: self_attention, layers.0
    kind: str  # its class, or the function's own name
    doc: str  # the first line of its docstring
    parent: "Scope | None"
    module: nn.Module | None = None
    arguments: list[tuple[str, Value]] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    frame: FrameType | None = None

    def chain(self) -> "list[Scope]":
        """Return the calls that this one is inside of, outermost first, and itself."""
        return [*(self.parent.chain() if self.parent else []), self]


@dataclass(eq=False)
class Op:
    """One operation on tensors."""

    function: str
    scope: Scope
    operands: list[Value]
    names: list[str]  # what the calling code calls the operands; "" where it has no name for one
    constants: list[float]
    is_view: bool  # its result is the operand's own memory, read in another order
    results: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """Everything that one call did."""

    root: Scope
    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]


def trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """Run function (a module, in evaluation mode, or a function) on a batch; return what it did."""
    watcher = _Watcher(function)
    with ExitStack() as stack:
        if isinstance(function, nn.Module):
            for module in function.modules():
                if _does_nothing(module) and module is not function:
                    continue  # what comes out is the tensor that went in: there is nothing to see
                before = module.register_forward_pre_hook(watcher.enter, with_kwargs=True)
                stack.callback(before.remove)
                after = module.register_forward_hook(watcher.leave)
                stack.callback(after.remove)
        else:
            watcher.bind(function, args, kwargs)
        stack.enter_context(torch.no_grad())
        stack.enter_context(watcher)
        outputs = watcher.run(function, args, kwargs)
    return Trace(watcher.root, watcher.inputs, watcher.ops, outputs)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors anywhere in tuples, lists and dicts."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _named_tensors(name: str, thing: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one argument: itself, or those that an object such as a cache holds."""
    if isinstance(thing, Tensor):
        yield name, thing
    elif isinstance(thing, list | tuple):
        for i, part in enumerate(thing):
            yield from _named_tensors(f"{name}.{i}", part)
    elif hasattr(thing, "__dict__") and not callable(thing):
        for attribute, part in vars(thing).items():
            if isinstance(part, Tensor):
                yield f"{name}.{attribute}", part


def _first_line(doc: str | None) -> str:
    return inspect.cleandoc(doc).splitlines()[0] if doc else ""


class _Watcher(TorchFunctionMode):
    """Records while it is entered; its hooks tell it when modules are called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.inputs: list[Value] = []
        self.calls: list[Scope] = []  # the module calls that are under way, outermost first
        self.functions: dict[FrameType, Scope] = {}
        self.values: dict[int, Value] = {}
        self.alive: list[Any] = []  # an id is only an identity as long as its object lives
        self.names: dict[nn.Module, str] = {}
        self.root: Scope
        if isinstance(function, nn.Module):
            for path, module in function.named_modules():
                self.names[module] = _attribute(path)
            stored = [*function.named_parameters(), *function.named_buffers()]
            for path, tensor in stored:
                is_weight = isinstance(tensor, nn.Parameter)
                name = path.rpartition(".")[2]
                self._keep(tensor, Value(tuple(tensor.shape), name=name, is_weight=is_weight))

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> list[Value]:
        """Call function, and return what came back; the stack above this frame is of no concern."""
        out = function(*args, **kwargs)
        outputs = [self.value(tensor) for tensor in tensors_in(out)]
        if self.root.frame is not None:
            # The frame outlives the call, so its variables still tell what was returned.
            for name, thing in self.root.frame.f_locals.items():
                for value, tensor in zip(outputs, tensors_in(out), strict=True):
                    if thing is tensor:
                        value.name = name
        return outputs

    def bind(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Make the root scope of a plain function, whose arguments are the inputs."""
        name = getattr(function, "__name__", "")
        self.root = Scope("", name, _first_line(function.__doc__), None)
        bound = inspect.signature(function).bind(*args, **kwargs)
        self._take_arguments(self.root, bound.arguments, are_inputs=True)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Open the scope of a module that is about to be called."""
        parent = self._here()
        kind = type(module)
        # What torch says of its own modules may change with its version; pictures must not.
        doc = "" if kind.__module__.startswith("torch.") else _first_line(kind.__doc__)
        scope = Scope(self.names[module], kind.__name__, doc, parent, module)
        if parent is None:
            self.root = scope
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        self._take_arguments(scope, bound.arguments, are_inputs=parent is None)
        self.calls.append(scope)

    def leave(self, module: nn.Module, args: Any, out: Any) -> Any:
        """Close the scope; what only passed through leaves as a value of the module's own."""
        scope = self.calls.pop()
        assert scope.module is module
        given = {id(tensor): self.value(tensor) for tensor in tensors_in(args)}

        def own(thing: Any) -> Any:
            if not isinstance(thing, Tensor) or id(thing) not in given:
                return thing
            op = Op("identity", scope, [given[id(thing)]], [""], [], is_view=False)
            with torch._C.DisableTorchFunction():
                return self._result(op, thing.view_as(thing))

        out = tree_map(own, out)
        scope.results = [self.value(tensor) for tensor in tensors_in(out)]
        return out

    def _take_arguments(self, scope: Scope, arguments: dict[str, Any], are_inputs: bool) -> None:
        for argument, thing in arguments.items():
            for name, tensor in _named_tensors(argument, thing):
                known = id(tensor) in self.values
                value = self.value(tensor)
                scope.arguments.append((name, value))
                if are_inputs and not known:
                    value.name, value.is_input = name, True
                    self.inputs.append(value)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let torch compute, and write down what it did."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        out = func(*args, **kwargs)
        name = _function_name(func)
        made = tensors_in(out) if name != "__setitem__" else [args[0]]
        scope = self._here() if made else None
        if scope is None:
            return out
        local = self._frames()[-1].f_locals
        if _does_nothing(local.get("self")):
            return out
        known = {id(v): n for n, v in local.items() if isinstance(v, Tensor)}
        operands = [self.value(tensor) for tensor in given]
        names = [
            known.get(id(t), "" if v.is_input else v.name)
            for t, v in zip(given, operands, strict=True)
        ]
        leaves = tree_flatten((args, kwargs))[0]
        numbers = [n for n in leaves if isinstance(n, int | float) and not isinstance(n, bool)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in given}
        same_memory = all(t.untyped_storage().data_ptr() in storages for t in made)
        passes = any(tensor is t for tensor in made for t in given)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        is_view = same_memory and not in_place and (name != "dropout")
        op = Op(name, scope, operands, names, [float(n) for n in numbers], is_view)
        if passes and not in_place:
            # In evaluation mode dropout hands its input on. What went in and what came out are two
            # values to a reader, so they must be two tensors to us.
            return tree_map(lambda t: self._result(op, t.view_as(t)), out)
        for tensor in made:
            self._result(op, tensor)
        return out

    def _result(self, op: Op, tensor: Tensor) -> Tensor:
        value = Value(tuple(tensor.shape), op)
        op.results.append(value)
        if not self.ops or self.ops[-1] is not op:
            self.ops.append(op)
        self._keep(tensor, value)
        return tensor

    def _keep(self, tensor: Tensor, value: Value) -> None:
        self.values[id(tensor)] = value
        self.alive.append(tensor)

    def value(self, tensor: Tensor) -> Value:
        """Return the value that tensor holds now."""
        if id(tensor) not in self.values:
            self._keep(tensor, Value(tuple(tensor.shape)))
        return self.values[id(tensor)]

    def _frames(self) -> list[FrameType]:
        """Return the frames of the code under watch, outermost first; torch's and ours left out."""
        frames = []
        frame = sys._getframe(1)
        while frame.f_code is not _Watcher.run.__code__:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package not in ("torch", __name__) or _is_forward(frame):
                frames.append(frame)
            assert frame.f_back is not None
            frame = frame.f_back
        return frames[::-1]

    def _here(self) -> Scope | None:
        """Return the scope of the code that is running, opened where it is new."""
        calls = list(self.calls)
        scope: Scope | None = None
        for frame in self._frames():
            if _is_forward(frame):
                # Not so where a class calls the forward that it inherits: that is still one call.
                if calls and calls[0].module is frame.f_locals["self"]:
                    scope = calls.pop(0)
                    scope.frame = frame
            elif not isinstance(frame.f_locals.get("self"), nn.Module):
                scope = self._function_scope(frame, scope)
            # A module's other methods are its inside, like its forward.
        return scope

    def _function_scope(self, frame: FrameType, parent: Scope | None) -> Scope | None:
        code = frame.f_code
        if code.co_name.startswith("<"):  # a lambda or a comprehension belongs to who wrote it
            return parent
        if frame not in self.functions:
            if parent is None:
                self.root.frame = frame
                self.functions[frame] = self.root
            else:
                kind = code.co_qualname.rpartition("<locals>.")[2]
                doc = code.co_consts[0] if code.co_consts else None
                first = _first_line(doc if isinstance(doc, str) else None)
                name = _attribute_with(code, parent.module)
                self.functions[frame] = Scope(name, kind, first, parent, frame=frame)
        return self.functions[frame]


def _does_nothing(thing: Any) -> bool:
    """Tell whether thing is a module that stands where a config wants none, and is not drawn."""
    return isinstance(thing, nn.Identity) or (isinstance(thing, nn.Dropout) and thing.p == 0)


def _is_forward(frame: FrameType) -> bool:
    is_module = isinstance(frame.f_locals.get("self"), nn.Module)
    return is_module and frame.f_code.co_name == "forward"


def _attribute(path: str) -> str:
    """Return the last name of a module's path, with its number if it has one: b, layers.0."""
    parts = path.split(".")
    numbered = len(parts) > 1 and parts[-1].isdigit()
    return ".".join(parts[-2:]) if numbered else parts[-1]


def _attribute_with(code: CodeType, owner: nn.Module | None) -> str:
    """Return the attribute of owner that holds the function with this code, or ""."""
    if owner is None:
        return ""
    held = vars(owner).items()
    return next((name for name, thing in held if getattr(thing, "__code__", None) is code), "")


def _function_name(func: Any) -> str:
    if func.__name__ == "__get__":  # a property, such as .T
        return str(func.__self__.__name__)
    return str(func.__name__)
