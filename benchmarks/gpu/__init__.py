"""Every figure that only a GPU can give, in one go that may be cut short.

`python -m benchmarks.gpu` needs Keras, torch or JAX and this repository: no
TensorFlow, no pytest, no network.

Files:

- `__main__.py`: the command line.
- `run.py`: the plan of the time; starts processes, and ends them.
- `work.py`: what runs in each of these: the items of one part.
- `parts.py`: what the parts measure.
- `results.py`: the file of JSON lines, written as it goes, and read to resume.
- `table.py`: the same in Markdown.
"""
