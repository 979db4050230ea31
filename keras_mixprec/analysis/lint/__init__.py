"""Checks of a model before training: what 16 bits will break or not speed up.

A rule reads a view of the model and yields findings, the most severe of which
come first. Three sources say what it can know: the layers as they are, the
operations traced inside their calls, and, where samples are given, what these
make of them. A new rule is a function with a docstring and an example on either
side; docs/architecture.md says how to add one.

Files:

- `lint.py`: `lint`, which runs every rule.
- `rule.py`, `table.py`: what a rule is, and the list of files that hold rules.
- `findings.py`: what is returned, and how it is applied.
- `model_view.py`: what a rule reads of a model and its data.
- `shape_rules.py`: sizes of matrix products.
- `constant_rules.py`: numbers that a layer holds: arguments, weights and
  statistics.
- `sensitive_rules.py`: layers and losses that need more than 16 bits.
- `cast_rules.py`: the dtype of each layer, and casts between them.
- `optimizer_rules.py`: the optimizer, its variables and loss scaling.
- `own_step.py`: what a user's own `train_step` calls.
- `data_rules.py`: what a model is fed.
- `dry_run.py`, `dry_run_rules.py`: a step on samples in float32 and in 16 bits.
- `flow.py`: what flows where among the traced operations.
- `traced_rules.py`: operations inside of layers' own calls.
- `traced_constant_rules.py`: constants and integers that 16 bits cannot hold.
- `traced_data_rules.py`: the numbers that operations make of given samples.
- `traced_findings.py`: findings about single operations, one for each layer.
- `autocast_lists.py`: what peers compute in float32 whatever they are given.
"""
