"""Checks a model for faults in 16 bits before training.

A rule reads a view of the model and yields findings. Most rules read the layers
and the optimizer. If there are samples, one rule runs a step on them.
docs/architecture.md says how to add a rule.

Files:

- `lint.py`: `lint`, which runs every rule, and the list of rules.
- `findings.py`: `Rule`, and the findings, which can repair a model.
- `model_view.py`: the view of a model and its data.
- `data_rules.py`: rules about the data, and a diagnosis of a step on samples.
- `layer_rules.py`: rules about the numbers and dtypes of layers.
- `optimizer_rules.py`: rules about the optimizer and loss scaling.
"""
