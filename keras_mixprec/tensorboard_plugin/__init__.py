"""The "Mixed Precision" tab of TensorBoard, also as a page without it.

It does not import Keras or a backend, because TensorBoard's server loads it.

Files:

- `loader.py`: the entry point for TensorBoard, which imports the plugin.
- `endpoints.py`: the answers to the requests of the page.
- `plugin.py`: serves them in TensorBoard.
- `page_server.py`: serves them in `keras-mixprec serve`.
- `static/`: the page, which starts at `index.js`. `palette.js` chooses the
  colour of a value, and `metrics.js` its words.
"""
