"""The "Mixed Precision" tab of TensorBoard.

Imports no Keras and no backend: TensorBoard's server loads it.
"""
