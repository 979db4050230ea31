"""The "Mixed Precision" tab of TensorBoard.

Imports no Keras and no backend: TensorBoard's server loads it.

Files:

- `loader.py`: what TensorBoard loads; it imports the plugin.
- `plugin.py`: what is served to the page.
- `provider_source.py`: a run's log as a running TensorBoard serves it.
- `static/`: the page. It starts at `index.js`; a file is named like what it
  shows. The colour of a value is chosen in `palette.js`, from those of
  `colors.js`, and its words in `metrics.js`.
"""
