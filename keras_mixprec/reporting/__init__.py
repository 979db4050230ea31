"""The log of a training run, written so that TensorBoard reads it, and read.

That imports no backend and no Keras: `tensorboard.summary` and its
`EventFileWriter` import the whole of TensorFlow wherever it is installed,
which costs seconds and memory in a run on JAX or PyTorch. Who reads a log knows
nothing of it but its schema.

Files that write:

- `run_log.py`: `RunLog`, what the monitor writes, in one place; `NoLog`
  discards everything.
- `event_file.py`: TensorBoard's event files: records, checksums, and where a
  run stopped.
- `append_file.py`: files that wait for a full disk.
- `summaries.py`: the protocol buffers that TensorBoard draws.
- `schema.py`: the names of what a run's folder holds.
- `layer_tables.py`: what was measured of each layer, by step, of bounded size.
- `text_formats.py`: JSON that every reader accepts, and tables in Markdown.

Files that read. Facts come first, findings are functions of them, and cards
tell both; no function changes what another has made.

- `run_files.py`: the tables of a run, and which runs there are;
  `read_events.py`: events and rows of layers, checked as they are read;
  `event_kinds.py`: every kind of event, with its fields and its sentence.
- `run.py`: `Run`, the frozen record of all of it; `layers.py`: its layers, and
  who is to blame for what is not finite; `grid.py`: one metric by step;
  `bad_input.py`: batches that were not finite.
- `facts.py`, `headline.py`: the run in one sentence: the cause, what was done
  about it, what it cost; `what_next.py`, `fixes.py`: what is left to do, also
  as code; `flat_loss.py`, `lowered_scale.py`, `performance.py`: what else is
  found.
- `cards.py`: what text, page, notebook and `to_dict` are made of; `told.py`:
  what events say.
- `report.py`: `load_report`; `report_page.py`: the page of the tab with its
  data in it; `runs.py`: runs side by side.
- `ranges.py`, `format_limits.py`, `what_if.py`: what layers would do in another
  format, and a plan from that.
"""
