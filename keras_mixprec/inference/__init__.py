"""Converts a trained model to 16 bits for inference.

`convert_for_inference` rebuilds a model from its config in other dtypes, copies
its weights, and compares the outputs with float32's. The given model does not
change.

Files:

- `diagnose_call.py`: `diagnose_call`, the diagnosis of a function that calls a
  model.
- `convert.py`: `convert_for_inference`, which rebuilds, compares and reports.
- `assignment.py`: the dtypes in which each layer stores its weights and
  computes.
- `wide_layers.py`: finds the layers that stay in float32, with the search of
  the diagnosis.
- `rebuild.py`: rebuilds a model from its config in other dtypes.
- `comparison.py`: the drift of outputs, the range of each layer, and the time
  of a batch.
- `report.py`: `ConversionReport`, as text and as HTML.
- `saved_weights.py`: `save_weights`, a checkpoint in 16 bits.
"""
