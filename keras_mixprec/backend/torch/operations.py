"""Effects of torch's operations on memory and on random numbers."""

import functools

import torch

# Operations write to these arguments, although no schema marks them.
_STATISTICS = ("running_mean", "running_var")


class _Kind:
    """The effects of an operation.

    Attributes:
        makes: Boolean. True if its results have memory of their own.
        draws: Boolean. True if it draws random numbers.
    """

    def __init__(self, func):
        schema = func._schema
        self._written = [
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.name in _STATISTICS
            or (argument.alias_info and argument.alias_info.is_write)
        ]
        self.makes = not any(result.alias_info for result in schema.returns)
        self.draws = torch.Tag.nondeterministic_seeded in func.tags

    def written(self, args, kwargs) -> list:
        """Returns the tensor arguments that the operation writes to."""
        if not self._written:
            return []
        return tensors_in(
            [
                args[place] if place < len(args) else kwargs.get(name)
                for place, name in self._written
            ]
        )


kind_of = functools.cache(_Kind)


def tensors_in(structure) -> list:
    """Returns the tensors of a structure."""
    if isinstance(structure, torch.Tensor):  # The most common case.
        return [structure]
    leaves = torch.utils._pytree.tree_leaves(structure)
    return [x for x in leaves if isinstance(x, torch.Tensor)]
