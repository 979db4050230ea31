"""Checks of a model before training: what 16 bits will break or not speed up.

A rule reads a view of the model and yields findings. The most severe come
first. Two sources say what it can know: the layers as they are, and, where
samples are given, what a step makes of them. A new rule is a function with a
docstring and an example on either side; docs/architecture.md says how to add
one.

Files:

- `lint.py`: `lint`, which runs every rule, and the list of files with rules.
- `rule.py`: what a rule is.
- `findings.py`: what is returned, and how it is applied.
- `model_view.py`: what a rule reads of a model and its data.
- `data_rules.py`: what a model is fed, and a diagnosis of a step on samples.
- `layer_rules.py`: numbers that layers hold, their dtypes, matrix products.
- `optimizer_rules.py`: the optimizer, its variables and loss scaling.
"""
