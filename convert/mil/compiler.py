"""A function's operations as steps: bound to what they need, in order, with what each frees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ssmlx.errors import InputError

from .constants import Constant, Constants
from .ops import Operation, find_operation
from .values import TensorType, read_type

# A value that an earlier step made or the caller gave, or a constant.
Source = str | Constant
Outputs = tuple[tuple[str, TensorType], ...]
READ_STATE, WRITE_STATE = "read_state", "write_state"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation.

    Attributes:
        name: the operation's.
        inputs: where each parameter comes from; a list of places where it takes a list.
        outputs: names and declared types of what it makes, in order.
        operation: how to compute it; None for the two that read and write a state.
        state: the name of the state that these two access; None for the others.
        frees: values that no later step needs.
    """

    name: str
    inputs: Mapping[str, Source | list[Source]]
    outputs: Outputs
    operation: Operation | None = None
    state: str | None = None
    frees: tuple[str, ...] = ()

    def values(self) -> list[str]:
        """Names of the values that it takes and that are no constants."""
        found = []
        for item in self.inputs.values():
            sources = item if isinstance(item, list) else [item]
            found += [source for source in sources if isinstance(source, str)]
        return found

    def __str__(self) -> str:
        made = ", ".join(name for name, _ in self.outputs)
        return f"the operation {self.name}" + (f" of {made}" if made else "")


@dataclass(frozen=True, kw_only=True)
class Code:
    """A function, ready to run.

    Attributes:
        inputs: declared types of what the caller gives, states among them.
        steps: in the order of the program, which is the order in which states change.
        outputs: declared types, and where each comes from.
    """

    inputs: dict[str, TensorType]
    steps: tuple[Step, ...]
    outputs: dict[str, tuple[TensorType, Source]]


def compile_function(message: dict[str, Any], constants: Constants) -> Code:
    """The steps of a Function message.

    Raises:
        InputError: an operation is unknown or bound to inputs that it has not, a value is used
            that nothing made, or the weights are damaged.
    """
    inputs = dict(_named(item) for item in message.get("inputs", []))
    blocks, opset = message.get("block_specializations", {}), message.get("opset", "")
    if opset not in blocks:
        raise _damage(f"a function has no block for {opset or 'no operation set'}", "one")
    compiler, block = _Compiler(constants, inputs), blocks[opset]
    for operation in block.get("operations", []):
        compiler.add(operation)
    outputs = {name: compiler.output(name) for name in block.get("outputs", [])}
    kept = {source for _, source in outputs.values() if isinstance(source, str)}
    return Code(inputs=inputs, steps=_freeing(compiler.steps, kept), outputs=outputs)


class _Compiler:
    """What the operations so far have made.

    Args:
        constants: of the package.
        inputs: declared types of what the caller gives.

    Attributes:
        steps: so far, freeing nothing.
    """

    def __init__(self, constants: Constants, inputs: dict[str, TensorType]) -> None:
        self.steps: list[Step] = []
        self._constants = constants
        self._states = {name for name, kind in inputs.items() if kind.is_state}
        # Constants, and the types of values that are known only when the function runs.
        self._scope: dict[str, TensorType | Constant] = {
            name: kind for name, kind in inputs.items() if not kind.is_state
        }

    def add(self, message: dict[str, Any]) -> None:
        """The next operation: a constant, or a step."""
        name = message.get("type", "")
        outputs = tuple(_named(item) for item in message.get("outputs", []))
        if name == "const":
            made = outputs[0][0] if outputs else ""
            value = message.get("attributes", {}).get("val", {})
            self._scope[made] = self._constants.literal(value, made)
        elif name in (READ_STATE, WRITE_STATE):
            self._add_access(name, message, outputs)
        else:
            self._add_operation(name, message, outputs)

    def output(self, name: str) -> tuple[TensorType, Source]:
        """Type and place of a value that the function gives."""
        source, found = self._source({"name": name}), self._scope[name]
        return (found.kind if isinstance(found, Constant) else found), source

    def _add_access(self, name: str, message: dict[str, Any], outputs: Outputs) -> None:
        arguments = dict(message.get("inputs", {}))
        state = arguments.pop("input", {}).get("arguments", [{}])[0].get("name", "")
        inputs = {parameter: self._source(one) for parameter, one in _single(arguments).items()}
        if state not in self._states or set(inputs) != ({"data"} if name == WRITE_STATE else set()):
            raise _damage(f"the operation {name} accesses {state or 'nothing'}", "a state")
        self._append(Step(name=name, inputs=dict(inputs), outputs=outputs, state=state))

    def _add_operation(self, name: str, message: dict[str, Any], outputs: Outputs) -> None:
        made = ", ".join(output for output, _ in outputs)
        operation = find_operation(name, made)
        arguments = message.get("inputs", {})
        listed = {p: argument for p, argument in arguments.items() if p in operation.lists}
        others = _single({p: argument for p, argument in arguments.items() if p not in listed})
        fixed = {parameter: self._source(one) for parameter, one in others.items()}
        lists = {p: [self._source(one) for one in a["arguments"]] for p, a in listed.items()}
        operation.check([*fixed, *lists], made)
        if name.startswith("constexpr_"):
            known = {p: source for p, source in fixed.items() if isinstance(source, Constant)}
            if len(known) != len(fixed) or len(outputs) != 1:
                raise _damage(f"the operation {name} of {made} takes values", "constants")
            self._scope[made] = self._constants.decompressed(operation, known, outputs[0][1])
            return
        step = Step(name=name, operation=operation, inputs={**fixed, **lists}, outputs=outputs)
        self._append(step)

    def _append(self, step: Step) -> None:
        self._scope.update(step.outputs)
        self.steps.append(step)

    def _source(self, binding: dict[str, Any]) -> Source:
        if "value" in binding:
            return self._constants.literal(binding["value"], "an argument")
        name = binding.get("name", "")
        found = self._scope.get(name)
        if found is None:
            used = name or "a value without name"
            raise _damage(f"the program uses {used} before it is made", "values in their order")
        return found if isinstance(found, Constant) else name


def _single(arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The one binding of each argument.

    Raises:
        InputError: one has several, or none.
    """
    for parameter, argument in arguments.items():
        count = len(argument.get("arguments", []))
        if count != 1:
            raise _damage(f"the program binds {parameter} to {count} values", "one value")
    return {parameter: argument["arguments"][0] for parameter, argument in arguments.items()}


def _damage(found: str, expected: str) -> InputError:
    return InputError(
        found, expected=expected, do="export the model again, the package may be damaged"
    )


def _named(message: dict[str, Any]) -> tuple[str, TensorType]:
    name = message.get("name", "")
    return name, read_type(message.get("type", {}), name)


def _freeing(steps: list[Step], kept: set[str]) -> tuple[Step, ...]:
    """The steps, each with the values that it is the last to use; none of `kept`."""
    seen, freeing = set(kept), list[Step]()
    for step in reversed(steps):
        names = [*step.values(), *(name for name, _ in step.outputs)]
        frees = tuple(name for name in dict.fromkeys(names) if name not in seen)
        seen.update(frees)
        freeing.append(replace(step, frees=frees))
    return tuple(reversed(freeing))
