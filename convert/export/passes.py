"""A pass of the Core ML converter; importing this module makes it known there."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import register_pass

NAME = "ssmlx::drop_whole_updates"


@register_pass(namespace="ssmlx", override=True)
class drop_whole_updates(AbstractGraphPass):  # noqa: N801, the name is the pass's
    """An assignment to a whole tensor is the new tensor: one copy of the cache less a layer."""

    def apply(self, prog: Any) -> None:
        """Rewrite every function of `prog`."""
        for block in prog.functions.values():
            for op in list(block.operations):
                if op.op_type == "slice_update" and op.x.shape == op.update.shape:
                    _replace(block, op)


def _replace(block: Any, op: Any) -> None:
    block.replace_uses_of_var_after_op(
        anchor_op=op, old_var=op.outputs[0], new_var=op.update, force_replace=True
    )
    block.remove_ops([op])
