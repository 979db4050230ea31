"""A trained model for inference in 16 bits.

`convert_for_inference` rebuilds a model from its config in other dtypes, with
its weights, and compares the outputs with float32's. The model that it is given
is only read.

Files:

- `diagnose_call.py`: `diagnose_call`, the diagnosis of a function that calls a
  model.
- `convert.py`: `convert_for_inference`, and one conversion: rebuilt, compared,
  reported or refused.
- `assignment.py`: which dtype each layer stores its weights in and computes in.
- `wide_layers.py`: the layers that stay in float32, by the search of the
  diagnosis.
- `rebuild.py`: the same model again, from its config, in other dtypes.
- `comparison.py`: how far outputs are from float32's, the range of each layer,
  and how long a batch takes.
- `report.py`: `ConversionReport`, as text and as HTML.
- `saved_weights.py`: `save_weights`, a checkpoint in 16 bits.
"""
