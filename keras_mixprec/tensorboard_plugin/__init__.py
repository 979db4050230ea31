"""The "Mixed Precision" tab of TensorBoard, also as a page of its own.

TensorBoard's server loads this package, so it imports neither Keras nor a
backend.

Files:

- `loader.py`: the entry point for TensorBoard, which imports the plugin.
- `endpoints.py`: the answers to the requests of the page.
- `plugin.py`: serves the page in TensorBoard.
- `page_server.py`: serves the page for `keras-mixprec serve`.
- `static/`: the page, which starts at `index.js`. `palette.js` chooses the
  color of a value, and `metrics.js` chooses the words.
"""
