"""A trained model for inference in 16 bits.

`convert_for_inference` rebuilds a model from its config in other dtypes, with
its weights, and compares the outputs with float32's. The model that it is given
is only read.

Files:

- `diagnose_call.py`: `diagnose_call`, the diagnosis of a function that calls a
  model.
- `convert.py`: `convert_for_inference`, what a caller gives and gets.
- `conversion.py`: one conversion: rebuilt, compared, reported.
- `automatic.py`: `"auto"`, the format that suits the model and the device.
- `wide_layers.py`: the smallest set of layers that stays in float32.
- `least_exact.py`: which layer of a converted model rounds the most.
- `rescale_weights.py`: powers of two moved from one layer's weights into the
  next one's, so that activations fit 16 bits.
- `graph_values.py`: what the tensors of a graph are on a batch.
- `clamp_outputs.py`: outputs clamped to a format's maximum, where it does not
  matter.
- `variants.py`: the model with these two changes.
- `refusal.py`: why a conversion is refused.
- `lambdas.py`: `Lambda` layers that cannot be rebuilt.
- `rebuild.py`: the same model again, from its config, in other dtypes.
- `storage.py`: which dtype each layer stores its weights in and computes in.
- `runnable.py`: layers whose code raises in the dtypes that were planned.
- `loading.py`: what a `.keras` file of the result loads as.
- `exports.py`: what each format of `model.export` keeps.
- `float32_outputs.py`: outputs in float32 of a model that ends in 16 bits.
- `calibration.py`: the inputs that a conversion is checked on.
- `activations.py`: the range of what layers take and return.
- `drift.py`: how far outputs are from those in float32.
- `latency.py`: how long a batch takes in two models, in turns.
- `saved_weights.py`: `save_weights`, a checkpoint in 16 bits.
- `report.py`: `ConversionReport`.
- `report_text.py`: a report as text, and as HTML.
"""
