"""The "Mixed Precision" tab of TensorBoard, and the same page without it.

Imports no Keras and no backend: TensorBoard's server loads it.

Files:

- `loader.py`: what TensorBoard loads; it imports the plugin.
- `endpoints.py`: what the page asks for, and the answers.
- `plugin.py`: the page and its data, served by TensorBoard.
- `log_folder.py`: the runs of a folder, read from their files as they grow.
- `page_server.py`: the page and its data, served by `keras-mixprec serve`.
- `static/`: the page. It starts at `index.js`; a file is named like what it
  shows. The colour of a value is chosen in `palette.js`, from those of
  `colors.js`, and its words in `metrics.js`.
"""
