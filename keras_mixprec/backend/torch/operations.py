"""Effects of torch's operations on memory and on random numbers."""

import functools

import torch

# Arguments that operations write to, although the schemas of the operations do
# not mark them as written.
_STATISTICS = ("running_mean", "running_var")


class _Kind:
    """The effects of an operation.

    Attributes:
        makes: Boolean. True if the operation's results have their own memory.
        draws: Boolean. True if the operation draws random numbers.
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
    # First test for a single tensor, the most common structure.
    if isinstance(structure, torch.Tensor):
        return [structure]
    leaves = torch.utils._pytree.tree_leaves(structure)
    return [x for x in leaves if isinstance(x, torch.Tensor)]
